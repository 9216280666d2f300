"""The packed sampler generates the sequences of a plain loop over one sequence after another."""

import itertools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2plm.core.noise import Key, categorical, uniform
from d2plm.core.vocabulary import CANONICAL_START, CANONICAL_STOP, MASK
from d2plm.data.loader import framed
from d2plm.generation.kernels import step_between, tempered
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.model.dit import DiT
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching
from d2plm.paradigms.paradigm import Denoiser, Paradigm

Tokens = NDArray[np.uint8]


def plain_loop(
    model: Denoiser, paradigm: Paradigm, templates: Sequence[Tokens], sampling: Sampling
) -> list[Tokens]:
    """The result of `sample` by `ancestral` and `first_hitting`, one sequence after another."""
    sampling = sampling.resolved(paradigm)
    fill = {"ancestral": _ancestral, "first_hitting": _first_hitting}[str(sampling.sampler)]
    filled = []
    for index, template in enumerate(templates):
        tokens = torch.from_numpy(framed(template))
        fill(model, paradigm, sampling, tokens, torch.tensor(index))
        filled.append(tokens.numpy()[1:-1])
    return filled


def _ancestral(
    model: Denoiser, paradigm: Paradigm, sampling: Sampling, tokens: Tensor, index: Tensor
) -> None:
    assert sampling.steps is not None
    places = (tokens == MASK).nonzero()[:, 0]
    fraction = _masked_fraction(tokens)
    times = np.linspace(paradigm.prior_time, paradigm.data_time, sampling.steps + 1).tolist()
    for step, (start, stop) in enumerate(pairwise(times)):
        log_p = _log_p(model, paradigm, tokens, fraction * (1 - paradigm.kept(start)))[places]
        distribution = paradigm.transition(
            tempered(log_p, sampling), tokens[places], step_between(paradigm, sampling, start, stop)
        )
        key = Key(sampling.seed, step).stream("token")
        drawn = categorical(key, distribution, index, places)
        shown = torch.where(drawn == 0, MASK, drawn - 1 + CANONICAL_START)
        tokens[places] = shown.to(tokens.dtype)


def _first_hitting(
    model: Denoiser, paradigm: Paradigm, sampling: Sampling, tokens: Tensor, index: Tensor
) -> None:
    corrupted = _masked_fraction(tokens)
    for step, left in enumerate(range(int((tokens == MASK).sum()), 0, -1)):
        key, masked = Key(sampling.seed, step), (tokens == MASK).nonzero()[:, 0]
        corrupted = corrupted * (1 - uniform(key.stream("time"), index)) ** (1 / left)
        place = masked[uniform(key.stream("place"), index, masked).argmin()][None]
        log_p = _log_p(model, paradigm, tokens, corrupted)[place]
        probabilities = tempered(log_p, sampling).exp()
        drawn = categorical(key.stream("residue"), probabilities, index, place)
        tokens[place] = (drawn + CANONICAL_START).to(tokens.dtype)


def _masked_fraction(tokens: Tensor) -> Tensor:
    """Masks as a fraction of the residues that can be corrupted, float64."""
    masked = tokens == MASK
    canonical = (tokens >= CANONICAL_START) & (tokens < CANONICAL_STOP)
    return masked.sum().double() / (masked | canonical).sum()


def _log_p(model: Denoiser, paradigm: Paradigm, tokens: Tensor, corrupted: Tensor) -> Tensor:
    """Of every residue of the one sequence, float64 [T, 20]."""
    time = paradigm.time_at_corrupted_fraction(corrupted[None]).float()
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
    return paradigm.log_probabilities(model(tokens, bounds, len(tokens), time)).double()


@pytest.mark.parametrize(
    ("paradigm", "options"),
    [
        (AbsorbingDiffusion(), {"sampler": "ancestral", "steps": 30}),
        (AbsorbingDiffusion(shift=True), {"sampler": "ancestral", "steps": 5, "top_p": 0.8}),
        (
            MaskFlowMatching(schedule="cubic"),
            {"sampler": "ancestral", "steps": 5, "temperature": 0.7},
        ),
        (AbsorbingDiffusion(), {"sampler": "first_hitting"}),
        (MaskFlowMatching(), {"sampler": "first_hitting", "top_k": 5}),
    ],
)
def test_the_sampler_generates_the_sequences_of_the_plain_loop(
    tiny_dit: Any, paradigm: Paradigm, options: dict[str, Any]
) -> None:
    model: DiT = tiny_dit().double()
    random = np.random.default_rng(1)
    templates = [random.integers(4, 27, size=n, dtype=np.uint8) for n in (9, 30, 1, 30, 17, 22)]
    for template, share in zip(templates, itertools.cycle((1.0, 0.2, 0.6)), strict=False):
        template[random.random(len(template)) < share] = MASK
    sampling = Sampling(seed=2, **options)
    with torch.inference_mode():
        expected = plain_loop(model, paradigm, templates, sampling)
    for budget in (40, 1000):
        found = sample(model, paradigm, templates, sampling, max_length=64, token_budget=budget)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
