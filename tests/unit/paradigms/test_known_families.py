"""The bound given relatives, on families whose joint distribution is known exactly.

An ancestor of four residues is drawn from a correlated joint distribution. Each member descends
from it: every residue mutates independently, and a relative may also have lost residues.
p(protein | relatives) is a sum over the 81 ancestors, and so is what an exact denoiser predicts.
"""

import itertools
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2plm.core.batch import PackedBatch, Relatives
from d2plm.core.noise import Key
from d2plm.core.vocabulary import CANONICAL_START, CLS, MASK
from d2plm.data.family import Family
from d2plm.data.loader import framed
from d2plm.evaluation.likelihood import score_sequences
from d2plm.evaluation.scoring import bound_draws
from d2plm.paradigms import masked
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching
from d2plm.paradigms.masked import MaskedParadigm
from tests.conftest import MonkeyPatch
from tests.unit.paradigms import four_residues as four

Array = NDArray[np.float64]
Member = tuple[int, ...]  # residues 0 … 2
Members = tuple[Member, ...]


ANCESTORS = four.random_joint(7)
# Probabilities of each residue of a member: to become another, and to be lost.
MUTATION, LOST = np.where(np.eye(four.LETTERS) == 1, 0.88, 0.06), 0.1
COPIES = 12  # of a protein: every 1-, 2-, 3- and 4-subset of its residues equally often

FAMILIES: list[Members] = [
    (),
    ((0, 2, 1, 1),),
    ((1, 1, 0, 2), (1, 1, 0, 2), (1, 0, 0, 2)),
    ((2, 0), (0, 1, 2), (2, 2, 1, 0)),  # none contains the first protein, or is a part of it
]
PROTEINS: list[Member] = [(0, 2, 1, 1), (1, 1, 0, 2), (2, 0, 2, 0)]
CASES = [(protein, relatives) for relatives in FAMILIES for protein in PROTEINS]
every = pytest.mark.parametrize("paradigm", [AbsorbingDiffusion(), MaskFlowMatching()])


def relative_given_ancestor(relative: Member, ancestor: Member) -> float:
    """Summed over which residues of the ancestor the relative has kept."""
    return sum(
        math.prod(MUTATION[ancestor[place], x] for place, x in zip(kept, relative, strict=True))
        * LOST ** (four.LENGTH - len(kept))
        * (1 - LOST) ** len(kept)
        for kept in itertools.combinations(range(four.LENGTH), len(relative))
    )


@cache
def conditional(relatives: Members) -> Array:
    """p(protein | relatives) [3, 3, 3, 3]."""
    weights = ANCESTORS.copy()
    for ancestor in itertools.product(range(four.LETTERS), repeat=four.LENGTH):
        for relative in relatives:
            weights[ancestor] *= relative_given_ancestor(relative, ancestor)
    descended = np.einsum("abcd,ai,bj,ck,dl->ijkl", weights, *[MUTATION] * 4)
    return descended / descended.sum()


def nats(protein: Member, relatives: Members) -> float:
    return -math.log(conditional(relatives)[protein])


@cache
def exact_model(relatives: Members) -> four.Toy:
    return four.conditional_model(conditional(relatives))


def exact(
    tokens: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    times: Tensor,
    relatives: Relatives | None = None,
) -> Tensor:
    """p(x_i | visible residues, relatives) of each masked residue, by enumeration."""
    count = int((tokens == CLS).sum())  # padding follows
    residues = tokens[: count * (four.LENGTH + 2)].view(count, -1)[:, 1:-1].long()
    shown = torch.where(residues == MASK, four.LETTERS, residues - CANONICAL_START)
    given: list[list[Member]] = [[] for _ in shown]
    if relatives is not None:
        for number, segment in enumerate(relatives.segments.tolist()):
            own = slice(*relatives.bounds[number : number + 2])
            given[segment].append(tuple((relatives.tokens[own] - CANONICAL_START).tolist()))
    logits = torch.zeros(len(tokens), 33, dtype=torch.float64)
    of_rows = logits[: count * (four.LENGTH + 2)].view(count, -1, 33)
    for distinct in {tuple(members) for members in given}:
        rows = torch.tensor([tuple(members) == distinct for members in given])
        toy = exact_model(distinct)
        of_rows[rows] = toy.logits(shown[rows], times[:count][rows])
    return logits


