"""Samplers: nothing masked left, nothing given changed, and the model's own frequencies."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from d2plm.alphabet import MASK, encode
from d2plm.batch import positions, segment_ids, segment_sum
from d2plm.errors import ConfigError, DataError, ModelError
from d2plm.generation.infilling import parse_template
from d2plm.generation.samplers import Sampling, residue_probabilities, sample
from d2plm.paradigms.base import Paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching

Tokens = NDArray[np.uint8]
P_VALUE = 0.01

CASES: list[tuple[Paradigm, dict[str, Any]]] = [
    (AbsorbingDiffusion(), {}),
    (AbsorbingDiffusion(50, "cosine"), {}),
    (MaskFlowMatching(), {}),
    (MaskFlowMatching("linear"), {"corrector": 2.0}),
    (MaskFlowMatching("cubic"), {"corrector": 0.5}),
]
EVERY = pytest.mark.parametrize(("paradigm", "options"), CASES)


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
@settings(deadline=None, max_examples=25)
def test_every_given_residue_is_kept_and_every_mask_filled(
    paradigm: Paradigm, options: dict[str, Any], templates: list[Tokens], steps: int, seed: int
) -> None:
    sampling = Sampling(steps=steps, seed=seed, **options)
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
    runs = [
        sample(
            context_model,
            paradigm,
            templates,
            Sampling(steps=7, seed=seed, **options),
            max_length=22,
            token_budget=budget,
        )
        for seed, budget in ((1, 22), (1, 40), (1, 10_000), (2, 22))
    ]
    for other in runs[1:3]:
        for a, b in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert any((a != b).any() for a, b in zip(runs[0], runs[3], strict=True))
    assert (runs[0][0] != runs[0][3]).any()  # equal templates, different draws


@EVERY
@pytest.mark.parametrize("steps", [1, 12])
def test_independent_sites_come_out_with_their_own_frequencies(
    paradigm: Paradigm, options: dict[str, Any], steps: int
) -> None:
    sites, copies = 3, 4000
    logits = torch.randn(sites + 2, 33, generator=torch.Generator().manual_seed(1)) * 1.2
    sampling = Sampling(steps=steps, seed=steps, **options)
    filled = sample(site_model(logits), paradigm, [masks(sites)] * copies, sampling, max_length=8)
    table = np.stack(filled) - 4
    expected = logits[1:-1, 4:24].double().softmax(-1).numpy()
    for site in range(sites):
        counts = np.bincount(table[:, site], minlength=20)
        assert stats.chisquare(counts, expected[site] * copies).pvalue > P_VALUE
    for a, b in itertools.combinations(range(sites), 2):
        halves = np.histogram2d(table[:, a] % 2, table[:, b] % 2, bins=2)[0]
        assert stats.chi2_contingency(halves).pvalue > P_VALUE


@pytest.mark.parametrize(
    ("paradigm", "options"),
    [(AbsorbingDiffusion(), {}), (MaskFlowMatching(), {})],
)
def test_many_steps_sample_a_joint_distribution_that_one_step_cannot(
    paradigm: Paradigm, options: dict[str, Any]
) -> None:
    """Two sites that are always equal: the exact posterior is known."""

    def copy_model(tokens: Tensor, cu_seqlens: Tensor, _max: int, _times: Tensor) -> Tensor:
        rows = tokens.view(-1, 4)[:, 1:3].long()
        logits = torch.full((len(rows), 4, 33), -60.0)
        logits[:, :, 4], logits[:, :, 5] = np.log(0.3), np.log(0.7)
        for site in (0, 1):
            other = rows[:, 1 - site]
            known = other != MASK
            logits[known, site + 1, 4:6] = -60.0
            logits[known.nonzero()[:, 0], site + 1, other[known]] = 0.0
        return logits.flatten(0, 1)

    copies = 2000
    pairs = {}
    for steps in (1, 100):
        filled = sample(
            copy_model,
            paradigm,
            [masks(2)] * copies,
            Sampling(steps=steps, **options),
            max_length=4,
        )
        pairs[steps] = np.stack(filled)
    equal = {steps: (rows[:, 0] == rows[:, 1]).mean() for steps, rows in pairs.items()}
    assert equal[1] == pytest.approx(0.3**2 + 0.7**2, abs=0.05)
    assert equal[100] > 0.98
    first = int((pairs[100][:, 0] == 4).sum())
    assert stats.binomtest(first, copies, 0.3).pvalue > P_VALUE


# --- the distribution to draw from -------------------------------------------------------------


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
    ],
)
def test_temperature_top_k_and_top_p(settings_: dict[str, Any], expected: list[float]) -> None:
    found = residue_probabilities(
        AbsorbingDiffusion(), logits_of([0.5, 0.3, 0.15, 0.05]), Sampling(**settings_)
    )
    found = found[0] / found.sum()
    np.testing.assert_allclose(found[: len(expected)], expected, rtol=1e-5)
    assert found[len(expected) :].sum() < 1e-9


@EVERY
def test_top_1_takes_the_likeliest_residue_everywhere(
    paradigm: Paradigm, options: dict[str, Any]
) -> None:
    logits = torch.randn(12, 33, generator=torch.Generator().manual_seed(3))
    for seed in (0, 1):
        sampling = Sampling(steps=5, top_k=1, seed=seed, **options)
        (filled,) = sample(site_model(logits), paradigm, [masks(10)], sampling, max_length=16)
        assert filled.tolist() == (logits[1:-1, 4:24].argmax(-1) + 4).tolist()


def test_shift_samples_from_the_logits_of_the_previous_position() -> None:
    logits = torch.randn(8, 33, generator=torch.Generator().manual_seed(4))
    (filled,) = sample(
        site_model(logits),
        AbsorbingDiffusion(shift=True),
        [masks(6)],
        Sampling(steps=4, top_k=1),
        max_length=8,
    )
    assert filled.tolist() == (logits[:6, 4:24].argmax(-1) + 4).tolist()


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paradigm", "sampler", "own"),
    [
        (AbsorbingDiffusion(), "euler", "ancestral"),
    ],
)
def test_a_sampler_of_the_other_paradigm_is_refused_with_the_reason(
    paradigm: Paradigm, sampler: str, own: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(sampler=sampler).resolved(paradigm)
    for part in ("generation.sampler", "is not defined for", paradigm.name, own):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sampler": "gibbs"}, "generation.sampler"),
        ({"steps": 0}, "generation.steps"),
        ({"steps": 1001}, "generation.steps"),
        ({"steps": 2.5}, "generation.steps"),
        ({"temperature": 0.0}, "generation.temperature"),
        ({"top_k": 0}, "generation.top_k"),
        ({"top_p": 0.0}, "generation.top_p"),
        ({"top_p": 1.1}, "generation.top_p"),
        ({"corrector": -1.0}, "generation.corrector"),
        ({"corrector": 1.0}, "generation.corrector"),
    ],
)
def test_impossible_settings_are_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        Sampling(**changes).resolved(AbsorbingDiffusion())


def test_defaults_are_the_paradigms_own() -> None:
    resolved = Sampling().resolved(AbsorbingDiffusion(64))
    assert (resolved.sampler, resolved.steps) == ("ancestral", 64)
    flow = Sampling().resolved(MaskFlowMatching(num_flow_steps=9))
    assert (flow.sampler, flow.steps) == ("euler", 9)


def test_a_template_beyond_the_models_limit_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="sequence 1 has 9 residues"):
        sample(context_model, AbsorbingDiffusion(), [masks(3), masks(9)], Sampling(), max_length=10)


def test_progress_counts_every_step_of_every_batch() -> None:
    seen: list[tuple[int, int]] = []
    sample(
        context_model,
        AbsorbingDiffusion(),
        [masks(8)] * 3,
        Sampling(steps=4),
        max_length=10,
        token_budget=10,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(i, 12) for i in range(1, 13)]


def test_templates_read_both_spellings_of_a_gap() -> None:
    tokens = parse_template(" MK_<mask>va\n", "t")
    assert tokens.tolist() == [*encode("MK"), MASK, MASK, *encode("VA")]


@pytest.mark.parametrize(
    ("text", "reason"), [("MK1_", "'1' at position 3"), ("MKV", "nothing to fill in")]
)
def test_unusable_templates_are_refused_with_the_place(text: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        parse_template(text, "mine")
