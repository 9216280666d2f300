"""New members of a family: their law by enumeration, their paths, and families of any kind."""

import math
from collections import Counter
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from d2plm.core.errors import ConfigError
from d2plm.core.vocabulary import CANONICAL, CANONICAL_START, PROTEIN, decode, encode
from d2plm.data.family import Family
from d2plm.families import designs as designs_module
from d2plm.families.alignment import GAP, family_hmm, letters_of, one_hot, text_of
from d2plm.families.designs import LEAST_IDENTITY, MOST_MUTATED, FamilyDesigns, PairTerms, Wishes
from d2plm.families.pairs import PairTable
from d2plm.families.paths import PathSampler, in_columns, paths_of
from d2plm.generation.sampler_settings import Sampling
from tests.conftest import Logged, MonkeyPatch

P_VALUE = 0.001
LENGTH = 6
MEMBERS = ["ACDWCA", "ACDACD", "DCAWAA"]  # too few for pairs
LETTERS = [CANONICAL.index(one) for one in "ACD"]
AVOIDED = frozenset(range(20)) - {*LETTERS}
SEQUENCES = np.array(list(product(range(3), repeat=LENGTH)))
DRAWS = 2_500

TWELVE = ["MK" + c + "AYIAKQRQISFVKSHFSRQ" for c in "ACDEFGHIKLMN"]

Floats = NDArray[np.float64]


def descendants(number: int, length: int, share: float) -> tuple[NDArray[np.int64], Family]:
    """Copies of a random protein, a share of their residues drawn anew: rows, and the family."""
    random = np.random.default_rng(0)
    root, changed = random.integers(GAP, size=length), random.random((number, length)) < share
    rows = np.where(changed, random.integers(GAP, size=(number, length)), root)
    return rows, family(["".join(CANONICAL[a] for a in row) for row in rows])


def family(texts: list[str]) -> Family:
    return Family.of([*map(encode, texts)], 1, [f"m{i}" for i in range(len(texts))])


@pytest.fixture(scope="module")
def toy() -> FamilyDesigns:
    made = FamilyDesigns(family(MEMBERS))
    assert made.length == LENGTH
    assert all(path.tolist() == [*range(LENGTH)] for path in made.paths)
    return made


def descended(toy: FamilyDesigns, member: str, mutated: float, keep: dict[int, int]) -> Floats:
    """p(x) of SEQUENCES: Π_i [(1 − μ)·(x_i = m_i) + μ·D_i(x_i)] where x has what is kept."""
    letters, own = np.array(LETTERS)[SEQUENCES], letters_of(encode(member))
    profile = np.exp(toy.log_profile[:-1])[np.arange(LENGTH), letters]
    p = ((1 - mutated) * (letters == own) + mutated * profile).prod(1)
    return np.asarray(p * np.all([letters[:, i] == a for i, a in keep.items()], axis=0))


def require_drawn_from(p: Floats, drawn: list[Any]) -> None:
    letters = np.array([letters_of(one.tokens) for one in drawn])
    index = np.array([LETTERS.index(a) for a in letters.ravel()]).reshape(letters.shape)
    counts = np.bincount(index @ 3 ** np.arange(LENGTH - 1, -1, -1), minlength=len(p))
    assert not counts[p == 0].any()
    require_counts(p, counts)


def require_counts(p: Floats, counts: NDArray[np.int64]) -> None:
    order, number = np.argsort(p), counts.sum()
    rare = order[np.cumsum(p[order]) * number < 10]  # together, as one cell
    rest = np.setdiff1d(np.flatnonzero(p), rare)
    expected = np.append(p[rest], p[rare].sum()) * number
    seen = np.append(counts[rest], counts[rare].sum())
    kept = expected > 0
    assert stats.chisquare(seen[kept], expected[kept]).pvalue > P_VALUE


@pytest.mark.parametrize(
    ("settings", "keep"),
    [
        ({}, {}),
        ({"sampler": "remdm", "remdm_eta": 0.3, "steps": 6}, {}),
        ({}, {1: LETTERS[1]}),
        ({"steps": 3}, {2: LETTERS[2], 5: LETTERS[0]}),
    ],
)
def test_designs_are_drawn_from_the_mixture_over_the_members(
    toy: FamilyDesigns, settings: dict[str, Any], keep: dict[int, int], monkeypatch: MonkeyPatch
) -> None:
    """Avoided letters and kept residues condition the law, and are not mended afterwards."""
    monkeypatch.setattr(toy, "closeness", lambda temperature, identity: (0.4, 1.0))
    sampling = Sampling(temperature=1.0, seed=3, **settings)
    drawn = toy.design([None] * DRAWS, sampling, Wishes(keep, AVOIDED))
    p = np.sum([descended(toy, member, 0.4, keep) for member in MEMBERS], axis=0)
    require_drawn_from(p / p.sum(), drawn)


