"""The profile HMM of a family, and how far the baseline's are distributions: HMMER's own model.

HMMER's local multihit profile (Eddy, doi:10.1371/journal.pcbi.1002195) is written out here as a
sum over its paths, in plain NumPy; its probabilities are summed over every protein of a length.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from pyhmmer.easel import Alphabet, TextSequence
from pyhmmer.plan7 import Background, Builder

from d2plm.core.vocabulary import encode
from d2plm.families.alignment import family_hmm
from d2plm.families.profile_hmm import NO_DOMAIN, family_log_ratios, log_ratios, mixture_nats
from tests.conftest import Tokens

Array = NDArray[np.float64]

MM, MI, MD, IM, II, DM, DD = range(7)  # HMMER's order of transitions
ALPHABET = Alphabet.amino()
LETTERS = ALPHABET.symbols[:20]
RELATIVE = "WKCHW"


def background() -> Array:
    frequencies = np.array(Background(ALPHABET).residue_frequencies, dtype=float)
    return frequencies / frequencies.sum()


@dataclass(frozen=True)
class Forward:
    """The forward algorithm of the HMM of one sequence, over all proteins of a length at once."""

    odds: Array  # [M, 20], emissions of the match states ÷ background
    moves: Array  # [M + 1, 7]

    @classmethod
    def of(cls, text: str) -> "Forward":
        sequence = TextSequence(name="relative", sequence=text).digitize(ALPHABET)
        hmm, _, _ = Builder(ALPHABET).build(sequence, Background(ALPHABET))
        emissions = np.array(hmm.match_emissions, dtype=float)[1:]  # type: ignore[attr-defined]
        moves = np.array(hmm.transition_probabilities, dtype=float)  # type: ignore[attr-defined]
        return cls(emissions / background(), moves)

    def entries(self) -> Array:
        """[M]: from the begin state to each match state, by how often paths visit it."""
        visited = [self.moves[0, MM] + self.moves[0, MI]]
        for t in self.moves[1:-1]:
            visited.append(visited[-1] * (t[MM] + t[MI]) + (1 - visited[-1]) * t[DM])
        lengths = np.arange(len(visited), 0, -1)
        return np.array(visited) / (np.array(visited) * lengths).sum()

    def ratios(self, proteins: NDArray[np.int64]) -> Array:
        """p(protein | HMM) ÷ p(protein | background) of each of `proteins` [N, length]."""
        (count, length), states = proteins.shape, len(self.odds)
        stay, leave = length / (length + 3), 3 / (length + 3)
        entries, t = self.entries(), self.moves
        match, insert, delete = np.zeros((3, count, states))
        n, j, c = np.ones(count), np.zeros(count), np.zeros(count)
        begin = n * leave
        for place in range(length):
            odds = self.odds[:, proteins[:, place]].T
            before = np.stack([match, insert, delete])
            match, insert, delete = np.zeros((3, count, states))
            for k in range(states):
                match[:, k] = begin * entries[k]
                if k:
                    reached = before[:, :, k - 1]
                    match[:, k] += t[k, MM] * reached[0] + t[k, IM] * reached[1]
                    match[:, k] += t[k, DM] * reached[2]
                match[:, k] *= odds[:, k]
                if k < states - 1:
                    insert[:, k] = t[k + 1, MI] * before[0, :, k] + t[k + 1, II] * before[1, :, k]
                if k:
                    delete[:, k] = t[k, MD] * match[:, k - 1] + t[k, DD] * delete[:, k - 1]
            end = match.sum(1) + delete.sum(1)
            j, c = stay * j + end / 2, stay * c + end / 2
            n = n * stay
            begin = (n + j) * leave
        null = (length / (length + 1)) ** length / (length + 1)
        return c * leave / null


def text_of(protein: NDArray[np.int64]) -> str:
    return "".join(LETTERS[x] for x in protein)


def test_the_score_of_a_relative_is_the_forward_algorithm_s() -> None:
    """Where HMMER's own reconstruction from domains is higher it reports that, which is little."""
    text = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
    random = np.random.default_rng(0)
    proteins = np.array([[LETTERS.index(letter) for letter in text]] * 40)
    changed = random.random(proteins.shape) < np.linspace(0, 0.6, 40)[:, None]
    proteins[changed] = random.integers(0, 20, changed.sum())
    targets = [encode(text_of(protein)) for protein in proteins]
    found = log_ratios(targets, [encode(text)], [(i, 0) for i in range(40)])
    expected = np.log(Forward.of(text).ratios(proteins))
    assert len(found) > 30
    for i, _ in found:
        assert -0.01 < found[i, 0] - expected[i] < 0.1
    assert found[0, 0] == pytest.approx(expected[0], abs=0.01)
    assert found[0, 0] > 40