def tokens_of(member: Member) -> NDArray[np.uint8]:
    return np.array(member, dtype=np.uint8) + CANONICAL_START


def batch_of(cases: Sequence[tuple[Member, Members]], copies: int) -> PackedBatch:
    """`copies` of each case, one after another."""
    repeated = [case for case in cases for _ in range(copies)]
    return PackedBatch.pack(
        [framed(tokens_of(protein)) for protein, _ in repeated],
        relatives=Relatives.pack([[*map(tokens_of, relatives)] for _, relatives in repeated]),
    )


def expected_bounds(
    patch: MonkeyPatch, paradigm: MaskedParadigm, cases: Sequence[tuple[Member, Members]]
) -> Array:
    """E over all masks of `paradigm.bound` for each case, without sampling.

    With four strata the first draw masks one residue, the next two, …; the copies of a protein take
    the subsets of that size in turn.
    """
    batch, total = batch_of(cases, COPIES), np.zeros(len(cases))
    for draw in range(four.LENGTH):
        subsets = [mask for mask in four.SUBSETS if sum(mask) == draw + 1]
        rows = [[False, *subsets[i % len(subsets)], False] for i in range(batch.num_segments)]

        def in_turn(
            batch: PackedBatch, eligible: Tensor, sizes: Tensor, *_: object, rows: object = rows
        ) -> Tensor:
            chosen = torch.tensor(rows)
            assert torch.equal(chosen.sum(1), sizes.long())
            return chosen.flatten()

        with patch.context() as replaced:
            replaced.setattr(masked, "random_subsets", in_turn)
            found = paradigm.bound(exact, batch, Key(0), draw=draw, draws=four.LENGTH)
        total += found.nats.numpy().reshape(len(cases), COPIES).mean(1)
    return total / four.LENGTH


@every
def test_an_exact_denoiser_s_bound_is_the_conditional_likelihood(
    paradigm: MaskedParadigm, monkeypatch: MonkeyPatch
) -> None:
    found = expected_bounds(monkeypatch, paradigm, CASES)
    expected = [nats(protein, relatives) for protein, relatives in CASES]
    assert len({round(value, 6) for value in expected}) == len(CASES)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@every
def test_evaluation_and_scoring_estimate_it_from_random_masks(paradigm: MaskedParadigm) -> None:
    copies, relatives = 150, FAMILIES[3]
    proteins = [tokens_of(protein) for protein, _ in CASES for _ in range(copies)]
    given = [[*map(tokens_of, own)] for _, own in CASES for _ in range(copies)]
    unigram = np.full(20, 1e-3)
    unigram[: four.LETTERS] = (1 - 17e-3) / four.LETTERS
    evaluated = score_sequences(
        *(exact, paradigm, proteins), masks_per_sequence=4, relatives=given, unigram=unigram
    ).nats.reshape(len(CASES), copies)
    family = Family([*map(tokens_of, (*relatives, PROTEINS[0]))], most=9)  # itself is left out
    families = [family] * copies
    scored = bound_draws(
        exact, paradigm, proteins[:copies], masks_per_sequence=4, families=families
    )
    for draws, case in [
        *zip(evaluated, CASES, strict=True),
        (scored.mean(axis=1), (PROTEINS[0], relatives)),
    ]:
        error = draws.std(ddof=1) / math.sqrt(copies)
        assert 0 < error < 0.2
        assert abs(draws.mean() - nats(*case)) < 4.5 * error
