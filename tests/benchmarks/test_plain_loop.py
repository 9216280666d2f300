"""The plain loop of the generation benchmark generates the sequences of the packed sampler."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.generate import plain_loop
from d2plm.core.vocabulary import MASK
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.model.dit import DiT
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching
from d2plm.paradigms.paradigm import Paradigm


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
