"""A joint distribution that is known, its exact denoiser, and a sampler's law without sampling.

Three letters at each of a few sites, correlated. Everything is summed over all sequences.
"""

import itertools
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2plm.core.vocabulary import FIRST, PROTEIN, Tokens, Vocabulary
from d2plm.generation.kernels import step_between, tempered
from d2plm.generation.sampler_settings import Sampling
from d2plm.paradigms.paradigm import Paradigm

LETTERS = 3
IMPOSSIBLE = 1e-30


class KnownJoint:
    """p(x) over all sequences of `sites` letters: a strong preference for equal neighbours."""

    def __init__(self, sites: int, vocabulary: Vocabulary = PROTEIN) -> None:
        self.sites, self.vocabulary = sites, vocabulary
        # The first letters of proteins, and the last ones of others.
        self.first = FIRST if vocabulary is PROTEIN else vocabulary.stop - LETTERS
        self.sequences = list(itertools.product(range(LETTERS), repeat=sites))
        weights = [self._weight(sequence) for sequence in self.sequences]
        self.p = np.array(weights) / sum(weights)

    @staticmethod
    def _weight(sequence: tuple[int, ...]) -> float:
        equal = sum(a == b for a, b in pairwise(sequence))
        return float(4.0**equal * np.prod([(1.0, 1.5, 0.7)[a] for a in sequence]) + sequence[0])

    def table(self) -> NDArray[np.float64]:
        """p with one axis a site."""
        return self.p.reshape((LETTERS,) * self.sites)

    def counts(self, rows: list[Tokens]) -> NDArray[np.int64]:
        """How often each sequence was sampled, in the order of `p`."""
        letters = np.stack(rows).astype(int) - self.first
        assert ((letters >= 0) & (letters < LETTERS)).all()
        index = letters @ LETTERS ** np.arange(self.sites - 1, -1, -1)
        return np.bincount(index, minlength=len(self.p))

    def denoiser(
        self, paradigm: Paradigm, blocks: int = 1
    ) -> Callable[[Tensor, Tensor, int, Tensor], Tensor]:
        """p(x_i | what the other positions show), exactly.

        For unpadded rows of `blocks` independent draws from the joint, one after another.
        """
        sequences, p = torch.tensor(self.sequences), torch.tensor(self.p)
        length, residues = blocks * self.sites, self.vocabulary.predicted
        mask, first = self.vocabulary.mask, self.first - FIRST

        def evidence(shown: Tensor, kept: Tensor) -> Tensor:
            """p(shown at each site | its letter in each sequence), [B, K, sites]."""
            equal = shown[:, None] == sequences + self.first
            if paradigm.source == "mask":
                return (equal | (shown[:, None] == mask)).double()
            return kept[:, None, None] * equal + (1 - kept[:, None, None]) / residues

        def model(tokens: Tensor, cu_seqlens: Tensor, _max: int, times: Tensor) -> Tensor:
            rows = tokens.view(-1, length + 2)[:, 1:-1].long()
            kept = 1 - paradigm.corrupted_fraction(times[: len(rows)].double())
            per_site = evidence(rows.reshape(-1, self.sites), kept.repeat_interleave(blocks))
            shape = (len(per_site), self.sites, residues)
            chance = torch.full(shape, IMPOSSIBLE, dtype=torch.float64)
            for site in range(self.sites):
                others = [other for other in range(self.sites) if other != site]
                weights = p * per_site[:, :, others].prod(-1)
                chance[:, site].index_add_(1, first + sequences[:, site], weights)
            logits = torch.zeros(len(rows), length + 2, self.vocabulary.size, dtype=torch.float64)
            stop = self.vocabulary.stop
            logits[:, 1:-1, FIRST:stop] = chance.log().view(len(rows), length, residues)
            return logits.flatten(0, 1)

        return model


def exact_law(
    joint: KnownJoint, paradigm: Paradigm, sampling: Sampling, steps: int
) -> NDArray[np.float64]:
    """The law of what the steps of a two-site sampler give [9], by multiplying its kernels out."""
    assert joint.sites == 2 and joint.vocabulary is paradigm.vocabulary
    sampling, residues = sampling.resolved(paradigm), joint.vocabulary.predicted
    mask, stop = joint.vocabulary.mask, joint.vocabulary.stop
    alphabet = torch.tensor([mask, *range(FIRST, stop)], dtype=torch.int32)
    states = torch.cartesian_prod(alphabet, alphabet)
    framed = torch.nn.functional.pad(states, (1, 1)).flatten()
    model = joint.denoiser(paradigm)
    law = torch.zeros(1 + residues, 1 + residues, dtype=torch.float64)
    if paradigm.source == "mask":
        law[0, 0] = 1
    else:
        law[1:, 1:] = 1 / residues**2
    shown = states.where(states != mask, FIRST) if paradigm.source == "uniform" else states
    times = np.linspace(paradigm.prior_time, paradigm.data_time, steps + 1)
    for start, stop in pairwise(times.tolist()):
        told = torch.full((len(states),), 1 - paradigm.kept(start), dtype=torch.float64)
        logits = model(framed, torch.empty(0), 4, paradigm.time_at_corrupted_fraction(told))
        log_p = paradigm.log_probabilities(logits).view(-1, 4, residues)[:, 1:-1]
        log_p = log_p.reshape(-1, residues)
        step = step_between(paradigm, sampling, start, stop)
        kernel = paradigm.transition(tempered(log_p, sampling), shown.flatten(), step)
        kernel = kernel.view(len(states), 2, 1 + residues)
        law = torch.einsum("s,sa,sb->ab", law.flatten(), kernel[:, 0], kernel[:, 1])
    assert abs(law.sum().item() - 1) < 1e-9
    assert law[0].sum() + law[:, 0].sum() == 0  # no mask is left
    letters = slice(1 + joint.first - FIRST, 1 + joint.first - FIRST + LETTERS)
    return law[letters, letters].flatten().numpy()


def distance(law: NDArray[np.float64], joint: KnownJoint) -> float:
    """Total variation."""
    return float(abs(law - joint.p).sum() / 2)
