"""One step's distribution, without sampling: marginals are exact, and errors fall with the step."""

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from d2plm.core.vocabulary import PROTEIN, Vocabulary
from d2plm.generation.kernels import step_between
from d2plm.generation.sampler_settings import Sampling
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from tests.unit.generation.known_joint import KnownJoint, distance, exact_law
from tests.unit.paradigms.numbered_tokens import NumberedTokens

KERNELS: list[tuple[Paradigm, dict[str, Any]]] = [
    (AbsorbingDiffusion(), {"sampler": "ancestral"}),
    (AbsorbingDiffusion(num_train_timesteps=None, schedule="cosine"), {"sampler": "remdm"}),
    (AbsorbingDiffusion(), {"sampler": "remdm", "remdm_eta": 1.0}),
    (AbsorbingDiffusion(), {"sampler": "remdm", "remdm_schedule": "rescale", "remdm_eta": 0.4}),
    (MaskFlowMatching(schedule="linear"), {}),
    (MaskFlowMatching(schedule="cubic"), {"corrector": 2.0}),
    (MaskFlowMatching(schedule="polynomial"), {"corrector": 1000.0}),
    (UniformFlowMatching(), {}),
    (UniformFlowMatching(schedule="linear"), {"corrector": 2.0}),
    (UniformFlowMatching(schedule="polynomial"), {"corrector": 1000.0}),
    (UniformFlowMatching(schedule="cubic"), {"sampler": "ancestral"}),
]
UNEVEN = np.array([0.0, 0.1, 0.15, 0.5, 0.502, 0.9, 0.999, 1.0])


def of(paradigm: Paradigm, vocabulary: Vocabulary) -> Paradigm:
    """A copy for another vocabulary."""
    other = copy.copy(paradigm)
    other.vocabulary = vocabulary
    return other


@pytest.mark.parametrize(("paradigm", "options"), KERNELS)
@pytest.mark.parametrize("residues", [3, 20])
def test_each_step_leaves_a_residues_marginal_that_of_the_forward_process(
    paradigm: Paradigm, options: dict[str, Any], residues: int
) -> None:
    paradigm = of(paradigm, PROTEIN if residues == 20 else NumberedTokens(residues))
    mask, stop = paradigm.vocabulary.mask, paradigm.vocabulary.stop
    generator = torch.manual_seed(0)
    p = torch.softmax(torch.randn(residues, dtype=torch.float64, generator=generator), 0)
    source = torch.zeros(1 + residues, dtype=torch.float64)
    if paradigm.source == "mask":
        source[0] = 1
    else:
        source[1:] = 1 / residues
    clean = torch.cat([torch.zeros(1, dtype=torch.float64), p])
    tokens = torch.tensor([mask, *range(4, stop)], dtype=torch.int32)
    sampling = Sampling(**options).resolved(paradigm)
    times = paradigm.prior_time + (paradigm.data_time - paradigm.prior_time) * UNEVEN
    law = source
    for start, stop in pairwise(times.tolist()):
        shown = tokens.where(law > 0, 4)  # a uniform source shows no masks
        step = step_between(paradigm, sampling, start, stop)
        kernel = paradigm.transition(p.log().expand(1 + residues, residues), shown, step)
        assert (kernel >= 0).all()
        torch.testing.assert_close(kernel.sum(-1), torch.ones(1 + residues, dtype=torch.float64))
        law = law @ kernel
        kept = paradigm.kept(stop)
        torch.testing.assert_close(law, kept * clean + (1 - kept) * source, rtol=0, atol=1e-11)
    assert law[0] == 0


@pytest.mark.parametrize(
    ("paradigm", "options", "vocabulary"),
    [
        (AbsorbingDiffusion(), {"sampler": "ancestral"}, PROTEIN),
        (MaskFlowMatching(), {"corrector": 2.0}, NumberedTokens(3)),
        (UniformFlowMatching(schedule="linear"), {"corrector": 2.0}, PROTEIN),
        (UniformFlowMatching(), {"sampler": "ancestral"}, NumberedTokens(3)),
    ],
)
def test_halving_the_step_halves_the_error(
    paradigm: Paradigm, options: dict[str, Any], vocabulary: Vocabulary
) -> None:
    joint, paradigm = KnownJoint(2, vocabulary), of(paradigm, vocabulary)
    errors = [
        distance(exact_law(joint, paradigm, Sampling(**options), steps), joint)
        for steps in (16, 32, 64)
    ]
    assert errors[0] > 0.01
    assert errors[1] / errors[0] == pytest.approx(0.5, abs=0.03)
    assert errors[2] / errors[1] == pytest.approx(0.5, abs=0.03)


def test_a_step_corrupts_again_at_the_strength_that_is_set() -> None:
    flow, h = MaskFlowMatching(schedule="linear"), 1e-4
    corrector = Sampling(sampler="euler", corrector=3.0)
    middle = step_between(flow, corrector, 0.5 - h, 0.5 + h)
    assert middle.renoise == pytest.approx(3.0 * 2 * h / 0.5, rel=1e-3)  # the rate c·κ̇/κ
    assert step_between(flow, corrector, 0.0, h).renoise == 0
    for schedule, expected in (("cap", 0.2), ("rescale", 0.2 * (1 - 0.8) / 0.7)):
        remdm = Sampling(sampler="remdm", remdm_schedule=schedule, remdm_eta=0.2)
        assert step_between(flow, remdm, 0.7, 0.8).renoise == pytest.approx(expected)
