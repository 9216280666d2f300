"""Noise schedules: the probability κ that a residue is clean, as a function of time.

Time t runs from 0 (the prior: everything is corrupted) to 1 (the data), as in the flow matching
papers. Diffusion counts its time from the data, and writes ᾱ_{1−t} for κ_t. Every method takes and
returns float64 tensors of any shape.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

CLASSIC_STEPS = 1000  # number of steps to which β_start and β_end of `LinearBeta` apply


class NoiseSchedule(ABC):
    """An increasing function κ_t with κ_0 = 0 and κ_1 = 1."""

    @abstractmethod
    def kept(self, times: Tensor) -> Tensor:
        """κ_t: the probability that a residue is clean at `times` in [0, 1]."""

    @abstractmethod
    def rate(self, times: Tensor) -> Tensor:
        """dκ/dt at `times`."""

    @abstractmethod
    def time_at(self, corrupted: Tensor) -> Tensor:
        """The inverse of 1 − κ: the time at which this fraction in [0, 1] is corrupted.

        The argument is 1 − κ because κ itself cannot resolve small fractions near the data.
        """

    def table(self, steps: int) -> Tensor:
        """ᾱ_0 … ᾱ_T, float64 [steps + 1]: κ at 1, 1 − 1/T, …, 0, exactly 1 and 0 at the ends."""
        kept = self.kept(1 - torch.arange(steps + 1, dtype=torch.float64) / steps)
        kept[0], kept[-1] = 1.0, 0.0
        return kept


class Cosine(NoiseSchedule):
    """κ_t = 1 − cos(πt/2) (Shi et al., arXiv:2406.04329)."""

    def kept(self, times: Tensor) -> Tensor:
        return 1 - torch.cos(math.pi / 2 * times)

    def rate(self, times: Tensor) -> Tensor:
        return math.pi / 2 * torch.sin(math.pi / 2 * times)

    def time_at(self, corrupted: Tensor) -> Tensor:
        return 2 / math.pi * torch.acos(corrupted.clamp(0, 1))


@dataclass(frozen=True)
class Polynomial(NoiseSchedule):
    """κ_t = t^n with n = `degree` > 0; the schedule `linear` is n = 1."""

    degree: float

    def kept(self, times: Tensor) -> Tensor:
        return times**self.degree

    def rate(self, times: Tensor) -> Tensor:
        return self.degree * times ** (self.degree - 1)

    def time_at(self, corrupted: Tensor) -> Tensor:
        return (1 - corrupted) ** (1 / self.degree)


@dataclass(frozen=True)
class Cubic(NoiseSchedule):
    """κ_t = −2t³ + 3t² + a(t³ − 2t² + t) + b(t³ − t²), with end slopes a and b in [0, 3]."""

    start_slope: float
    end_slope: float

    def kept(self, times: Tensor) -> Tensor:
        a, b = self.start_slope, self.end_slope
        return ((a + b - 2) * times + (3 - 2 * a - b)) * times**2 + a * times

    def rate(self, times: Tensor) -> Tensor:
        a, b = self.start_slope, self.end_slope
        return (3 * (a + b - 2) * times + 2 * (3 - 2 * a - b)) * times + a

    def time_at(self, corrupted: Tensor) -> Tensor:
        low, high = torch.zeros_like(corrupted), torch.ones_like(corrupted)
        for _ in range(50):  # bisection: κ is increasing
            middle = (low + high) / 2
            below = self.kept(middle) < 1 - corrupted
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2


class LinearBeta(NoiseSchedule):
    """The schedule whose noise rate β is linear in s = 1 − t.

    In T steps ᾱ = Π(1 − β_i), with T values from `beta_start` to `beta_end`, which apply to T =
    1000 and are not scaled by T. In continuous time κ = (exp(−∫₀ˢβ) − c)/(1 − c) with β(s) =
    1000·(β_start + s·(β_end − β_start)) and c = exp(−∫₀¹β), so that it ends at 0.
    """

    def __init__(self, beta_start: float, beta_end: float) -> None:
        self.betas = beta_start, beta_end
        self.first = CLASSIC_STEPS * beta_start
        self.slope = CLASSIC_STEPS * beta_end - self.first
        self.floor = math.exp(-(self.first + self.slope / 2))

    def kept(self, times: Tensor) -> Tensor:
        return (self._decay(1 - times) - self.floor) / (1 - self.floor)

    def rate(self, times: Tensor) -> Tensor:
        s = 1 - times
        return (self.first + self.slope * s) * self._decay(s) / (1 - self.floor)

    def time_at(self, corrupted: Tensor) -> Tensor:
        nats = -torch.log1p(-corrupted * (1 - self.floor))
        # The root of first·s + slope·s²/2 = nats in the form without cancellation at a small slope.
        return 1 - 2 * nats / (self.first + (self.first**2 + 2 * self.slope * nats).sqrt())

    def table(self, steps: int) -> Tensor:
        beta = torch.linspace(*self.betas, steps, dtype=torch.float64)
        kept = torch.cat([torch.ones(1, dtype=torch.float64), (1 - beta).cumprod(0)])
        kept[-1] = 0.0
        return kept

    def _decay(self, s: Tensor) -> Tensor:
        return torch.exp(-(self.first * s + self.slope * s**2 / 2))


class InSteps(NoiseSchedule):
    """A schedule in T steps: κ of the nearest step; the rate is T·(ᾱ_{i−1} − ᾱ_i).

    `time_at` interpolates linearly between the steps.
    """

    def __init__(self, continuous: NoiseSchedule, steps: int) -> None:
        self.steps = steps
        self._tables = {torch.device("cpu"): continuous.table(steps)}

    def kept(self, times: Tensor) -> Tensor:
        return self._alpha_bar(times.device)[self._step(times)]

    def rate(self, times: Tensor) -> Tensor:
        alpha_bar, step = self._alpha_bar(times.device), self._step(times)
        return self.steps * (alpha_bar[(step - 1).clamp(min=0)] - alpha_bar[step])

    def time_at(self, corrupted: Tensor) -> Tensor:
        masked = 1 - self._alpha_bar(corrupted.device)
        upper = torch.searchsorted(masked, corrupted.contiguous()).clamp(1, self.steps)
        low, high = masked[upper - 1], masked[upper]
        part = (corrupted - low) / (high - low).clamp(min=torch.finfo(low.dtype).tiny)
        return 1 - (upper - 1 + part.clamp(0, 1)) / self.steps

    def _step(self, times: Tensor) -> Tensor:
        return ((1 - times) * self.steps).round().long()

    def _alpha_bar(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            self._tables[device] = self._tables[torch.device("cpu")].to(device)
        return self._tables[device]
