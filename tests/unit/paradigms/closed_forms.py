"""Every schedule by its formula in the papers, written independently; a rule for ∫₀¹."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Curve = Callable[[float], float]


def linear_beta(t: int, steps: int, start: float = 1e-4, end: float = 0.02) -> float:
    if t == steps:
        return 0.0
    betas = [start + (end - start) * s / max(steps - 1, 1) for s in range(t)]
    return math.prod(1 - beta for beta in betas)


ALPHA_BARS: dict[str, Callable[[int, int], float]] = {
    "linear": lambda t, steps: 1 - t / steps,
    "cosine": lambda t, steps: 1 - math.cos(math.pi / 2 * (1 - t / steps)),
    "linear_beta": linear_beta,
}


def linear_beta_in_continuous_time(t: float) -> float:
    """exp(−∫₀ᵗ β), β(t) from 0.1 to 20, made to end at 0; the trapezium is exact for a line."""

    def survival(stop: float) -> float:
        return math.exp(-stop * (0.1 + (0.1 + stop * (20 - 0.1))) / 2)

    return (survival(t) - survival(1)) / (1 - survival(1))


CONTINUOUS_ALPHA_BARS: dict[str, Curve] = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: 1 - math.cos(math.pi / 2 * (1 - t)),
    "linear_beta": linear_beta_in_continuous_time,
}


def hermite(a: float, b: float) -> Curve:
    """The cubic from (0, 0) to (1, 1) with end slopes a and b, in the Hermite basis."""
    return lambda t: a * t * (1 - t) ** 2 + t * t * (3 - 2 * t) - b * t * t * (1 - t)


KAPPAS: list[tuple[dict[str, Any], Curve]] = [
    ({"schedule": "linear"}, lambda t: t),
    ({"schedule": "polynomial"}, lambda t: t**2),
    ({"schedule": "polynomial", "polynomial_degree": 0.7}, lambda t: t**0.7),
    ({"schedule": "cosine"}, lambda t: 1 - math.cos(math.pi * t / 2)),
    ({"schedule": "cubic"}, hermite(0, 0)),
    ({"schedule": "cubic", "cubic_start_slope": 3.0, "cubic_end_slope": 0.5}, hermite(3, 0.5)),
]


def logistic_nodes(
    step: float = 0.5, reach: float = 25.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nodes and weights of ∫₀¹, the trapezium rule in ln(t/(1 − t)).

    Integrands that are smooth inside and at worst logarithmic at the ends converge like
    exp(−1/step).
    """
    s = np.arange(-reach, reach, step)
    return expit(s), step * expit(s) * expit(-s)
