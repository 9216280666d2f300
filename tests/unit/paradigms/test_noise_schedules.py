"""Every schedule against its formula in the papers: values, derivative and inverse."""

import numpy as np
import pytest
import torch
from torch import Tensor

from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import flow_matching
from d2plm.paradigms.noise_schedules import (
    Cosine,
    Cubic,
    InSteps,
    LinearBeta,
    NoiseSchedule,
    Polynomial,
)
from d2plm.settings.paradigm import FlowMatchingSettings
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
DISCRETE = pytest.mark.parametrize("name", IN_STEPS)


def grid(low: float, high: float, number: int) -> Tensor:
    return torch.linspace(low, high, number, dtype=torch.float64)


def alpha_bars(name: str, steps: int) -> list[float]:
    return [ALPHA_BARS[name](t, steps) for t in range(steps + 1)]


@EVERY
def test_kept_and_its_rate_are_those_of_the_formula(schedule: NoiseSchedule, curve: Curve) -> None:
    times = grid(0, 1, 1001)
    kept = schedule.kept(times)
    assert float(kept[0]) == pytest.approx(0, abs=1e-15)
    assert float(kept[-1]) == pytest.approx(1, abs=1e-15)
    assert (kept.diff() > 0).all()
    np.testing.assert_allclose(kept, [curve(float(t)) for t in times], rtol=0, atol=1e-13)

    times, h = grid(0.01, 0.99, 99), 1e-6
    differences = [(curve(t + h) - curve(t - h)) / (2 * h) for t in times.tolist()]
    np.testing.assert_allclose(schedule.rate(times), differences, rtol=1e-6, atol=1e-9)


@EVERY
def test_the_time_at_a_corrupted_fraction_inverts_the_schedule(
    schedule: NoiseSchedule, curve: Curve
) -> None:
    fractions = torch.cat([torch.logspace(-9, -2, 50).double(), grid(0, 1, 101)])
    times = schedule.time_at(fractions)
    assert float(times.min()) >= -1e-12 and float(times.max()) <= 1 + 1e-12
    np.testing.assert_allclose([1 - curve(float(t)) for t in times], fractions, atol=1e-12)


@DISCRETE
@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_in_steps_alpha_bar_falls_from_one_to_zero_by_its_formula(name: str, steps: int) -> None:
    schedule = InSteps(IN_STEPS[name], steps)
    kept = schedule.kept(1 - torch.arange(steps + 1, dtype=torch.float64) / steps)
    assert kept[0] == 1 and kept[-1] == 0
    assert (kept.diff() < 0).all()
    np.testing.assert_allclose(kept, alpha_bars(name, steps), rtol=0, atol=1e-12)


@DISCRETE
def test_in_steps_the_rate_is_that_of_the_step(name: str) -> None:
    steps, expected = 40, np.array(alpha_bars(name, 40))
    rates = InSteps(IN_STEPS[name], steps).rate(1 - torch.arange(1, 41, dtype=torch.float64) / 40)
    np.testing.assert_allclose(rates, steps * (expected[:-1] - expected[1:]), atol=1e-11)


@DISCRETE
def test_in_steps_the_inverse_is_exact_at_the_steps_and_linear_between_them(name: str) -> None:
    steps, expected = 50, np.array(alpha_bars(name, 50))
    schedule = InSteps(IN_STEPS[name], steps)
    at_steps = 1 - schedule.time_at(torch.from_numpy(1 - expected))
    np.testing.assert_allclose(at_steps * steps, np.arange(steps + 1), atol=1e-6)
    between = grid(0, 1, 333)
    times = 1 - schedule.time_at(between).numpy()
    interpolated = np.interp(times * steps, np.arange(steps + 1), 1 - expected)
    np.testing.assert_allclose(interpolated, between, atol=1e-9)


@pytest.mark.parametrize("source", ["mask", "uniform"])
@pytest.mark.parametrize("settings, kappa", KAPPAS, ids=[str(s) for s, _ in KAPPAS])
def test_a_flow_counts_time_from_the_source_whichever_it_is(
    settings: dict[str, object], kappa: Curve, source: str
) -> None:
    flow, times = flow_matching(FlowMatchingSettings(source=source, **settings)), grid(0, 1, 101)
    expected = [1 - kappa(float(t)) for t in times]
    np.testing.assert_allclose(flow.corrupted_fraction(times), expected, atol=1e-13)
    inverse = flow.time_at_corrupted_fraction(torch.tensor(expected, dtype=torch.float64))
    np.testing.assert_allclose([1 - kappa(float(t)) for t in inverse], expected, atol=1e-12)
    assert flow.kept(flow.prior_time) == 0 and flow.kept(flow.data_time) == 1


@DISCRETE
def test_diffusion_counts_time_from_the_data(name: str) -> None:
    diffusion = AbsorbingDiffusion(num_train_timesteps=None, schedule=name)
    times = grid(0, 1, 101)
    expected = [1 - CONTINUOUS_ALPHA_BARS[name](float(t)) for t in times]
    np.testing.assert_allclose(diffusion.corrupted_fraction(times), expected, atol=1e-12)
    inverse = diffusion.time_at_corrupted_fraction(torch.tensor(expected, dtype=torch.float64))
    np.testing.assert_allclose(diffusion.corrupted_fraction(inverse), expected, atol=1e-9)
    assert diffusion.kept(diffusion.prior_time) == pytest.approx(0, abs=1e-15)
    assert diffusion.kept(diffusion.data_time) == 1
