"""Every schedule against its formula in the papers: values, derivative and inverse."""

import numpy as np
import pytest
import torch
from torch import Tensor

from d2plm.paradigms.noise_schedules import (
    Cosine,
    Cubic,
    InSteps,
    LinearBeta,
    NoiseSchedule,
    Polynomial,
)
from tests.unit.paradigms.closed_forms import ALPHA_BARS, CONTINUOUS_ALPHA_BARS, Curve, hermite

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
