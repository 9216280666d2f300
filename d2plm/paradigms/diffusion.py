"""Absorbing discrete diffusion (Austin et al., arXiv:2107.03006, D3PM with an absorbing state).

x_t masks each residue independently with probability 1 − ᾱ_t, t = 1..T. The times given to the
model are t/T: 0 is clean, 1 fully masked. Without T, time is continuous in (0, 1] (Sahoo et al.,
arXiv:2406.07524; Shi et al., arXiv:2406.04329): what T → ∞ leads to, but for `linear_beta`, whose β
belong to T = 1000 and are not scaled by T.
"""

import math
from types import MappingProxyType

import torch
from diffusers.configuration_utils import register_to_config
from torch import Tensor

from d2plm.core.errors import ConfigError, require_choice, require_number
from d2plm.paradigms.masked import MaskedParadigm, check_loss

SCHEDULES = ("linear", "cosine", "linear_beta")
DEFAULT_SAMPLING_STEPS = 128
MAX_SAMPLING_STEPS = 100_000
BETA_STEPS = 1000  # of the classic schedule, whose limit `linear_beta` is in continuous time


class AbsorbingDiffusion(MaskedParadigm):
    """Absorbing diffusion in T steps, or in continuous time.

    Args:
        num_train_timesteps: T; None is continuous time.
        schedule: ᾱ_t: `linear` 1 − t/T; `cosine` 1 − cos(π/2·(1 − t/T)) (Shi et al.,
            arXiv:2406.04329); `linear_beta` Π(1 − β_s), the continuous-diffusion schedule, with
            ᾱ_T forced to 0. In continuous time this is exp(−∫β), less its value at the end, and
            scaled to start at 1.
        beta_start, beta_end: first and last β of `linear_beta`.
        loss: `elbo` weights a residue masked at t by T·(ᾱ_{t−1} − ᾱ_t)/(1 − ᾱ_t) and divides by the
            maskable residues; `mean` is the plain mean over masked residues.
        time_sampling: `uniform` or `low_variance`, see `Paradigm`.
        shift: predict residue i from the hidden state at i − 1, as checkpoints adapted from
            left-to-right models need. It cannot predict a first token.
        prediction_type: only `residue`; `epsilon` has no meaning for discrete states.

    Raises:
        ConfigError: on an impossible value.
    """

    name = "diffusion"
    prior_time = 1.0
    data_time = 0.0
    samplers = ("ancestral", "first_hitting", "confidence", "remdm")
    refused_samplers = MappingProxyType(
        {"euler": "it follows the velocity of a flow; 'ancestral' is the exact step"}
    )

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int | None = 1000,
        schedule: str = "linear",
        beta_start: float = 1e-4,
        beta_end: float = 0.02,
        loss: str = "elbo",
        time_sampling: str = "uniform",
        shift: bool = False,
        prediction_type: str = "residue",
    ) -> None:
        if num_train_timesteps is not None:
            require_number("paradigm.num_train_timesteps", num_train_timesteps, integer=True, low=1)
        require_choice("paradigm.schedule", schedule, SCHEDULES)
        require_number(
            "paradigm.beta_start", beta_start, low=0, low_open=True, high=1, high_open=True
        )
        require_number("paradigm.beta_end", beta_end, low=beta_start, high=1, high_open=True)
        if prediction_type != "residue":
            raise ConfigError(
                f"paradigm.prediction_type={prediction_type!r}: must be 'residue'; noise "
                "prediction has no meaning for discrete states"
            )
        self.schedule, self.betas, self.steps = (
            schedule,
            (beta_start, beta_end),
            num_train_timesteps,
        )
        self.max_steps = num_train_timesteps or MAX_SAMPLING_STEPS
        self.default_steps = min(DEFAULT_SAMPLING_STEPS, self.max_steps)
        self.loss_kind, self.time_sampling = check_loss(loss, time_sampling)
        self.shift = shift
        self._tables: dict[torch.device, Tensor] = {}

    def alpha_bar(self, times: Tensor) -> Tensor:
        """ᾱ_t at `times` in [0, 1], the probability that a residue is still unmasked; float64.

        In T steps, of the step that is nearest.
        """
        if self.steps is None:
            return self._continuous_alpha_bar(times.double())
        return self._table(times.device)[self._step(times)]

    def corrupted_fraction(self, times: Tensor) -> Tensor:
        return 1 - self.alpha_bar(times)

    def corruption_rate(self, times: Tensor) -> Tensor:
        """T·(ᾱ_{t−1} − ᾱ_t), or −ᾱ′_t in continuous time."""
        if self.steps is None:
            return self._continuous_rate(times.double())
        table, step = self._table(times.device), self._step(times)
        return self.steps * (table[(step - 1).clamp(min=0)] - table[step])

    def times_of(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        if self.steps is None:
            return super().times_of(draws)
        if self.time_sampling == "uniform":
            times = ((draws * self.steps).floor() + 1).clamp(max=self.steps) / self.steps
            return times.double(), self.corruption_rate(times)
        # Step t with probability p_t ∝ (ᾱ_{t−1} − ᾱ_t)/√(1 − ᾱ_t), as in continuous time.
        every = torch.arange(1, self.steps + 1, device=draws.device) / self.steps
        rates = self.corruption_rate(every)
        density = rates / self.corrupted_fraction(every).sqrt()
        cumulative = (density / density.sum()).cumsum(0)
        chosen = torch.searchsorted(cumulative, draws, right=True).clamp(max=self.steps - 1)
        return every[chosen].double(), (rates * density.sum() / density)[chosen] / self.steps

    def time_at_corrupted_fraction(self, fraction: Tensor) -> Tensor:
        fraction = fraction.double()
        if self.steps is None:
            return self._continuous_time(fraction)
        masked = 1 - self._table(fraction.device)
        upper = torch.searchsorted(masked, fraction.contiguous()).clamp(1, self.steps)
        low, high = masked[upper - 1], masked[upper]
        part = (fraction - low) / (high - low).clamp(min=torch.finfo(low.dtype).tiny)
        return (upper - 1 + part.clamp(0, 1)) / self.steps

    def _continuous_alpha_bar(self, t: Tensor) -> Tensor:
        if self.schedule == "linear":
            return 1 - t
        if self.schedule == "cosine":
            return 1 - torch.cos(math.pi / 2 * (1 - t))
        first, slope, floor = self._beta_integral()
        return (torch.exp(-(first * t + slope * t**2 / 2)) - floor) / (1 - floor)

    def _continuous_rate(self, t: Tensor) -> Tensor:
        if self.schedule == "linear":
            return torch.ones_like(t)
        if self.schedule == "cosine":
            return math.pi / 2 * torch.sin(math.pi / 2 * (1 - t))
        first, slope, floor = self._beta_integral()
        return (first + slope * t) * torch.exp(-(first * t + slope * t**2 / 2)) / (1 - floor)

    def _continuous_time(self, fraction: Tensor) -> Tensor:
        if self.schedule == "linear":
            return fraction
        if self.schedule == "cosine":
            return 1 - 2 / math.pi * torch.acos(fraction.clamp(0, 1))
        first, slope, floor = self._beta_integral()
        nats = -torch.log1p(-fraction * (1 - floor))
        # The root of first·t + slope·t²/2 = nats that does not cancel where slope is small.
        return 2 * nats / (first + (first**2 + 2 * slope * nats).sqrt())

    def _beta_integral(self) -> tuple[float, float, float]:
        """(β at 0, its slope, exp(−∫₀¹β)) of β(t) = BETA_STEPS·(β_start + t·(β_end − β_start))."""
        first, last = (BETA_STEPS * beta for beta in self.betas)
        return first, last - first, math.exp(-(first + last) / 2)

    def _step(self, times: Tensor) -> Tensor:
        assert self.steps is not None
        return (times.double() * self.steps).round().long()

    def _table(self, device: torch.device) -> Tensor:
        """ᾱ_0..ᾱ_T, float64 [T + 1]."""
        if device not in self._tables:
            self._tables[device] = self._discrete_alpha_bar().to(device)
        return self._tables[device]

    def _discrete_alpha_bar(self) -> Tensor:
        assert self.steps is not None
        if self.schedule == "linear_beta":
            beta = torch.linspace(*self.betas, self.steps, dtype=torch.float64)
            alpha_bar = torch.cat([torch.ones(1, dtype=torch.float64), (1 - beta).cumprod(0)])
        else:
            times = torch.arange(self.steps + 1, dtype=torch.float64) / self.steps
            alpha_bar = self._continuous_alpha_bar(times)
        alpha_bar[0], alpha_bar[-1] = 1.0, 0.0
        return alpha_bar
