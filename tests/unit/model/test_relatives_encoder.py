"""Relatives of a protein in the model: exact alignments, and nothing else changes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from d2plm.core.batch import Alignment, PackedBatch, Relatives
from d2plm.core.errors import ModelError
from d2plm.core.noise import Key
from d2plm.core.vocabulary import CANONICAL_START, CANONICAL_STOP, MASK
from d2plm.model import alignment
from d2plm.model.alignment import LETTERS, UNKNOWN, align
from d2plm.model.dit import DiT
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching
from d2plm.paradigms.masked import MaskedParadigm
from tests.conftest import MonkeyPatch, Tokens

Factory = Callable[..., DiT]
Groups = tuple[list[Tokens], list[list[Tokens]]]


def protein(random: np.random.Generator, length: int, hidden: float = 0.0) -> Tokens:
    tokens = random.integers(CANONICAL_START, CANONICAL_STOP + 2, length).astype(np.uint8)
    tokens[random.random(length) < hidden] = MASK
    return tokens


def letters(tokens: Tokens) -> Tensor:
    known = (tokens >= CANONICAL_START) & (tokens < CANONICAL_STOP)
    return torch.from_numpy(np.where(known, tokens.astype(np.int64) - CANONICAL_START, UNKNOWN))


def enumerated(target: Tensor, relative: Tensor) -> Tensor:
    """Posterior matches [L, M], as the derivative of log Z by the logarithms of the odds.

    Z is summed over all alignments by recursions over single cells, in fp64.
    """
    opened, extended = alignment.GAP_OPENED, alignment.GAP_EXTENDED
    odds = torch.from_numpy(alignment._odds())[target][:, relative].requires_grad_()
    rows, columns = odds.shape
    nothing = torch.zeros((), dtype=torch.float64)
    match: dict[tuple[int, int], Tensor] = {}
    insert, delete = match.copy(), match.copy()
    total = nothing
    for i in range(rows):
        for j in range(columns):

            def at(states: dict[tuple[int, int], Tensor], back_i: int, back_j: int) -> Tensor:
                return states.get((i - back_i, j - back_j), nothing)  # noqa: B023

            begun = 1.0 if i == 0 or j == 0 else alignment.BEGUN_INSIDE
            gaps = at(insert, 1, 1) + at(delete, 1, 1)
            paths = begun + at(match, 1, 1) + (1 - extended) * gaps
            match[i, j] = odds[i, j] * paths
            insert[i, j] = opened * at(match, 1, 0) + extended * at(insert, 1, 0)
            delete[i, j] = opened * at(match, 0, 1) + extended * at(delete, 0, 1)
            at_end = i == rows - 1 or j == columns - 1
            total = total + match[i, j] * (1.0 if at_end else alignment.BEGUN_INSIDE)
    (slope,) = torch.autograd.grad((1 + total / (rows + columns)).log(), odds)
    return (slope * odds).detach()


def residues(found: Alignment) -> Tensor:
    return found.features[:, :LETTERS]


def lines(found: Alignment, pair: int) -> Tensor:
    return residues(found)[found.bounds[pair] : found.bounds[pair + 1]]


@pytest.mark.parametrize("threads", [1, 2])
def test_alignments_are_the_posterior_of_all_paths(threads: int, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    random = np.random.default_rng(0)
    targets = [protein(random, n, hidden) for n, hidden in ((9, 0.3), (1, 0), (5, 0), (24, 0.6))]
    related = [
        [protein(random, 12), targets[0][2:7].copy()],
        [protein(random, 1)],
        [],
        [np.concatenate([targets[3][:8], protein(random, 3), targets[3][14:]]), targets[0]],
    ]
    batch = PackedBatch.pack(targets, token_budget=48)
    found = align(batch.tokens, batch.cu_seqlens, Relatives.pack(related))
    pairs = [(s, relative) for s, of_one in enumerate(related) for relative in of_one]
    assert len(found.bounds) == len(pairs) + 1
    for number, (segment, relative) in enumerate(pairs):
        target = letters(targets[segment])
        posterior = enumerated(target, letters(relative))
        expected = torch.zeros(len(target), UNKNOWN + 1, dtype=torch.float64)
        expected.index_add_(1, letters(relative), posterior)
        torch.testing.assert_close(lines(found, number).double(), expected, rtol=1e-5, atol=2e-5)
        own = slice(int(found.bounds[number]), int(found.bounds[number + 1]))
        first = int(batch.cu_seqlens[segment])
        assert found.places[own].tolist() == list(range(first, first + len(target)))


def test_long_proteins_neither_overflow_nor_vanish() -> None:
    random = np.random.default_rng(1)
    target = protein(random, 1022)
    near, hidden = target.copy(), np.full_like(target, MASK)
    repeated = np.concatenate([target[:300], target[:300], target[300:600]])
    related = [near, protein(random, 1022), repeated, target[:1], np.full(800, 25, np.uint8)]
    tandem = np.concatenate([target[:600], target[:600]])
    batch = PackedBatch.pack([target, hidden, tandem])
    given = Relatives.pack([related, related, [target[:600]]])
    found = align(batch.tokens, batch.cu_seqlens, given)
    assert residues(found).isfinite().all()
    assert (residues(found) >= 0).all()
    covered = residues(found).sum(1)
    assert float(covered.max()) < 1 + 1e-5
    same = lines(found, 0).gather(1, letters(target)[:, None])[:, 0]
    assert float(same.mean()) > 0.99
    assert float(lines(found, 1).sum(1).mean()) < 0.1  # it is no relative
    assert float(lines(found, len(related)).sum(1).mean()) > 0.5  # nothing speaks against it


@pytest.mark.parametrize("paradigm", [AbsorbingDiffusion(), MaskFlowMatching()])
def test_no_feature_depends_on_a_hidden_residue(paradigm: MaskedParadigm) -> None:
    random = np.random.default_rng(4)
    targets = [protein(random, length) for length in (40, 25)]
    related = Relatives.pack([[targets[0][3:].copy(), protein(random, 30)], [targets[1].copy()]])
    batch = PackedBatch.pack(targets, sequence_ids=[0, 1])
    seen = paradigm.corrupt(batch, Key(0, 0)).tokens
    hidden = seen == MASK
    assert 0 < int(hidden.sum()) < len(hidden)
    others = torch.where(hidden, CANONICAL_START + (batch.tokens - CANONICAL_START + 7) % 20, seen)
    changed = replace(batch, tokens=others.to(batch.tokens.dtype))
    again = paradigm.corrupt(changed, Key(0, 0)).tokens
    found, same = (align(tokens, batch.cu_seqlens, related) for tokens in (seen, again))
    assert torch.equal(found.features, same.features)


def test_features_count_what_agrees_in_each_window() -> None:
    random = np.random.default_rng(2)
    target, relative = protein(random, 40, 0.4), protein(random, 31)
    batch = PackedBatch.pack([protein(random, 7), target])
    related = Relatives.pack([[protein(random, 5)], [relative]])
    found = align(batch.tokens, batch.cu_seqlens, related)
    features, own = found.features[7:], residues(found)[7:]
    known = letters(target)
    for i in range(40):
        near = [k for k in range(max(0, i - 8), min(40, i + 9)) if known[k] < UNKNOWN]
        agreeing = sum(float(own[k, known[k]]) for k in near)
        opposite = sum(float(own[k, :UNKNOWN].sum()) for k in near)
        expected = [
            (agreeing + 0.5) / (opposite + 1.5),
            0.3 * np.log1p(opposite),
            opposite / max(len(near), 1),
        ]
        assert features[i, 25:28].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def groups() -> Groups:
    """Corrupted proteins, and relatives of each: three, none, one, two."""
    random = np.random.default_rng(3)
    targets = [protein(random, n, 0.5) for n in (30, 12, 44, 44)]
    return targets, [[protein(random, n) for n in own] for own in ((25, 33, 60), (), (50,), (9, 8))]


def logits(
    model: DiT, targets: list[Tokens], related: list[list[Tokens]] | None, **shape: int
) -> Tensor:
    batch = PackedBatch.pack(targets, **shape)
    times = torch.linspace(0.1, 0.9, batch.num_segments)
    packed = () if related is None else (Relatives.pack(related),)
    with torch.no_grad():
        return model(batch.tokens, batch.cu_seqlens, batch.max_seqlen, times, *packed)


def test_without_relatives_the_encoder_does_nothing(tiny_dit: Factory, groups: Groups) -> None:
    targets, related = groups
    taking, plain = tiny_dit(relatives_dim=8), tiny_dit()
    plain.load_state_dict(taking.state_dict(), strict=False)
    expected = logits(plain, targets, None)
    assert torch.equal(logits(taking, targets, None), expected)
    assert torch.equal(logits(taking, targets, [[], [], [], []]), expected)
    found = logits(taking, targets, related)
    second = slice(30, 42)  # has none, beside others that have
    assert torch.equal(found[second], expected[second])
    assert not torch.allclose(found, expected)
    with pytest.raises(ModelError, match="trained without relatives"):
        logits(plain, targets, related)


def test_groups_see_neither_each_other_nor_an_order(tiny_dit: Factory, groups: Groups) -> None:
    targets, related = groups
    model, shape = tiny_dit(relatives_dim=8).double(), {"token_budget": 200, "max_seqlen": 44}
    found = logits(model, targets, related, **shape)
    turned = logits(model, targets, [own[::-1] for own in related], **shape)
    torch.testing.assert_close(turned, found, rtol=0, atol=1e-10)
    times, first = torch.linspace(0.1, 0.9, 6), 0
    for number, (target, own) in enumerate(zip(targets, related, strict=True)):
        batch = PackedBatch.pack([target])
        with torch.no_grad():
            alone = model(
                *(batch.tokens, batch.cu_seqlens, 44, times[number : number + 1]),
                Relatives.pack([own]),
            )
        torch.testing.assert_close(found[first : first + len(target)], alone, rtol=0, atol=1e-9)
        first += len(target)
