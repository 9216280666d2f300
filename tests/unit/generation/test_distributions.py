"""A step's distribution without sampling, and that of samples, on a known joint distribution."""

import itertools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from d2plm.core.vocabulary import CANONICAL_START, MASK, PROTEIN, Vocabulary
from d2plm.generation.kernels import step_between
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from tests.conftest import Tokens
from tests.unit.generation.known_joint import LETTERS, KnownJoint, distance, exact_law
from tests.unit.paradigms.numbered_tokens import NumberedTokens, of

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


P_VALUE = 0.01
LENGTH, ROW = 14, 16  # without and with <cls> and <eos>; such rows pack without padding
WHOLE = 10**9  # everything in one batch


@pytest.mark.parametrize(
    ("paradigm", "options"),
    [
        (AbsorbingDiffusion(), {}),
        (AbsorbingDiffusion(), {"sampler": "remdm", "remdm_eta": 0.3}),
        (MaskFlowMatching(), {"corrector": 2.0}),
        (UniformFlowMatching(), {"corrector": 2.0}),
        (UniformFlowMatching(schedule="linear"), {"sampler": "ancestral"}),
    ],
)
@pytest.mark.parametrize("steps", [1, 8])
def test_samples_follow_the_product_of_the_kernels(
    paradigm: Paradigm, options: dict[str, Any], steps: int
) -> None:
    """4,200 pairs, seven in each sequence; that product's error falls with the steps."""
    joint, blocks = KnownJoint(2), LENGTH // 2
    sampling = Sampling(steps=steps, seed=1, **options)
    model, templates = joint.denoiser(paradigm, blocks), [np.full(LENGTH, MASK, np.uint8)] * 600
    rows = sample(model, paradigm, templates, sampling, max_length=16, token_budget=WHOLE)
    pairs = [pair for row in rows for pair in row.reshape(blocks, 2)]
    law = exact_law(joint, paradigm, sampling, steps)
    assert stats.chisquare(joint.counts(pairs), law * len(pairs)).pvalue > P_VALUE


@pytest.mark.parametrize(
    ("paradigm", "vocabulary"),
    [(AbsorbingDiffusion(), PROTEIN), (MaskFlowMatching(), NumberedTokens(3))],
)
def test_first_hitting_draws_from_the_joint_distribution_with_no_steps_at_all(
    paradigm: Paradigm, vocabulary: Vocabulary
) -> None:
    """5,000 triples, five in each sequence."""
    joint, paradigm = KnownJoint(3, vocabulary), of(paradigm, vocabulary)
    model, sampling = joint.denoiser(paradigm, 5), Sampling(sampler="first_hitting")
    templates = [np.full(15, vocabulary.mask, dtype=vocabulary.dtype)] * 1000
    rows = sample(model, paradigm, templates, sampling, max_length=17, token_budget=WHOLE)
    triples = [triple for row in rows for triple in row.reshape(5, 3)]
    assert stats.chisquare(joint.counts(triples), joint.p * len(triples)).pvalue > P_VALUE


HIDDEN = -1


def confidence_law(joint: KnownJoint, masks_after: list[int], remask: bool) -> NDArray[np.float64]:
    """MaskGIT's law over three sites, by following every draw; `masks_after` each step."""

    def conditional(site: int, shown: tuple[int, ...]) -> NDArray[np.float64]:
        """p(letter at `site` | what the others show)."""
        free = [other == site or letter == HIDDEN for other, letter in enumerate(shown)]
        fixed = (slice(None) if f else slice(a, a + 1) for f, a in zip(free, shown, strict=True))
        p = joint.table()[tuple(fixed)].sum(tuple({0, 1, 2} - {site}))
        return np.asarray(p / p.sum())

    law: dict[tuple[int, ...], float] = {(HIDDEN,) * 3: 1.0}
    for left in masks_after:
        following: dict[tuple[int, ...], float] = {}
        for shown, chance in law.items():
            p = [conditional(site, shown) for site in range(3)]
            hidden = [site for site in range(3) if shown[site] == HIDDEN]
            for letters in itertools.product(range(LETTERS), repeat=len(hidden)):
                filled, probability = list(shown), chance
                for site, letter in zip(hidden, letters, strict=True):
                    filled[site] = letter
                    probability *= p[site][letter]
                competing = range(3) if remask else hidden
                confidence = {site: p[site][filled[site]] for site in competing}
                for site in sorted(confidence, key=lambda site: confidence[site])[:left]:
                    filled[site] = HIDDEN
                key = tuple(filled)
                following[key] = following.get(key, 0) + probability
        law = following
    return np.array([law.get(s, 0.0) for s in joint.sequences])


