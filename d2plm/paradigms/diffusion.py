"""Absorbing discrete diffusion (Austin et al., arXiv:2107.03006, D3PM with an absorbing state).

x_t masks each residue independently with probability 1 − ᾱ_t, t = 1..T. The times given to the
model are t/T: 0 is clean, 1 fully masked.
"""

import math

import torch
from diffusers.configuration_utils import register_to_config
from torch import Tensor

from d2plm.errors import ConfigError, require_choice, require_number
from d2plm.paradigms.masked import MaskedParadigm, check_loss

SCHEDULES = ("linear", "cosine", "linear_beta")
DEFAULT_SAMPLING_STEPS = 128


class AbsorbingDiffusion(MaskedParadigm):
    """Discrete-time absorbing diffusion.

    Args:
        num_train_timesteps: T.
        schedule: ᾱ_t: `linear` 1 − t/T; `cosine` 1 − cos(π/2·(1 − t/T)) (Shi et al.,
            arXiv:2406.04329); `linear_beta` Π(1 − β_s), the continuous-diffusion schedule, with
            ᾱ_T forced to 0.
        beta_start, beta_end: first and last β of `linear_beta`.
        loss: `elbo` weights a residue masked at t by T·(ᾱ_{t−1} − ᾱ_t)/(1 − ᾱ_t) and divides by the
            maskable residues; `mean` is the plain mean over masked residues.
        time_sampling: `uniform` or `low_variance`, see `MaskedParadigm`.
        shift: predict residue i from the hidden state at i − 1, as checkpoints adapted from
            left-to-right models need. It cannot predict a first token.
        prediction_type: only `residue`; `epsilon` has no meaning for discrete states.

    Raises:
        ConfigError: on an impossible value.
    """

    name = "diffusion"
    prior_time = 1.0
    data_time = 0.0
    samplers = ("ancestral",)

    @register_to_config
    def __init__(
        self,
        num_train_timesteps: int = 1000,
        schedule: str = "linear",
        beta_start: float = 1e-4,
        beta_end: float = 0.02,
        loss: str = "elbo",
        time_sampling: str = "uniform",
        shift: bool = False,
        prediction_type: str = "residue",
    ) -> None:
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
        self.steps = self.max_steps = num_train_timesteps
        self.default_steps = min(DEFAULT_SAMPLING_STEPS, num_train_timesteps)
        self.loss_kind, self.time_sampling = check_loss(loss, time_sampling)
        self.shift = shift
        self._alpha_bars = {
            torch.device("cpu"): _alpha_bar(schedule, self.steps, beta_start, beta_end)
        }

    def times_of(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        if self.time_sampling == "uniform":
            times = ((draws * self.steps).floor() + 1).clamp(max=self.steps) / self.steps
            return times, self.elbo_weight(times)
        # Step t with probability p_t ∝ w_t·√(1 − ᾱ_t), which least varies w_t/p_t times its count.
        every = torch.arange(1, self.steps + 1, device=draws.device) / self.steps
        weights = self.elbo_weight(every)
        density = weights * self.mask_fraction(every).sqrt()
        cumulative = (density / density.sum()).cumsum(0)
        chosen = torch.searchsorted(cumulative, draws, right=True).clamp(max=self.steps - 1)
        return every[chosen].double(), (weights * density.sum() / density)[chosen] / self.steps

    def mask_fraction(self, times: Tensor) -> Tensor:
        return 1 - self.alpha_bar(times.device)[self._step(times)]

    def elbo_weight(self, times: Tensor) -> Tensor:
        alpha_bar, step = self.alpha_bar(times.device), self._step(times)
        kept, kept_before = alpha_bar[step], alpha_bar[(step - 1).clamp(min=0)]
        return (
            self.steps * (kept_before - kept) / (1 - kept).clamp(min=torch.finfo(kept.dtype).tiny)
        )

    def time_at_mask_fraction(self, fraction: Tensor) -> Tensor:
        masked = 1 - self.alpha_bar(fraction.device)
        upper = torch.searchsorted(masked, fraction.double().contiguous()).clamp(1, self.steps)
        low, high = masked[upper - 1], masked[upper]
        part = (fraction - low) / (high - low).clamp(min=torch.finfo(low.dtype).tiny)
        return (upper - 1 + part.clamp(0, 1)) / self.steps

    def transition(self, start: float, stop: float) -> float:
        """(ᾱ_s − ᾱ_t)/(1 − ᾱ_t), the posterior of the absorbing process, for s < t."""
        alpha_bar = self.alpha_bar(torch.device("cpu"))
        t, s = round(start * self.steps), round(stop * self.steps)
        return float((alpha_bar[s] - alpha_bar[t]) / (1 - alpha_bar[t]))

    def alpha_bar(self, device: torch.device) -> Tensor:
        """ᾱ_0..ᾱ_T, float64 [T + 1]: the probability that a residue is still unmasked."""
        if device not in self._alpha_bars:
            self._alpha_bars[device] = self._alpha_bars[torch.device("cpu")].to(device)
        return self._alpha_bars[device]

    def _step(self, times: Tensor) -> Tensor:
        return (times.double() * self.steps).round().long()


def _alpha_bar(schedule: str, steps: int, beta_start: float, beta_end: float) -> Tensor:
    fraction = torch.arange(steps + 1, dtype=torch.float64) / steps
    if schedule == "linear":
        return 1 - fraction
    if schedule == "cosine":
        alpha_bar = 1 - torch.cos(math.pi / 2 * (1 - fraction))
    else:
        beta = torch.linspace(beta_start, beta_end, steps, dtype=torch.float64)
        alpha_bar = torch.cat([torch.ones(1, dtype=torch.float64), (1 - beta).cumprod(0)])
    alpha_bar[0], alpha_bar[-1] = 1.0, 0.0
    return alpha_bar
