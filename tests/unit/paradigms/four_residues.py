"""A protein of four residues, small enough to sum over every mask of it.

The toy denoiser looks up its logits in a fixed random table by everything that is visible, so each
expectation over masks can be written out as a sum over 2^4 subsets.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.core.vocabulary import FIRST, Vocabulary
from d2plm.core.vocabulary import PROTEIN as PROTEINS
from d2plm.data.loader import framed
from d2plm.paradigms import paradigm as base
from d2plm.paradigms.paradigm import Paradigm
from tests.conftest import MonkeyPatch
from tests.unit.paradigms.closed_forms import Curve

LENGTH = 4
LETTERS = 3  # the toy proteins use residues 0..2 of the twenty; of other vocabularies the last
PROTEIN = (0, 2, 1, 1)
SUBSETS = list(itertools.product((False, True), repeat=LENGTH))
FP32 = 2e-6


def first_letter(vocabulary: Vocabulary) -> int:
    """The token of the first of the toys' letters."""
    return FIRST if vocabulary is PROTEINS else vocabulary.stop - LETTERS


class Toy:
    """Logits [T, V] from a table indexed by all visible residues, and linear in the time."""

    def __init__(
        self, seed: int = 0, time_slope: float = 0.0, vocabulary: Vocabulary = PROTEINS
    ) -> None:
        self.vocabulary, self.first = vocabulary, first_letter(vocabulary)
        random = np.random.default_rng(seed)
        shape = ((LETTERS + 1) ** LENGTH, LENGTH + 2, vocabulary.size)
        self.table = random.normal(size=shape)
        self.slope = time_slope * random.normal(size=shape)

    def logits(self, shown: Tensor, times: Tensor) -> Tensor:
        """Digits [S, 4] (3 = masked), times [S] → [S, 6, V]."""
        code = (shown * (LETTERS + 1) ** torch.arange(LENGTH)).sum(-1).numpy()
        value = self.table[code] + times.double().numpy()[:, None, None] * self.slope[code]
        return torch.from_numpy(value)

    def __call__(
        self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor
    ) -> Tensor:
        residues = tokens.view(-1, LENGTH + 2)[:, 1:-1].long()
        shown = torch.where(residues == self.vocabulary.mask, LETTERS, residues - self.first)
        return self.logits(shown, times).flatten(0, 1)

    def nats(self, masked: tuple[bool, ...], time: float, shift: int = 0) -> list[float]:
        """−log p of each masked residue of PROTEIN, from the logits `shift` places before it."""
        shown = [LETTERS if m else x for x, m in zip(PROTEIN, masked, strict=True)]
        logits = self.logits(torch.tensor([shown]), torch.tensor([time]))[0].numpy()
        log_p = log_softmax(logits[:, FIRST : self.vocabulary.stop], axis=-1)
        log_p = log_p[:, self.first - FIRST :]
        return [-float(log_p[i + 1 - shift, x]) for i, x in enumerate(PROTEIN) if masked[i]]


def toy_batch(copies: int, vocabulary: Vocabulary = PROTEINS) -> PackedBatch:
    tokens = first_letter(vocabulary) + np.array(PROTEIN)
    return PackedBatch.pack([framed(tokens.astype(vocabulary.dtype))] * copies)


def exact_k(toy: Toy, time_of: Curve) -> float:
    """Σ_k (1/k)·E_{|M|=k} Σ_{i∈M} −log p(x_i | x_{¬M}, k)."""
    return sum(
        sum(toy.nats(masked, time_of(sum(masked) / LENGTH)))
        / sum(masked)
        / math.comb(LENGTH, sum(masked))
        for masked in SUBSETS
        if any(masked)
    )


def mask_probability(masked: tuple[bool, ...], fraction: float) -> float:
    return math.prod(fraction if m else 1 - fraction for m in masked)


def conditional_model(joint: NDArray[np.float64]) -> Toy:
    """A toy whose predictions are the exact posteriors of a joint distribution [3, 3, 3, 3]."""
    toy = Toy()
    toy.table[:] = -60.0
    for shown in itertools.product(range(LETTERS + 1), repeat=LENGTH):
        code = sum(s * (LETTERS + 1) ** place for place, s in enumerate(shown))
        seen = joint[tuple(slice(None) if s == LETTERS else slice(s, s + 1) for s in shown)]
        for place in range(LENGTH):
            others = tuple(axis for axis in range(LENGTH) if axis != place)
            marginal = seen.sum(axis=others)
            if shown[place] == LETTERS:
                letters = slice(toy.first, toy.first + LETTERS)
                toy.table[code, place + 1, letters] = np.log(marginal / marginal.sum())
    return toy


def random_joint(seed: int) -> NDArray[np.float64]:
    weights = np.random.default_rng(seed).gamma(0.5, size=(LETTERS,) * LENGTH) + 1e-3
    return weights / weights.sum()


def force(
    monkeypatch: MonkeyPatch, paradigm: Paradigm, times: Tensor, masks: Iterable[Iterable[bool]]
) -> None:
    """Make `corrupt` draw these times [S] and exactly these masks of the four residues."""
    rows = torch.tensor([[False, *mask, False] for mask in masks]).flatten()
    draws = torch.where(rows, 0.0, torch.tensor(1.0 - 2**-53, dtype=torch.float64))
    monkeypatch.setattr(base, "uniform", lambda key, *indices: draws)
    monkeypatch.setattr(paradigm, "times_of", lambda _: (times, paradigm.corruption_rate(times)))


def expected_loss(
    monkeypatch: MonkeyPatch, paradigm: Paradigm, toy: Toy, time: float, fraction: float
) -> float:
    """The paradigm's own loss at `time`, averaged over the 2^4 masks by their exact chances."""
    batch = toy_batch(len(SUBSETS), vocabulary=toy.vocabulary)
    times = torch.full((len(SUBSETS),), time, dtype=torch.float64)
    with monkeypatch.context() as patch:
        force(patch, paradigm, times, SUBSETS)
        corrupted = paradigm.corrupt(batch, Key(0))
    shares = [mask_probability(masked, fraction) for masked in SUBSETS]
    chances = torch.tensor(shares, dtype=torch.float64)
    weighted = replace(corrupted, weights=corrupted.weights * chances[batch.segment_ids()])
    logits = toy(corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times)
    return float(paradigm.loss(logits, batch, weighted)[0])
