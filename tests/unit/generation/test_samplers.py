"""Samplers: nothing masked left, nothing given changed, and the model's own frequencies."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from d2plm.core.batch import positions, segment_ids, segment_sum
from d2plm.core.errors import ConfigError, DataError, ModelError
from d2plm.core.vocabulary import MASK, encode
from d2plm.generation.kernels import tempered
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm, predicted_log_softmax
from tests.conftest import MonkeyPatch, Tokens

SAMPLERS = {"ancestral", "euler", "first_hitting", "confidence", "remdm"}

CASES: list[tuple[Paradigm, dict[str, Any]]] = [
    (AbsorbingDiffusion(num_train_timesteps=50, schedule="cosine"), {}),
    (AbsorbingDiffusion(), {"sampler": "first_hitting"}),
    (AbsorbingDiffusion(), {"sampler": "confidence", "remask": True}),
    (AbsorbingDiffusion(), {"sampler": "remdm", "remdm_eta": 0.3}),
    (MaskFlowMatching(schedule="linear"), {"corrector": 2.0}),
    (MaskFlowMatching(), {"sampler": "confidence"}),
    (MaskFlowMatching(), {"sampler": "remdm", "remdm_schedule": "rescale", "remdm_eta": 0.3}),
    (UniformFlowMatching(), {"corrector": 0.5}),
    (UniformFlowMatching(schedule="linear"), {"sampler": "ancestral"}),
]
EVERY = pytest.mark.parametrize(("paradigm", "options"), CASES)


def with_steps(steps: int, **options: Any) -> Sampling:
    """The settings with so many steps, for a sampler that has steps."""
    has_none = options.get("sampler") == "first_hitting"
    return Sampling(steps=None if has_none else steps, **options)


def context_model(tokens: Tensor, cu_seqlens: Tensor, _max: int, times: Tensor) -> Tensor:
    """Logits from position, the sum of the own sequence and the time: exact in any batch."""
    segments = segment_ids(cu_seqlens, tokens.shape[0])
    total = segment_sum(tokens.long(), segments, cu_seqlens.shape[0] - 1)[segments]
    place = positions(cu_seqlens, segments)
    letters = torch.arange(33)
    phase = (total + 5 * place)[:, None] * (letters + 1) % 13
    return phase.float() / 6 + times[segments][:, None] * (letters % 2)


def site_model(site_logits: Tensor) -> Callable[..., Tensor]:
    """Independent sites: position i has logits `site_logits[i]` [L + 2, 33] whatever is visible."""

    def model(tokens: Tensor, cu_seqlens: Tensor, _max: int, _times: Tensor) -> Tensor:
        place = positions(cu_seqlens, segment_ids(cu_seqlens, tokens.shape[0]))
        return site_logits[place.clamp(max=len(site_logits) - 1)]  # the padding tail is longer

    return model


def masks(length: int) -> Tokens:
    return np.full(length, MASK, dtype=np.uint8)


TEMPLATES = st.lists(
    st.lists(st.integers(4, 28) | st.just(MASK), max_size=20).map(
        lambda tokens: np.array(tokens, dtype=np.uint8)
    ),
    min_size=1,
    max_size=5,
)


@EVERY
@given(templates=TEMPLATES, steps=st.integers(1, 6), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=10)
def test_every_given_residue_is_kept_and_every_mask_filled(
    paradigm: Paradigm, options: dict[str, Any], templates: list[Tokens], steps: int, seed: int
) -> None:
    sampling = with_steps(steps, seed=seed, **options)
    filled = sample(context_model, paradigm, templates, sampling, max_length=32)
    for template, result in zip(templates, filled, strict=True):
        given_residue = template != MASK
        assert result.dtype == np.uint8
        np.testing.assert_array_equal(result[given_residue], template[given_residue])
        wanted = result[~given_residue]
        assert ((wanted >= 4) & (wanted < 24)).all()


@EVERY
def test_the_same_seed_gives_the_same_proteins_however_they_are_batched(
    paradigm: Paradigm, options: dict[str, Any]
) -> None:
    templates = [masks(n) for n in (20, 3, 11, 20, 7)] + [encode("MKVXLA")]
    templates[5][[1, 4]] = MASK

    def run(seed: int, budget: int) -> list[Tokens]:
        sampling = with_steps(7, seed=seed, **options)
        words = (context_model, paradigm, templates, sampling)
        return sample(*words, max_length=22, token_budget=budget)

    runs = [run(1, 22), run(1, 40), run(1, 10_000), run(2, 22)]
    for other in runs[1:3]:
        for a, b in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert any((a != b).any() for a, b in zip(runs[0], runs[3], strict=True))
    assert (runs[0][0] != runs[0][3]).any()  # equal templates, different draws


def logits_of(probabilities: list[float]) -> Tensor:
    row = torch.full((1, 33), 5.0)
    row[0, 4:24] = -60.0
    row[0, 4 : 4 + len(probabilities)] = torch.tensor(probabilities).log()
    return row


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 2}, [0.625, 0.375]),
        ({"top_k": 30}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_p": 0.4}, [1.0]),
        ({"top_p": 0.6}, [0.625, 0.375]),
        ({"top_p": 0.81}, [50 / 95, 30 / 95, 15 / 95]),
        ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        ({"temperature": 0.5, "top_k": 2}, [0.25 / 0.34, 0.09 / 0.34]),
        ({"temperature": 1e-300}, [1.0]),
    ],
)
def test_temperature_top_k_and_top_p(settings_: dict[str, Any], expected: list[float]) -> None:
    log_p = predicted_log_softmax(logits_of([0.5, 0.3, 0.15, 0.05]))
    found = tempered(log_p, Sampling(**settings_))[0].exp()
    assert found.sum().item() == pytest.approx(1)
    np.testing.assert_allclose(found[: len(expected)], expected, rtol=1e-5)
    assert found[len(expected) :].sum() < 1e-9


@EVERY
def test_top_1_takes_the_likeliest_residue_everywhere(
    paradigm: Paradigm, options: dict[str, Any]
) -> None:
    logits = torch.randn(12, 33, generator=torch.Generator().manual_seed(3))
    for seed in (0, 1):
        sampling = with_steps(5, top_k=1, seed=seed, **options)
        (filled,) = sample(site_model(logits), paradigm, [masks(10)], sampling, max_length=16)
        assert filled.tolist() == (logits[1:-1, 4:24].argmax(-1) + 4).tolist()


def test_shift_samples_from_the_logits_of_the_previous_position() -> None:
    logits = torch.randn(8, 33, generator=torch.Generator().manual_seed(4))
    paradigm, sampling = AbsorbingDiffusion(shift=True), Sampling(steps=4, top_k=1)
    (filled,) = sample(site_model(logits), paradigm, [masks(6)], sampling, max_length=8)
    assert filled.tolist() == (logits[:6, 4:24].argmax(-1) + 4).tolist()


@pytest.mark.parametrize("paradigm", [AbsorbingDiffusion(), MaskFlowMatching()])
def test_every_sampler_is_defined_or_rejected_with_a_reason(paradigm: Paradigm) -> None:
    assert {*paradigm.samplers, *paradigm.refused_samplers} == SAMPLERS


UNIFORM = UniformFlowMatching()


@pytest.mark.parametrize(
    ("changes", "key", "paradigm"),
    [
        ({"sampler": "gibbs"}, "sampler", AbsorbingDiffusion()),
        ({"sampler": "euler"}, "sampler", AbsorbingDiffusion()),
        *(({"sampler": s}, "sampler", UNIFORM) for s in ("first_hitting", "confidence", "remdm")),
        ({"steps": 0}, "steps", AbsorbingDiffusion()),
        ({"steps": 1001}, "steps", AbsorbingDiffusion()),
        ({"sampler": "first_hitting", "steps": 8}, "steps", AbsorbingDiffusion()),
        ({"corrector": 1.0}, "corrector", AbsorbingDiffusion()),
        ({"corrector": 1.0, "sampler": "remdm"}, "corrector", MaskFlowMatching()),
        ({"remask": True}, "remask", AbsorbingDiffusion()),
        ({"remask": 1, "sampler": "confidence"}, "remask", AbsorbingDiffusion()),
        ({"remdm_schedule": "rescale"}, "remdm_schedule", AbsorbingDiffusion()),
        ({"remdm_schedule": "loop", "sampler": "remdm"}, "remdm_schedule", AbsorbingDiffusion()),
        ({"remdm_eta": 0.1, "sampler": "confidence"}, "remdm_eta", AbsorbingDiffusion()),
    ],
)
def test_settings_that_are_impossible_or_would_be_ignored_are_rejected_by_name(
    changes: dict[str, Any], key: str, paradigm: Paradigm
) -> None:
    with pytest.raises(ConfigError, match=f"^{key}="):
        Sampling(**changes).resolved(paradigm)


@pytest.mark.parametrize(
    ("paradigm", "given", "own"),
    [
        (MaskFlowMatching(num_flow_steps=9), {}, {"sampler": "euler", "steps": 9, "corrector": 0}),
        (AbsorbingDiffusion(num_train_timesteps=64), {}, {"sampler": "ancestral", "steps": 64}),
        (MaskFlowMatching(), {"sampler": "first_hitting"}, {}),
        (MaskFlowMatching(), {"sampler": "confidence", "steps": 8}, {"remask": False}),
        *(
            (AbsorbingDiffusion(), {"sampler": "remdm", "steps": 8, "remdm_schedule": one}, eta)
            for one, eta in (("cap", {"remdm_eta": 0.008}), ("rescale", {"remdm_eta": 0.015}))
        ),
    ],
)
def test_settings_that_matter_are_written_down_with_the_paradigms_defaults(
    paradigm: Paradigm, given: dict[str, Any], own: dict[str, Any]
) -> None:
    common = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "seed": 0}
    resolved = Sampling(**given).resolved(paradigm)
    assert resolved.applied() == {**common, **given, **own}
    assert resolved.resolved(paradigm) == resolved


@pytest.mark.parametrize(
    ("templates", "error"), [([masks(3), masks(9)], ModelError), ([], DataError)]
)
def test_unusable_templates_are_rejected(templates: list[Tokens], error: type[Exception]) -> None:
    with pytest.raises(error):
        sample(context_model, AbsorbingDiffusion(), templates, Sampling(), max_length=10)


@EVERY
def test_logits_that_are_not_finite_stop_at_once_and_say_where(
    paradigm: Paradigm, options: dict[str, Any]
) -> None:
    calls = 0

    def breaking(tokens: Tensor, cu_seqlens: Tensor, limit: int, times: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        logits = context_model(tokens, cu_seqlens, limit, times)
        if calls == 3:
            logits[7] = float("nan")
        return logits

    sampling = with_steps(5, **options)
    with pytest.raises(ModelError) as caught:
        # Of so many that some change at every step, and the model is called at every step.
        sample(breaking, paradigm, [masks(200)], sampling, max_length=256)
    sampler = sampling.resolved(paradigm).sampler
    for part in ("step 3", sampler, "sequence 0, residue 7"):
        assert part in str(caught.value)
    assert calls == 3


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "first_hitting"},
        {"sampler": "confidence", "steps": 100},  # one residue a step
        {"sampler": "confidence", "steps": 100, "remask": True},
    ],
)
@pytest.mark.parametrize("token_budget", [32, 10_000])
def test_a_sequence_goes_through_the_model_once_for_each_wanted_residue_and_then_no_more(
    options: dict[str, Any], token_budget: int
) -> None:
    wanted, templates = [5, 0, 21, 1], list[Tokens]()
    for number, count in enumerate(wanted):  # the first residue is the number of the template
        templates.append(
            np.array([4 + number, 20, *[MASK] * count, *[20] * (28 - count)], np.uint8)
        )
    shown, seen = Counter[int](), list[tuple[int, int]]()

    def model(tokens: Tensor, cu_seqlens: Tensor, limit: int, times: Tensor) -> Tensor:
        assert len(times) == len(cu_seqlens) - 1
        shown.update((tokens[cu_seqlens[:-1].long() + 1] - 4).tolist())
        return context_model(tokens, cu_seqlens, limit, times)

    sample(
        *(model, AbsorbingDiffusion(), templates, Sampling(**options)),
        max_length=1000,
        token_budget=token_budget,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert shown == {0: 5, 2: 21, 3: 1}
    steps = 21 if token_budget == 10_000 else sum(wanted)
    assert seen == [(done, steps) for done in range(1, steps + 1)]


@EVERY
def test_nothing_changes_where_every_sequence_goes_through_the_model_at_every_step(
    paradigm: Paradigm, options: dict[str, Any], monkeypatch: MonkeyPatch
) -> None:
    random = np.random.default_rng(3)
    templates = [masks(int(n)) for n in random.integers(1, 40, size=60)]
    for template in templates[::2]:
        template[random.random(len(template)) < 0.8] = 7

    def run() -> tuple[Tokens, int]:
        """The proteins, and how many the model was shown in all steps."""
        shown = 0

        def model(tokens: Tensor, cu_seqlens: Tensor, limit: int, times: Tensor) -> Tensor:
            nonlocal shown
            shown += len(times)
            return context_model(tokens, cu_seqlens, limit, times)

        sampling = with_steps(50, **options)
        return np.concatenate(sample(model, paradigm, templates, sampling, max_length=64)), shown

    skipping, few = run()
    monkeypatch.setattr(paradigm, "may_change", partial(Paradigm.may_change, paradigm))
    everywhere, many = run()
    np.testing.assert_array_equal(skipping, everywhere)
    if paradigm.source == "mask" and options.get("sampler") not in ("first_hitting", "confidence"):
        assert few < many


def test_padding_never_goes_through_the_model() -> None:
    lengths, budget = [20, 17, 17, 9, 3], 40

    def model(tokens: Tensor, cu_seqlens: Tensor, limit: int, times: Tensor) -> Tensor:
        assert len(tokens) <= budget and cu_seqlens[-1] == len(tokens)
        sizes = cu_seqlens.diff().tolist()
        assert all(size - 2 in lengths for size in sizes) and max(sizes) <= limit
        return context_model(tokens, cu_seqlens, limit, times)

    arguments = (model, UniformFlowMatching(), [*map(masks, lengths)], Sampling(steps=2))
    filled = sample(*arguments, max_length=1000, token_budget=budget)
    assert [len(row) for row in filled] == lengths
