"""Scores of mutations from an alignment, on families whose law is known."""

import numpy as np
import pytest

from d2plm.core.vocabulary import CANONICAL_START, Tokens, encode
from d2plm.families import alignment, mutation_effects
from d2plm.families.alignment import GAP, Letters, align_to, letters_of, sequence_weights
from d2plm.families.mutation_effects import FamilyEffects, blosum62_effects
from d2plm.families.pairs import PairTable, neighbours
from d2plm.families.variants import Variant
from tests.conftest import Logged, MonkeyPatch
from tests.unit.families import known_sites, simulated
from tests.unit.families.known_sites import aligned_rows, likeliest, members, singles
from tests.unit.families.simulated import Array, spearman, with_pairs


def correlations(aligned: Letters, energy: Array) -> Array:
    """Of the score and of the profile with the true effects on the first member."""
    found = simulated.of_first(aligned).effects(simulated.all_singles(aligned[0]))
    truth = simulated.true_effects(energy, aligned[0])
    return np.array([spearman(found[term], truth) for term in ("score", "profile")])


def test_pairs_add_where_columns_depend_on_each_other_and_cost_nothing_where_by_descent() -> None:
    assert np.divide(*correlations(*simulated.on_a_tree(0, length=40, members=200))) > 0.97
    aligned, *law = with_pairs(0, members=250)
    assert np.subtract(*correlations(aligned, simulated.energy_of_first(aligned, *law))) > 0.1


def test_several_changes_see_half_of_each_other() -> None:
    aligned, *_ = with_pairs(0, length=12, members=120)
    effects, wild_type = simulated.of_first(aligned), aligned[0]
    places, mutants = (2, 5, 9), tuple((wild_type[[2, 5, 9]] + [1, 2, 3]) % 20)
    tokens = tuple(int(one) + CANONICAL_START for one in mutants)
    one = [Variant((i,), (to,)) for i, to in zip(places, tokens, strict=True)]
    both = effects.effects([Variant(places, tokens), *one])
    table, terms = effects._pairs
    chosen, singles_pairs = [*places], both["pairs"][1:]
    own_terms = terms[chosen, [*mutants]] - terms[chosen, wild_type[chosen]]
    np.testing.assert_allclose(singles_pairs, effects._pair_scale * own_terms, rtol=1e-6)
    interaction = both["pairs"][0] - singles_pairs.sum()
    brute = 0.0
    visible = np.ones((1, 12), dtype=bool)
    for place, to in zip(places, mutants, strict=True):
        odds = table.log_odds(place) * table.coupling[place][None, :, None]
        for other, other_to in zip(places, mutants, strict=True):
            new, old = (odds[to, other], odds[wild_type[place], other])
            change = new[other_to] - new[wild_type[other]] - old[other_to] + old[wild_type[other]]
            brute += float(change) * table.scales(place, visible)[0] / 2
    assert interaction == pytest.approx(effects._pair_scale * brute, rel=1e-4, abs=1e-6)


def test_columns_are_independent_of_the_order_of_members_and_of_copies_of_the_protein() -> None:
    variants, family = singles()[::7], members(20)
    made = FamilyEffects.of(likeliest(), family)
    once = made.effects(variants)
    again = FamilyEffects.of(likeliest(), [likeliest(), *family[::-1]]).effects(variants)
    for name, term in once.items():
        np.testing.assert_allclose(again[name], term, atol=1e-5)
    same = Variant((4,), (int(likeliest()[4]),))
    for term in made.effects([Variant(), same]).values():
        np.testing.assert_allclose(term, 0, atol=1e-12)


def test_it_finds_the_effects_of_a_family_of_independent_sites() -> None:
    variants, measured = singles(), known_sites.measured_effects()
    made = [FamilyEffects.of(likeliest(), members(number)) for number in (10, 60)]
    few, many = (spearman(one.effects(variants)["score"], measured) for one in made)
    assert few < many > 0.69  # of 0.87 that the noise leaves


@pytest.mark.parametrize("text", ["M", "MX", "X", "MKTAYIAKUQRBZO", "W" * 300])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_every_variant_has_a_score_in_any_family(text: str, number: int, caplog: Logged) -> None:
    strange = [encode("G" * 40), encode("X" * 5), encode("M"), encode("MKTAUIAKQRXX")][:number]
    protein = encode(text)
    variants = [Variant((len(text) - 1,), (CANONICAL_START + to,)) for to in range(20)]
    for term in FamilyEffects.of(protein, strange).effects(variants).values():
        assert np.isfinite(term).all()
    assert "too few" in caplog.text


