"""Samplers: from templates with masks to proteins.

A template is a row of tokens with `<mask>` where a residue is wanted; generation from scratch is a
template of masks alone. Every other token is kept to the letter. Sequences of unequal lengths are
packed together; each draw is keyed by the sequence's index, so the result does not depend on how
they were batched.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2plm.alphabet import CANONICAL_START, MASK
from d2plm.batch import PackedBatch
from d2plm.data.loader import pack_all
from d2plm.errors import ConfigError, ModelError, require, require_choice, require_number
from d2plm.noise import Key, categorical, uniform
from d2plm.paradigms.base import Denoiser, Paradigm

SAMPLERS = ("ancestral", "euler")


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Args:
        sampler: `ancestral` (diffusion) or `euler` (flow matching); None takes the paradigm's own.
        steps: model evaluations; None takes the paradigm's default.
        temperature: divides the logits; below 1 is more conservative.
        top_k: keep only the k likeliest residues; None keeps all.
        top_p: keep the likeliest residues that together reach this probability.
        corrector: peak strength of `euler`'s corrector, which masks residues again and lets the
            model reconsider them; 0 is plain Euler.
        seed: of every draw.
    """

    sampler: str | None = None
    steps: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    corrector: float = 0.0
    seed: int = 0

    def resolved(self, paradigm: Paradigm) -> "Sampling":
        """The same with the paradigm's defaults filled in.

        Raises:
            ConfigError: on a value out of range, or a sampler that the paradigm does not define.
        """
        sampler = self.sampler or paradigm.samplers[0]
        steps = paradigm.default_steps if self.steps is None else self.steps
        require_choice("generation.sampler", sampler, SAMPLERS)
        if sampler not in paradigm.samplers:
            raise ConfigError(
                f"generation.sampler={sampler!r}: is not defined for {paradigm.name}, the paradigm "
                f"of this model; use {' or '.join(paradigm.samplers)}"
            )
        require_number("generation.steps", steps, integer=True, low=1, high=paradigm.max_steps)
        require_number("generation.temperature", self.temperature, low=0, low_open=True)
        if self.top_k is not None:
            require_number("generation.top_k", self.top_k, integer=True, low=1)
        require_number("generation.top_p", self.top_p, low=0, low_open=True, high=1)
        require_number("generation.corrector", self.corrector, low=0)
        require(
            self.corrector == 0 or sampler == "euler",
            "generation.corrector",
            self.corrector,
            "0 unless the sampler is 'euler'",
        )
        return Sampling(
            sampler, steps, self.temperature, self.top_k, self.top_p, self.corrector, self.seed
        )


def sample(
    model: Denoiser,
    paradigm: Paradigm,
    templates: Sequence[NDArray[np.uint8]],
    sampling: Sampling,
    *,
    max_length: int,
    token_budget: int = 16384,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[NDArray[np.uint8]]:
    """Fill the masks of each template.

    Args:
        templates: uint8 residue tokens [L], `<mask>` where a residue is wanted.
        max_length: the model's limit in tokens, `<cls>` and `<eos>` included.
        token_budget: tokens of one forward pass.
        progress: called with (steps done, their total).

    Returns:
        uint8 residue tokens [L] for each template, in order; no mask is left.

    Raises:
        ConfigError: on impossible settings.
        ModelError: for a template longer than the model's limit.
    """
    sampling = sampling.resolved(paradigm)
    assert sampling.steps is not None
    for index, template in enumerate(templates):
        if len(template) + 2 > max_length:
            raise ModelError(
                f"sequence {index} has {len(template)} residues; the model takes {max_length - 2}"
            )
    results: list[NDArray[np.uint8]] = [np.empty(0, dtype=np.uint8)] * len(templates)
    batches = pack_all(templates, token_budget, max_length)
    total, done = len(batches) * sampling.steps, 0
    with torch.inference_mode():
        for host_batch in batches:
            batch = host_batch.to(device)
            tokens = batch.tokens
            for tokens in _trajectory(model, paradigm, batch, sampling):  # noqa: B007  # the last
                progress(done := done + 1, total)
            filled = replace(host_batch, tokens=tokens.cpu())
            for index, row in zip(host_batch.sequence_ids.tolist(), filled.split(), strict=False):
                results[index] = row[1:-1].numpy().copy()
    return results


def _trajectory(
    model: Denoiser, paradigm: Paradigm, batch: PackedBatch, sampling: Sampling
) -> Iterator[Tensor]:
    """The tokens after each step from the prior to the data."""
    assert sampling.steps is not None
    segments, positions = batch.segment_ids(), batch.positions()
    indices = (batch.draw_ids[segments], positions)
    wanted = batch.tokens == MASK
    tokens = batch.tokens.clone()
    grid = np.linspace(paradigm.prior_time, paradigm.data_time, sampling.steps + 1).tolist()
    for step, (now, then) in enumerate(pairwise(grid)):
        key = Key(sampling.seed, step)
        unmask, remask = _jump_probabilities(paradigm, now, then, sampling, last=then == grid[-1])
        times = torch.full((batch.num_segments,), now, device=tokens.device)
        logits = model(tokens, batch.cu_seqlens, batch.max_seqlen, times)
        probabilities = residue_probabilities(paradigm, logits, sampling)
        residues = categorical(key.stream("residue"), probabilities, *indices) + CANONICAL_START
        jumps = uniform(key.stream("jump"), *indices)
        masked = tokens == MASK
        filled = torch.where(masked & (jumps < unmask), residues.to(tokens.dtype), tokens)
        tokens = torch.where(wanted & ~masked & (jumps < remask), MASK, filled)
        yield tokens


def _jump_probabilities(
    paradigm: Paradigm, now: float, then: float, sampling: Sampling, *, last: bool
) -> tuple[float, float]:
    """(probability that a masked residue is filled, that a filled one is masked again) in a step.

    `ancestral`: the posterior's (ᾱ_s − ᾱ_t)/(1 − ᾱ_t), and never back. `euler`: the velocity
    (1 + c_t)·û − c_t·ǔ (Gat et al., arXiv:2407.15595, sec. 3.3) with c_t held over the step and the
    rates integrated, c_t = 4·corrector·t(1 − t), and 0 on the last step.
    """
    plain = paradigm.transition(now, then)
    strength = 0.0 if last else 4 * sampling.corrector * now * (1 - now)
    if strength == 0:
        return plain, 0.0
    masked = paradigm.corrupted_fraction(torch.tensor([now, then], dtype=torch.float64))
    shown_now, shown_then = (1 - masked).tolist()
    return 1 - (1 - plain) ** (1 + strength), 1 - (shown_now / shown_then) ** strength


def residue_probabilities(paradigm: Paradigm, logits: Tensor, sampling: Sampling) -> Tensor:
    """float64 [T, 20]: the distribution to draw from, after temperature, top-k and top-p."""
    log_p = paradigm.log_probabilities(logits).double() / sampling.temperature
    probabilities = log_p.softmax(dim=-1)
    ranked, order = probabilities.sort(dim=-1, descending=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if sampling.top_k is not None:
        keep[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        keep &= ranked.cumsum(dim=-1) - ranked < sampling.top_p
    return torch.zeros_like(ranked).scatter(-1, order, ranked * keep)
