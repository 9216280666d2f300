"""Discrete flow matching with an absorbing source (Gat et al., arXiv:2407.15595).

Continuous time t from 0 (the source, everything masked) to 1 (data); a residue shows its clean
value with probability κ_t and the mask otherwise. The model gives p_{1|t}; the velocity is
u_t = κ̇_t/(1 − κ_t)·(p_{1|t} − δ_{x_t}).
"""

import math

import torch
from diffusers.configuration_utils import register_to_config
from torch import Tensor

from d2plm.errors import ConfigError, require_choice, require_number
from d2plm.paradigms.masked import MaskedParadigm, check_loss

SCHEDULERS = ("linear", "polynomial", "cosine", "cubic")
MAX_MONOTONE_SLOPE = 3.0  # both end slopes at most 3 keep the cubic increasing


class DiscreteFlowMatching(MaskedParadigm):
    """Flow matching along the mixture path from the mask to the data.

    Args:
        scheduler: κ_t: `linear` t; `polynomial` t^n; `cosine` 1 − cos(πt/2); `cubic`
            −2t³ + 3t² + a(t³ − 2t² + t) + b(t³ − t²), whose end slopes are a and b.
        polynomial_degree: n.
        cubic_start_slope, cubic_end_slope: a and b, in [0, 3].
        loss: `elbo` weights a masked residue by κ̇_t/(1 − κ_t), which makes the loss a likelihood
            bound; `mean` is the plain mean over masked residues.
        time_sampling: `uniform` or `low_variance`, see `MaskedParadigm`.
        num_flow_steps: Euler steps of the sampler when none are asked for.
        source: only `mask`.

    Raises:
        ConfigError: on an impossible value.
    """

    name = "flow_matching"
    prior_time = 0.0
    data_time = 1.0
    samplers = ("euler",)
    max_steps = 100_000

    @register_to_config
    def __init__(
        self,
        scheduler: str = "cosine",
        polynomial_degree: float = 2.0,
        cubic_start_slope: float = 0.0,
        cubic_end_slope: float = 0.0,
        loss: str = "elbo",
        time_sampling: str = "uniform",
        num_flow_steps: int = 50,
        source: str = "mask",
    ) -> None:
        require_choice("paradigm.scheduler", scheduler, SCHEDULERS)
        require_number("paradigm.polynomial_degree", polynomial_degree, low=0, low_open=True)
        for key, slope in (
            ("paradigm.cubic_start_slope", cubic_start_slope),
            ("paradigm.cubic_end_slope", cubic_end_slope),
        ):
            require_number(key, slope, low=0, high=MAX_MONOTONE_SLOPE)
        require_number("paradigm.num_flow_steps", num_flow_steps, integer=True, low=1)
        if source != "mask":
            raise ConfigError(f"paradigm.source={source!r}: must be 'mask'")
        self.scheduler = scheduler
        self.degree = polynomial_degree
        self.slopes = (cubic_start_slope, cubic_end_slope)
        self.loss_kind, self.time_sampling = check_loss(loss, time_sampling)
        self.default_steps = num_flow_steps

    def kappa(self, times: Tensor) -> Tensor:
        """κ_t, the probability that a residue shows its clean value; float64."""
        t = times.double()
        if self.scheduler == "linear":
            return t
        if self.scheduler == "polynomial":
            return t**self.degree
        if self.scheduler == "cosine":
            return 1 - torch.cos(math.pi / 2 * t)
        a, b = self.slopes
        return ((a + b - 2) * t + (3 - 2 * a - b)) * t**2 + a * t

    def kappa_rate(self, times: Tensor) -> Tensor:
        """κ̇_t, its derivative by time; float64."""
        t = times.double()
        if self.scheduler == "linear":
            return torch.ones_like(t)
        if self.scheduler == "polynomial":
            return self.degree * t ** (self.degree - 1)
        if self.scheduler == "cosine":
            return math.pi / 2 * torch.sin(math.pi / 2 * t)
        a, b = self.slopes
        return (3 * (a + b - 2) * t + 2 * (3 - 2 * a - b)) * t + a

    def times_of(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        if self.time_sampling == "uniform":
            return draws, self.elbo_weight(draws)
        # u = v² for uniform v in (0, 1] has density ½·u^(−½), and (1/u)·du/dv = 2/v.
        root = 1 - draws
        return self.time_at_mask_fraction(root**2), 2 / root

    def mask_fraction(self, times: Tensor) -> Tensor:
        return 1 - self.kappa(times)

    def elbo_weight(self, times: Tensor) -> Tensor:
        remaining = 1 - self.kappa(times)
        return self.kappa_rate(times) / remaining.clamp(min=torch.finfo(remaining.dtype).eps)

    def time_at_mask_fraction(self, fraction: Tensor) -> Tensor:
        fraction = fraction.double()
        if self.scheduler == "linear":
            return 1 - fraction
        if self.scheduler == "polynomial":
            return (1 - fraction) ** (1 / self.degree)
        if self.scheduler == "cosine":
            return 2 / math.pi * torch.acos(fraction.clamp(0, 1))
        low, high = torch.zeros_like(fraction), torch.ones_like(fraction)
        for _ in range(50):  # bisection: κ is increasing
            middle = (low + high) / 2
            below = self.kappa(middle) < 1 - fraction
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2

    def transition(self, start: float, stop: float) -> float:
        """(κ_s − κ_t)/(1 − κ_t): the jump probability of a step, exact in time, for s > t."""
        if stop >= self.data_time:
            return 1.0
        kappa_t, kappa_s = self.kappa(torch.tensor([start, stop], dtype=torch.float64)).tolist()
        return (kappa_s - kappa_t) / (1 - kappa_t)
