"""The profile HMMs of a family and of single relatives, the latter against HMMER's own model."""

import numpy as np
import pytest
from numpy.typing import NDArray
from pyhmmer.easel import Alphabet, TextSequence
from pyhmmer.plan7 import Background, Builder

from d2plm.core.vocabulary import CANONICAL, encode
from d2plm.families.alignment import family_hmm
from d2plm.families.profile_hmm import family_log_ratios, log_ratios
from tests.conftest import Tokens

Array = NDArray[np.float64]

MM, MI, MD, IM, II, DM, DD = range(7)  # HMMER's order of transitions
ALPHABET = Alphabet.amino()
LETTERS = ALPHABET.symbols[:20]


def forward_ratios(text: str, proteins: NDArray[np.int64]) -> Array:
    """p(protein | HMM of `text`) ÷ p(protein | background) of each of `proteins` [N, length].

    HMMER's local multihit profile (Eddy, doi:10.1371/journal.pcbi.1002195) as a sum over its paths.
    """
    sequence, null = TextSequence(name="relative", sequence=text), Background(ALPHABET)
    hmm, _, _ = Builder(ALPHABET).build(sequence.digitize(ALPHABET), null)
    frequencies = np.array(null.residue_frequencies, dtype=float)
    emissions = np.array(hmm.match_emissions, dtype=float)[1:] / frequencies
    t = np.array(hmm.transition_probabilities, dtype=float)
    visited = [t[0, MM] + t[0, MI]]  # how often paths visit each match state
    for own in t[1:-1]:
        visited.append(visited[-1] * (own[MM] + own[MI]) + (1 - visited[-1]) * own[DM])
    entries = np.array(visited) / (np.array(visited) * np.arange(len(visited), 0, -1)).sum()

    (count, length), states = proteins.shape, len(emissions)
    stay, leave = length / (length + 3), 3 / (length + 3)
    match, insert, delete = np.zeros((3, count, states))
    n, j, c = np.ones(count), np.zeros(count), np.zeros(count)
    begin = n * leave
    for place in range(length):
        odds = emissions[:, proteins[:, place]].T
        before = np.stack([match, insert, delete])
        match, insert, delete = np.zeros((3, count, states))
        for k in range(states):
            match[:, k] = begin * entries[k]
            if k:
                reached = before[:, :, k - 1]
                match[:, k] += t[k, MM] * reached[0] + t[k, IM] * reached[1] + t[k, DM] * reached[2]
            match[:, k] *= odds[:, k]
            if k < states - 1:
                insert[:, k] = t[k + 1, MI] * before[0, :, k] + t[k + 1, II] * before[1, :, k]
            if k:
                delete[:, k] = t[k, MD] * match[:, k - 1] + t[k, DD] * delete[:, k - 1]
        end = match.sum(1) + delete.sum(1)
        j, c = stay * j + end / 2, stay * c + end / 2
        n = n * stay
        begin = (n + j) * leave
    return c * leave / ((length / (length + 1)) ** length / (length + 1))


def test_the_score_of_a_relative_is_the_forward_algorithm_s() -> None:
    """Where HMMER's own reconstruction from domains is higher it reports that, which is little."""
    text = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ"
    random = np.random.default_rng(0)
    proteins = np.array([[LETTERS.index(letter) for letter in text]] * 40)
    changed = random.random(proteins.shape) < np.linspace(0, 0.6, 40)[:, None]
    proteins[changed] = random.integers(0, 20, changed.sum())
    targets = [encode("".join(LETTERS[x] for x in protein)) for protein in proteins]
    found = log_ratios(targets, [encode(text)], [(i, 0) for i in range(40)])
    expected = np.log(forward_ratios(text, proteins))
    assert len(found) > 30
    for i, _ in found:
        assert -0.01 < found[i, 0] - expected[i] < 0.1
    assert found[0, 0] == pytest.approx(expected[0], abs=0.01)
    assert found[0, 0] > 40


@pytest.fixture(scope="module")
def family() -> list[Tokens]:
    """Twelve descendants of one ancestor: a fifth of the residues replaced, some lost."""
    random = np.random.default_rng(0)
    ancestor = random.choice([*CANONICAL], 120)
    found = []
    for _ in range(12):
        replaced = np.where(random.random(120) < 0.2, random.choice([*CANONICAL], 120), ancestor)
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
    ahead = encode("".join(random.choice([*CANONICAL], 30_000)))
    long = np.concatenate([ahead, family[8]])
    found, expected = (
        family_log_ratios(family_hmm([*family[:8], one]), family[9:]) for one in (long, family[8])
    )
    assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("number", ["clust", "entropy"])
def test_copies_of_a_protein_count_as_one_protein(family: list[Tokens], number: str) -> None:
    hmms = (family_hmm(family[:1] * copies, effective_number=number) for copies in (2, 20))
    few, many = (family_log_ratios(hmm, family) for hmm in hmms)
    assert many == pytest.approx(few, rel=0.01)  # entropy weighting is a search to 0.01
    assert few[0] > few[1:].max()