def test_blosum62_is_that_of_the_table() -> None:
    protein = encode("WAR")
    tokens = encode("ARND")
    changes = [Variant((0,), (int(t),)) for t in tokens] + [Variant((1, 2), (int(tokens[1]),) * 2)]
    half_bits = blosum62_effects(letters_of(protein), changes) * 2 / np.log(2)
    np.testing.assert_allclose(half_bits, [-3 - 11, -3 - 11, -4 - 11, -4 - 11, -1 - 4])


def test_a_large_family_is_sampled_for_its_pairs(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(mutation_effects, "MEMBERS", 60)
    aligned, *_ = with_pairs(1, length=15, members=200)
    effects = simulated.of_first(aligned)
    table, _ = effects._pairs
    assert len(table.seen) == 60
    assert np.square(table.seen).sum() / 15 == pytest.approx(effects.effective_number, rel=1e-4)


def test_a_law_holds_where_the_nearest_member_has_a_gap() -> None:
    """Votes differ by factors that float32 does not hold."""
    near = np.zeros((1, 200), dtype=np.int8)
    far = np.ones((30, 200), dtype=np.int8)
    near[:, 7], far[:, 7] = GAP, 3
    aligned, profile = np.concatenate([near, far]), np.full((200, 20), 0.05)
    law = neighbours(np.zeros((1, 200), dtype=np.int8), aligned, np.ones(31), profile, 0.8)
    assert law[0, 7, 3] == pytest.approx((30 + 3 * 0.05) / 33, rel=1e-6)


def test_members_stand_beside_the_residues_they_align_to() -> None:
    protein = encode("MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDG")
    without: Tokens = np.delete(protein, [10, 11])
    with_more = np.insert(protein, 20, encode("WWW"))
    relatives = [protein, without, with_more, protein[:15], encode("G" * 40)]
    found = alignment.observations(letters_of(protein), align_to(protein, relatives))
    # Equal where they are aligned, or less than half of the protein: no observation.
    assert found.shape == (0, 43)
    changed = without.copy()
    changed[0] = encode("L")[0]
    (row,) = alignment.observations(letters_of(protein), align_to(protein, [changed, changed]))
    assert (row[10:12] == GAP).all()
    assert (row[12:] == protein[12:] - CANONICAL_START).all()


def test_weights_count_clusters_however_many_are_compared_at_once(monkeypatch: MonkeyPatch) -> None:
    aligned = aligned_rows("AAAAAAAAAA", "AAAAAAAAAC", "AAAAAAAA--", "CCCCCCCCCC", "CCCCCDDDDD")
    np.testing.assert_allclose(sequence_weights(aligned), [1 / 3, 1 / 3, 1 / 3, 1, 1])
    aligned, _ = simulated.on_a_tree(4, length=20, members=60)
    aligned[np.random.default_rng(0).random(aligned.shape) < 0.2] = GAP
    once = sequence_weights(aligned)
    monkeypatch.setattr("d2plm.families.alignment._BLOCK", 7)
    np.testing.assert_allclose(sequence_weights(aligned), once)


def test_a_neighbours_law_hides_the_column_it_predicts() -> None:
    """Against the definition, a column at a time."""
    random = np.random.default_rng(0)
    aligned = random.integers(0, 21, (12, 6)).astype(np.int8)
    weights, profile = random.random(12) + 0.1, random.dirichlet(np.ones(20), 6)
    query = random.integers(0, 21, (1, 6)).astype(np.int8)
    (law,) = neighbours(query, aligned, weights, profile, 0.7)
    for i in range(6):
        shared = (aligned == query) & (query < GAP)
        votes = weights * np.exp(0.7 * np.delete(shared, i, 1).sum(1)) * (aligned[:, i] < GAP)
        counts = np.bincount(aligned[:, i], votes, 21)[:GAP]
        depth = votes.sum() ** 2 / (votes**2).sum()
        expected = (depth * counts / votes.sum() + 3 * profile[i]) / (depth + 3)
        np.testing.assert_allclose(law[i], expected, rtol=1e-4)


def test_a_column_does_not_predict_itself_and_gaps_predict_nothing() -> None:
    aligned, *_ = with_pairs(2, length=10, members=80)
    weights, profile = np.ones(80), alignment.column_profile(aligned, np.ones(80))
    predicted = neighbours(aligned, aligned, weights, profile, 0.3, np.arange(80))
    table = PairTable(aligned, weights, profile, predicted)
    queries = np.repeat(aligned[:1], 3, axis=0)
    queries[1, 4] = (queries[1, 4] + 1) % 20
    queries[2] = GAP
    terms = table.terms(queries)
    np.testing.assert_allclose(terms[1, 4], terms[0, 4], atol=1e-6)
    assert not np.allclose(np.delete(terms[1], 4, 0), np.delete(terms[0], 4, 0), atol=1e-3)
    np.testing.assert_array_equal(terms[2], 0)