@pytest.mark.parametrize("remask", [False, True])
@pytest.mark.parametrize(
    ("steps", "masks_after"),
    [(2, [2, 0]), (50, [2, 1, 0])],  # ⌈3·(1 − k/steps)⌉, always fewer
)
def test_confidence_keeps_the_likeliest_draws_and_as_many_as_it_says(
    steps: int, masks_after: list[int], remask: bool
) -> None:
    copies, joint, paradigm = 4000, KnownJoint(3), MaskFlowMatching(schedule="linear")
    joint.p = np.random.default_rng(0).dirichlet(np.ones(27))  # without equal probabilities
    law = confidence_law(joint, masks_after, remask)
    sampling = Sampling(sampler="confidence", steps=steps, remask=remask, seed=5)
    model, templates = joint.denoiser(paradigm), [np.full(3, MASK, np.uint8)] * copies
    rows = sample(model, paradigm, templates, sampling, max_length=5, token_budget=WHOLE)
    counts, seen = joint.counts(rows), law > 0
    assert (counts[~seen] == 0).all()
    assert stats.chisquare(counts[seen], law[seen] * copies).pvalue > P_VALUE


class Recorder:
    """A model of independent sites that keeps what it was given."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.times: list[Tensor] = []
        generator = torch.Generator().manual_seed(1)
        self.logits = torch.randn(33, generator=generator, dtype=torch.float64)

    def __call__(self, tokens: Tensor, _cu: Tensor, _max: int, times: Tensor) -> Tensor:
        self.tokens.append(tokens.view(-1, ROW).clone())
        self.times.append(times.double())
        return self.logits.expand(len(tokens), 33)

    def run(self, paradigm: Paradigm, template: Tokens, copies: int, **options: Any) -> None:
        words = self, paradigm, [template] * copies, Sampling(**options)
        sample(*words, max_length=ROW, token_budget=WHOLE)


@pytest.mark.parametrize(
    ("paradigm", "sampler"),
    [
        (AbsorbingDiffusion(num_train_timesteps=None, schedule="cosine"), "ancestral"),
        (MaskFlowMatching(schedule="polynomial"), "euler"),
        (UniformFlowMatching(schedule="linear"), "ancestral"),
    ],
)
@pytest.mark.parametrize("wanted", [14, 3])
def test_the_model_receives_the_time_of_the_share_of_the_sequence_that_is_corrupted(
    paradigm: Paradigm, sampler: str, wanted: int
) -> None:
    template = np.full(LENGTH, CANONICAL_START, dtype=np.uint8)
    template[:wanted] = MASK
    template[-2:] = np.where(template[-2:] == MASK, MASK, 24)  # X can never be corrupted
    share = wanted / np.isin(template, [CANONICAL_START, MASK]).sum()
    model = Recorder()
    copies = 200  # so that in each step one of them changes, otherwise the model is not called
    model.run(paradigm, template, copies, steps=8, sampler=sampler)
    process = np.linspace(paradigm.prior_time, paradigm.data_time, 9)[:-1]
    assert all((times == times[0]).all() for times in model.times)
    told = torch.stack([times[0] for times in model.times])
    if wanted == LENGTH:
        np.testing.assert_allclose(told, process, atol=1e-6)
    fraction = paradigm.corrupted_fraction(told).numpy()
    expected = share * paradigm.corrupted_fraction(torch.from_numpy(process)).numpy()
    np.testing.assert_allclose(fraction, expected, atol=1e-6)


def test_first_hitting_fills_one_residue_at_each_of_its_own_times() -> None:
    copies = 1000
    template = np.full(LENGTH, CANONICAL_START, dtype=np.uint8)
    template[[1, 5, 6, 9]] = MASK
    model, paradigm = Recorder(), AbsorbingDiffusion(num_train_timesteps=None)
    model.run(paradigm, template, copies, sampler="first_hitting")
    left = torch.stack([(tokens == MASK).sum(-1) for tokens in model.tokens])
    assert (left == torch.tensor([4, 3, 2, 1])[:, None]).all()
    before = np.ones(copies)
    for number, times in zip((4, 3, 2, 1), model.times, strict=True):
        fraction = times[:copies].numpy() * LENGTH / 4
        assert stats.kstest((fraction / before) ** number, "uniform").pvalue > P_VALUE
        before = fraction
    first = (model.tokens[1] == MASK).logical_not()[:, 1:-1][:, [1, 5, 6, 9]].sum(0)
    assert stats.chisquare(first.numpy()).pvalue > P_VALUE


def test_confidence_tells_the_time_of_the_masks_that_there_are() -> None:
    template = np.full(LENGTH, CANONICAL_START, dtype=np.uint8)
    template[:7] = MASK
    model, paradigm = Recorder(), MaskFlowMatching(schedule="cosine")
    model.run(paradigm, template, 1, sampler="confidence", steps=4)
    left = [int((tokens == MASK).sum()) for tokens in model.tokens]
    assert left[0] == 7
    assert left == sorted(set(left), reverse=True)
    fraction = paradigm.corrupted_fraction(torch.stack(model.times)[:, 0])
    np.testing.assert_allclose(fraction, np.array(left) / LENGTH, atol=1e-6)