def test_the_mixture_s_probabilities_of_all_proteins_of_a_length_add_up_to_about_one() -> None:
    """Over one, as a pair without a domain counts as the background, and is likelier by it."""
    proteins = np.array([*itertools.product(range(20), repeat=2)])
    targets = [encode(text_of(protein)) for protein in proteins]
    relatives = [encode(RELATIVE), encode("MCPWW")]
    pairs = [(i, r) for i in range(len(targets)) for r in range(2)]
    ratios = log_ratios(targets, relatives, pairs)
    total = float(np.exp(-mixture_nats(targets, [[0, 1]] * len(targets), ratios)).sum())
    chances = background()[proteins].prod(1)
    each = [
        [math.exp(ratios.get((i, r), NO_DOMAIN)) for r in range(2)] for i in range(len(targets))
    ]
    expected = float(chances @ (0.98 * np.array(each).mean(1) + 0.02))
    assert total == pytest.approx(expected, rel=1e-4)
    assert 1 <= total < 1.3
    assert any(pair in ratios for pair in pairs)


RESIDUES = [*"ACDEFGHIKLMNPQRSTVWY"]


@pytest.fixture(scope="module")
def family() -> list[Tokens]:
    """Twelve descendants of one ancestor: a fifth of the residues replaced, some lost."""
    random = np.random.default_rng(0)
    ancestor = random.choice(RESIDUES, 120)
    found = []
    for _ in range(12):
        replaced = np.where(random.random(120) < 0.2, random.choice(RESIDUES, 120), ancestor)
        lost = random.integers(0, 110)
        found.append(encode("".join(np.delete(replaced, range(lost, lost + random.integers(6))))))
    return found


def test_a_family_of_one_is_the_hmm_of_its_sequence(family: list[Tokens]) -> None:
    found = family_log_ratios(family_hmm(family[:1]), family)
    single = log_ratios(family, family, [(target, 0) for target in range(len(family))])
    assert found == pytest.approx([single[target, 0] for target in range(len(family))])


def test_an_unseen_member_is_likelier_than_given_any_single_member(family: list[Tokens]) -> None:
    """The members are copies of an ancestor with independent errors, which their column knows."""
    known, unseen = family[:9], family[9:]
    found = family_log_ratios(family_hmm(known), unseen)
    assert found.tolist() == family_log_ratios(family_hmm(known[::-1]), unseen).tolist()
    single = log_ratios(unseen, known, [(t, r) for t in range(3) for r in range(9)])
    best = [max(single[target, relative] for relative in range(9)) for target in range(3)]
    assert (found > best).all()


def test_a_very_long_member_is_cut_to_what_aligns_with_the_others(family: list[Tokens]) -> None:
    random = np.random.default_rng(2)
    ahead = encode("".join(random.choice(RESIDUES, 30_000)))
    long = np.concatenate([ahead, family[8]])
    found, expected = (
        family_log_ratios(family_hmm([*family[:8], one]), family[9:]) for one in (long, family[8])
    )
    assert found == pytest.approx(expected, rel=0.05)


def test_natural_members_are_distinguished_from_shuffled_and_from_unrelated_proteins(
    family: list[Tokens], proteins: list[Tokens]
) -> None:
    random = np.random.default_rng(1)
    hmm = family_hmm(family[:9])
    members = family_log_ratios(hmm, family[9:])
    shuffled = family_log_ratios(hmm, [random.permutation(one) for one in family[9:]])
    unrelated = family_log_ratios(hmm, [one[:300] for one in proteins[:20]])
    assert members.min() > 50 > 15 > max(shuffled.max(), unrelated.max())


@pytest.mark.parametrize("effective_number", ["clust", "entropy"])
def test_copies_of_a_protein_count_as_one_protein(
    family: list[Tokens], effective_number: str
) -> None:
    few, many = (
        family_log_ratios(
            family_hmm(family[:1] * copies, effective_number=effective_number), family
        )
        for copies in (2, 20)
    )
    assert many == pytest.approx(few, rel=0.01)  # entropy weighting is a search to 0.01
    assert few[0] > few[1:].max()
