"""Schedules by their formulas: values, rates, inverses, and what `corrupt` draws by them.

Statistical tests at level LEVEL with fixed seeds: a right process fails once in a thousand seeds.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.core.vocabulary import CANONICAL, CANONICAL_START, MASK, encode
from d2plm.data.loader import framed
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.noise_schedules import (
    Cosine,
    Cubic,
    InSteps,
    LinearBeta,
    NoiseSchedule,
    Polynomial,
)
from d2plm.paradigms.paradigm import Paradigm
from tests.unit.paradigms.closed_forms import (
    ALPHA_BARS,
    CONTINUOUS_ALPHA_BARS,
    KAPPAS,
    Curve,
    hermite,
)

CONTINUOUS: dict[str, tuple[NoiseSchedule, Curve]] = {
    "linear": (Polynomial(1), lambda t: t),
    "cosine": (Cosine(), lambda t: CONTINUOUS_ALPHA_BARS["cosine"](1 - t)),
    "polynomial 2": (Polynomial(2.0), lambda t: t * t),
    "polynomial 0.7": (Polynomial(0.7), lambda t: t**0.7),
    "cubic": (Cubic(0.0, 0.0), hermite(0, 0)),
    "cubic 3 0.5": (Cubic(3.0, 0.5), hermite(3, 0.5)),
    "linear_beta": (LinearBeta(1e-4, 0.02), lambda t: CONTINUOUS_ALPHA_BARS["linear_beta"](1 - t)),
}
IN_STEPS: dict[str, NoiseSchedule] = {
    "linear": Polynomial(1),
    "cosine": Cosine(),
    "linear_beta": LinearBeta(1e-4, 0.02),
}
EVERY = pytest.mark.parametrize("schedule, curve", CONTINUOUS.values(), ids=[*CONTINUOUS])


def grid(low: float, high: float, number: int) -> Tensor:
    return torch.linspace(low, high, number, dtype=torch.float64)


@EVERY
def test_kept_its_rate_and_its_inverse_are_those_of_the_formula(
    schedule: NoiseSchedule, curve: Curve
) -> None:
    times = grid(0, 1, 1001)
    kept = schedule.kept(times)
    assert kept[[0, -1]].tolist() == pytest.approx([0, 1], abs=1e-15)
    assert (kept.diff() > 0).all()
    np.testing.assert_allclose(kept, [curve(float(t)) for t in times], rtol=0, atol=1e-13)

    times, h = grid(0.01, 0.99, 99), 1e-6
    differences = [(curve(t + h) - curve(t - h)) / (2 * h) for t in times.tolist()]
    np.testing.assert_allclose(schedule.rate(times), differences, rtol=1e-6, atol=1e-9)

    fractions = torch.cat([torch.logspace(-9, -2, 50).double(), grid(0, 1, 101)])
    times = schedule.time_at(fractions)
    assert float(times.min()) >= -1e-12 and float(times.max()) <= 1 + 1e-12
    np.testing.assert_allclose([1 - curve(float(t)) for t in times], fractions, atol=1e-12)


@pytest.mark.parametrize("name", IN_STEPS)
@pytest.mark.parametrize("steps", [1, 7, 200])
def test_in_steps_they_are_those_of_the_steps_and_the_inverse_is_linear_between_them(
    name: str, steps: int
) -> None:
    schedule = InSteps(IN_STEPS[name], steps)
    expected = np.array([ALPHA_BARS[name](t, steps) for t in range(steps + 1)])
    times = 1 - torch.arange(steps + 1, dtype=torch.float64) / steps
    kept = schedule.kept(times)
    assert kept[0] == 1 and kept[-1] == 0
    assert (kept.diff() < 0).all()
    np.testing.assert_allclose(kept, expected, rtol=0, atol=1e-12)
    rates = steps * (expected[:-1] - expected[1:])
    np.testing.assert_allclose(schedule.rate(times[1:]), rates, atol=1e-9)
    between = grid(0, 1, 333)
    at = (1 - schedule.time_at(between).numpy()) * steps
    np.testing.assert_allclose(
        np.interp(at, np.arange(steps + 1), 1 - expected), between, atol=1e-9
    )


LEVEL = 1e-3
SEQUENCES, REPEATS = 400, 6  # each of the twenty residues REPEATS times in each sequence
GROUPS = 10  # of sequences with times close to each other, tested apart

SAMPLINGS = pytest.mark.parametrize("time_sampling", ["uniform", "low_variance"])


# Of each kind one schedule; the formulas have them all.
DRAWN: list[tuple[type[Paradigm], dict[str, Any], Curve]] = [
    (
        AbsorbingDiffusion,
        {"schedule": "cosine", "num_train_timesteps": None},
        CONTINUOUS_ALPHA_BARS["cosine"],
    ),
    (MaskFlowMatching, *KAPPAS[-1]),
    (UniformFlowMatching, *KAPPAS[-1]),
]
IN_20_STEPS: tuple[type[Paradigm], dict[str, Any], Curve] = (
    AbsorbingDiffusion,
    {"schedule": "linear_beta", "num_train_timesteps": 20},
    lambda t: ALPHA_BARS["linear_beta"](round(20 * t), 20),
)


def corrupted_composition(paradigm: Paradigm, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(times [S], clean residues [S, N], tokens shown in their place [S, N])."""
    batch = PackedBatch.pack([framed(encode("".join(CANONICAL) * REPEATS))] * SEQUENCES)
    corrupted = paradigm.corrupt(batch, Key(seed))
    clean, shown = (
        tokens.view(SEQUENCES, -1)[:, 1:-1].long() for tokens in (batch.tokens, corrupted.tokens)
    )
    return corrupted.times, clean, shown


