"""The profile HMM of a family: of its alignment, without any target."""

import numpy as np
import pytest

from d2plm.core.vocabulary import encode
from d2plm.families.alignment import family_hmm
from d2plm.families.profile_hmm import family_log_ratios, log_ratios
from tests.conftest import Tokens

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