@pytest.mark.parametrize("keep", [{}, {0: LETTERS[2]}])
def test_a_member_is_mutated_at_as_many_places_as_is_said(
    toy: FamilyDesigns, keep: dict[int, int], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(toy, "closeness", lambda temperature, identity: (0.3, 1.0))
    differ = (np.array(LETTERS)[SEQUENCES] != letters_of(encode(MEMBERS[1]))).sum(1) == 2
    p = descended(toy, MEMBERS[1], 0.3, keep) * differ
    wishes = Wishes(keep, AVOIDED, near=(1, 2))
    drawn = toy.design([None] * DRAWS, Sampling(temperature=1.0, seed=1), wishes)
    require_drawn_from(p / p.sum(), drawn)
    assert {one.kept for one in drawn} == {LENGTH - 2}
    with pytest.raises(ConfigError, match=r"near.*m1:7"):
        toy.design([None], Sampling(), Wishes(near=(1, 7)))


def exact_toy() -> tuple[FamilyDesigns, Floats]:
    """Designs whose pairs are the exact denoiser of a known law, and the law of SEQUENCES."""
    toy = FamilyDesigns(family(MEMBERS))
    law = 3.0 ** (SEQUENCES[:, 1:] == SEQUENCES[:, :-1]).sum(1) * (1 + SEQUENCES[:, 0])
    law /= law.sum()
    log_profile = torch.from_numpy(toy.log_profile[:-1]).float()

    @cache
    def log_p(row: tuple[int, ...]) -> Floats:
        """float64 [LENGTH, 3]: of a letter given the others."""
        digits = np.array([-1 if a == GAP else LETTERS.index(a) for a in row])
        differs = (digits != SEQUENCES) & (digits >= 0)
        others_agree = differs.sum(1, keepdims=True) - differs == 0
        p = np.einsum("s,si,sib->ib", law, others_agree, np.eye(3)[SEQUENCES])
        return np.asarray(np.log(np.maximum(p / p.sum(1, keepdims=True), 1e-30)))

    def exact(letters: torch.Tensor) -> torch.Tensor:
        found = torch.full((*letters.shape, GAP), -1e4)
        rows = np.array([log_p(tuple(row)) for row in letters.tolist()])
        found[..., LETTERS] = torch.from_numpy(rows).float()
        return found - log_profile

    toy.pairs = exact  # type: ignore[assignment]  # as callable
    return toy, law


def test_residues_that_depend_on_each_other_are_drawn_jointly(monkeypatch: MonkeyPatch) -> None:
    """An exact denoiser of a known law in the place of the pairs."""
    toy, joint = exact_toy()
    monkeypatch.setattr(toy, "closeness", lambda temperature, identity: (1.0, 1.0))
    drawn = toy.design([None] * DRAWS, Sampling(temperature=1.0, seed=5))
    require_drawn_from(joint, drawn)


def test_the_bound_of_a_protein_is_at_least_its_information() -> None:
    """Equal where its path is given; the letters that are predicted are not visible."""
    toy, joint = exact_toy()
    number, random = int(joint.argmin()), np.random.default_rng(0)
    protein = encode("".join("ACD"[one] for one in SEQUENCES[number]))
    sampler, path = toy.path_sampler, np.arange(LENGTH, dtype=np.int32)
    p = 0.0
    for one in map(np.array, product(range(LENGTH + 1), repeat=LENGTH)):
        if (np.diff(one[one < LENGTH]) <= 0).any():
            continue  # columns have an order
        inside = one < LENGTH
        fits = (SEQUENCES[:, one[inside]] == SEQUENCES[number][inside]).all(1)
        between = toy.log_profile[-1][[LETTERS[a] for a in SEQUENCES[number][~inside]]]
        p += np.exp(sampler.log_p(one) + between.sum()) * joint[fits].sum()
    drawn = np.array([toy.bound(protein, random) for _ in range(100)])
    assert drawn.mean() > -np.log(p) - 3 * drawn.std() / 100**0.5
    sampler.sample = lambda letters, number, random: path[None]  # type: ignore[method-assign]
    for unknown in (0, 2):  # residues that are not canonical
        protein[:unknown] = encode("X")
        fits = (SEQUENCES[:, unknown:] == SEQUENCES[number, unknown:]).all(1)
        drawn = np.array([toy.bound(protein, random) for _ in range(100)]) + sampler.log_p(path)
        assert abs(drawn.mean() + np.log(joint[fits].sum())) < 4 * drawn.std() / 100**0.5
    protein[:] = encode("X")
    assert toy.bound(protein, random) == pytest.approx(-sampler.log_p(path))


def test_where_pairs_repeat_a_few_unlike_members_they_get_weaker() -> None:
    found = FamilyDesigns(descendants(16, 100, 0.4)[1])
    share, factor = found.closeness(0.5, None)
    assert share == MOST_MUTATED and 0 < factor < 1
    assert found._trial(0.5, share, factor) < LEAST_IDENTITY + 0.05 < found._trial(0.5, share, 1.0)
    assert found.closeness(0.5, 0.3) == pytest.approx((1, 0))  # as far as it goes


def test_a_template_and_a_length_are_drawn_along_a_path_of_the_profile() -> None:
    text = "".join(np.random.default_rng(0).permutation([*CANONICAL]))
    made = FamilyDesigns(family([text, text[:9] + "W" + text[10:], text[:15]]))
    template = encode(text).copy()
    template[5:12] = PROTEIN.mask
    masks = np.full(18, PROTEIN.mask, dtype=np.uint8)
    wishes = Wishes(keep={7: CANONICAL.index("W")})
    first, second = made.design([template, masks], Sampling(seed=2), wishes)
    assert decode(first.tokens)[7] == "W"
    given = template != PROTEIN.mask
    assert (first.tokens[given] == template[given]).all()
    assert len(second.tokens) == 18
    assert (first.tokens != PROTEIN.mask).all()
    other = CANONICAL.index(text[1])  # which the template contradicts in the first column
    with pytest.raises(ConfigError, match=r"keep='. in column 1'"):
        made.design([template], Sampling(), Wishes(keep={0: other}))


def brute_force(hmm: Any, sampler: PathSampler, letters: NDArray[np.int8]) -> dict[Any, float]:
    """p(path | letters) by the product of every sequence of states, the silent ones left out."""
    length = hmm.M
    mm, mi, md, im, ii, dm, dd = np.array(hmm.transition_probabilities, dtype=np.float64).T
    given, end = sampler.transitions_SS, sampler.stop_S
    stop = end + given[:, -1]  # of leaving the columns

    def step(own: int, to: int) -> float:
        column = own - length  # of an insertion
        if own in (0, 2 * length) or to == 2 * length:
            return float(given[own, to])
        if column > 0:
            return float(ii[column] if to == own else im[column] * (to == column + 1))
        if to == own + length:
            p = mi[own]
        elif to == own + 1:
            p = mm[own]
        elif own < to <= length:
            p = md[own] * dd[own + 1 : to - 1].prod() * dm[to - 1]
        else:
            p = 0.0
        return float((1 - stop[own]) * p)

    found = Counter[Any]()
    for states in product(range(2 * length + 1), repeat=len(letters)):
        columns = tuple(one - 1 if 1 <= one <= length else length for one in states)
        pairs = [(i, a) for i, a in zip(columns, letters, strict=True) if i < length and a < GAP]
        p = math.prod(step(*both) for both in pairwise((0, *states))) * end[states[-1]]
        if p:
            found[columns] += p * math.prod(sampler.odds_L20[both] for both in pairs)
    return {path: p / sum(found.values()) for path, p in found.items()}


@pytest.mark.parametrize("shown", [[], [0], [1, 3]])
def test_paths_are_drawn_from_their_posterior(shown: list[int]) -> None:
    members = [encode(one) for one in ("ACDE", "ACE", "WACDE", "ACDEF")]
    hmm = family_hmm(members)
    sampler = PathSampler(hmm, paths_of(hmm, members))
    letters = np.full(4, GAP, dtype=np.int8)
    letters[shown] = letters_of(encode("ACDE"))[shown]
    expected = brute_force(hmm, sampler, letters)
    assert (sampler.transitions_SS.sum(1) + sampler.stop_S < 1 + 1e-9).all()  # p(path) is one
    if not shown:
        log_p = np.array([sampler.log_p(np.array(path)) for path in expected])
        ratios = np.exp(log_p) / [*expected.values()]  # p(length)
        np.testing.assert_allclose(ratios, ratios[0], rtol=1e-6)
    drawn = sampler.sample(letters, 5_000, np.random.default_rng(0))
    counts = Counter(map(tuple, drawn.tolist()))
    assert {*counts} <= {*expected}
    require_counts(np.array([*expected.values()]), np.array([counts[path] for path in expected]))


def test_a_path_puts_residues_in_the_columns_of_the_alignment() -> None:
    members = [encode(one) for one in ("ACDEFGHIK", "ACDWWEFGHIK", "CDEFGHI")]
    hmm = family_hmm(members)
    expected = ["ACDEFGHIK", "ACDEFGHIK", "-CDEFGHI-"]
    for path, member, text in zip(paths_of(hmm, members), members, expected, strict=True):
        assert text_of(in_columns(path, letters_of(member), hmm.M)) == text


@pytest.mark.parametrize("entries", [10**9, 400 * 9 * 5])
def test_pair_terms_are_those_of_the_table(entries: int, monkeypatch: MonkeyPatch) -> None:
    """All columns at once, and in windows, against the sum over the visible letters."""
    monkeypatch.setattr(designs_module, "TABLE_ENTRIES", entries)
    random, length = np.random.default_rng(0), 9
    aligned = random.integers(0, 21, (12, length)).astype(np.int8)
    weights, profile = random.random(12) + 0.5, random.dirichlet(np.ones(20), length)
    independent = np.broadcast_to(profile, (*aligned.shape, 20))
    table = PairTable(aligned, weights, profile, independent)
    seen = one_hot(aligned).T @ weights
    terms = PairTerms(table, seen, 2.0)
    row = aligned[0].copy()
    row[[2, 5]] = GAP
    found = terms(torch.from_numpy(row[None]).long())[0].numpy()
    for own, sources, _, _ in terms.blocks:
        for i in range(own.start, own.stop):
            odds, inside = table.log_odds(i), range(length)[sources]
            visible = [j for j in inside if row[j] < GAP]
            scale = min(1, 2.0 / max(sum(table.coupling[i, j] for j in visible), 1e-9))
            raw = scale * sum(table.coupling[i, j] * odds[:, j, row[j]] for j in visible)
            counts = seen.reshape(length, 20)[i]
            mean = counts @ raw / counts.sum()
            assert found[i] == pytest.approx((counts * raw + mean) / (counts + 1) - mean, abs=1e-4)
    assert (len(terms.blocks) > 1) == (entries < 10**9)


LONG = [TWELVE[0], TWELVE[0][:10] + "G" * 60 + TWELVE[0][10:], "MKXAYIBKQRQISFVKSHFSR"]


@pytest.mark.parametrize("texts", [TWELVE[:1], TWELVE[:2], LONG, [TWELVE[0], *TWELVE]])
def test_families_of_any_kind_give_designs(texts: list[str]) -> None:
    made = FamilyDesigns(family(texts))
    drawn = made.design([None] * 4, Sampling(seed=1))
    assert all(set(decode(one.tokens)) <= {*CANONICAL, "X", "B"} for one in drawn)
    assert all(1 <= len(one.tokens) <= max(map(len, texts)) for one in drawn)
    again = made.design([None] * 2, Sampling(seed=1))
    assert [decode(one.tokens) for one in again] == [decode(one.tokens) for one in drawn[:2]]


def test_designs_are_as_far_from_the_given_members_as_is_asked() -> None:
    rows, members = descendants(40, 80, 0.3)
    made = FamilyDesigns(members)
    for wanted in (0.85, 0.93):
        drawn = made.design([None] * 15, Sampling(seed=0), Wishes(identity=wanted))
        equal = (one.tokens - CANONICAL_START == rows for one in drawn if len(one.tokens) == 80)
        same = [one.mean(1).max() for one in equal]
        assert np.median(same) == pytest.approx(wanted, abs=0.06)


def test_a_large_family_is_drawn_from_and_keeps_named_members(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(designs_module, "MOST_MEMBERS", 5)
    for named in ("m0", "m11"):
        made = FamilyDesigns(family(TWELVE), named={named})
        assert 5 <= len(made.members) <= 6
        assert named in made.names
        assert [decode(one) for one in made.members] == [TWELVE[i] for i in made.places]


@pytest.mark.parametrize("temperature", [1e-3, 1e5])
def test_what_is_excluded_is_so_at_any_temperature(temperature: float, caplog: Logged) -> None:
    made = FamilyDesigns(family(TWELVE))
    sampling = Sampling(seed=1, temperature=temperature)
    avoided = frozenset({CANONICAL.index("A"), CANONICAL.index("K")})
    for one in made.design([None] * 10, sampling, Wishes(avoid=avoided)):
        assert not {*"AK"} & {*decode(one.tokens)}
    for one in made.design([None] * 10, sampling, Wishes(near=(2, 4))):
        assert np.count_nonzero(one.tokens != made.members[2]) == 4
    made.design([None], sampling, Wishes(identity=0.01))
    assert "identity=0.01 cannot be reached" in caplog.text