def deviation_p_value(
    times: Tensor, successes: NDArray[np.int64], trials: int, probability: Curve
) -> float:
    """Of Σ z² over GROUPS of sequences with close times, z of each group's number of successes.

    A group in which nothing is left to chance must come out exactly.
    """
    statistic = 0.0
    for group in np.array_split(np.argsort(times.numpy()), GROUPS):
        chances = np.array([probability(float(times[i])) for i in group])
        variance = trials * (chances * (1 - chances)).sum()
        difference = successes[group].sum() - trials * chances.sum()
        if variance == 0:
            assert difference == 0
        else:
            statistic += difference**2 / variance
    return float(stats.chi2.sf(statistic, GROUPS))


@SAMPLINGS
@pytest.mark.parametrize(("paradigm_class", "settings", "kept"), [*DRAWN[:2], IN_20_STEPS])
def test_residues_are_masked_with_the_probability_that_the_schedule_does_not_keep(
    paradigm_class: type[Paradigm], settings: dict[str, Any], kept: Curve, time_sampling: str
) -> None:
    paradigm = paradigm_class(**settings, time_sampling=time_sampling)
    times, _, shown = corrupted_composition(paradigm, 1)
    masked = (shown == MASK).sum(1).numpy()
    assert deviation_p_value(times, masked, shown.shape[1], lambda t: 1 - kept(t)) > LEVEL


@SAMPLINGS
def test_a_flow_from_random_residues_keeps_with_kappa_and_errs_uniformly(
    time_sampling: str,
) -> None:
    settings, kappa = KAPPAS[-1]
    paradigm = UniformFlowMatching(**settings, time_sampling=time_sampling)
    times, clean, shown = corrupted_composition(paradigm, 3)
    right = (shown == clean).sum(1).numpy()
    p_value = deviation_p_value(
        times, right, shown.shape[1], lambda t: kappa(t) + (1 - kappa(t)) / 20
    )
    assert p_value > LEVEL

    # Given that it is wrong, a residue is each of the nineteen others equally often.
    table = np.zeros((20, 20))
    np.add.at(table, (clean.flatten() - CANONICAL_START, shown.flatten() - CANONICAL_START), 1)
    wrong = table[~np.eye(20, dtype=bool)].reshape(20, 19)
    expected = wrong.sum(1, keepdims=True) / 19
    statistic = ((wrong - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(statistic, 20 * 18) > LEVEL


def test_corruption_is_independent_from_residue_to_residue() -> None:
    """The number corrupted in a sequence has the variance of a binomial, not more, not less."""
    for paradigm, corrupted_share in (
        (AbsorbingDiffusion(num_train_timesteps=None), lambda t: t),
        (UniformFlowMatching(schedule="linear"), lambda t: 19 / 20 * (1 - t)),
    ):
        times, clean, shown = corrupted_composition(paradigm, 4)
        changed, chances = (shown != clean).sum(1).numpy(), corrupted_share(times.numpy())
        length = shown.shape[1]
        inner = (chances > 0.1) & (chances < 0.9)
        z = (changed - length * chances)[inner] / np.sqrt(length * chances * (1 - chances))[inner]
        p_value = stats.chi2.sf((z**2).sum(), inner.sum())
        assert LEVEL / 2 < p_value < 1 - LEVEL / 2


@SAMPLINGS
@pytest.mark.parametrize(("paradigm_class", "settings", "kept"), DRAWN)
def test_the_times_of_a_batch_are_stratified(
    paradigm_class: type[Paradigm], settings: dict[str, Any], kept: Curve, time_sampling: str
) -> None:
    """One in each of n strata: of the time itself, or of the root of the corrupted fraction."""
    paradigm = paradigm_class(**settings, time_sampling=time_sampling)
    times, _, _ = corrupted_composition(paradigm, 5)
    if time_sampling == "low_variance":
        times = torch.tensor([1 - kept(float(t)) for t in times]).clamp(min=0).sqrt()
    strata = times.sort().values * SEQUENCES - torch.arange(SEQUENCES)
    assert float(strata.min()) > -1e-3 and float(strata.max()) < 1 + 1e-3
    assert float(strata.std()) < 1e-3  # one shared offset
