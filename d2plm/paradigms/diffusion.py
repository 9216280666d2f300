"""Absorbing discrete diffusion (Austin et al., arXiv:2107.03006, D3PM with an absorbing state).

x_t masks each residue independently with probability 1 − ᾱ_t, t = 1..T. The times given to the
model are t/T: 0 is clean, 1 fully masked. Without T, time is continuous in (0, 1] (Sahoo et al.,
arXiv:2406.07524; Shi et al., arXiv:2406.04329), the limit T → ∞ of every schedule but
`linear_beta`, whose β belong to T = 1000 and are not scaled by T.
"""

from types import MappingProxyType

import torch
from torch import Tensor

from d2plm.core.errors import require, require_choice, require_number
from d2plm.paradigms.masked import MaskedParadigm
from d2plm.paradigms.noise_schedules import Cosine, InSteps, LinearBeta, NoiseSchedule, Polynomial
from d2plm.paradigms.paradigm import register_to_config

DEFAULT_SAMPLING_STEPS = 128


class AbsorbingDiffusion(MaskedParadigm):
    """Absorbing diffusion in T steps, or in continuous time.

    Args:
        num_train_timesteps: T; None is continuous time.
        schedule: ᾱ_t: `linear`, `cosine` or `linear_beta`, see `noise_schedules`.
        beta_start, beta_end: first and last β of `linear_beta`.
        loss: `elbo` or `mean`, see `MaskedParadigm`.
        time_sampling: `uniform` or `low_variance`, see `Paradigm`.
        shift: predict residue i from the hidden state at i − 1, as checkpoints adapted from
            left-to-right models need. It cannot predict a first token.
        prediction_type: only `residue`; `epsilon` has no meaning for discrete states.

    Raises:
        ConfigError: on an impossible value.
    """

    name = "diffusion"
    description = "absorbing discrete diffusion (from a mask)"
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
            require_number("num_train_timesteps", num_train_timesteps, integer=True, low=1)
        require_number("beta_start", beta_start, low=0, low_open=True, high=1, high_open=True)
        require_number("beta_end", beta_end, low=beta_start, high=1, high_open=True)
        wanted = "'residue'; noise prediction has no meaning for discrete states"
        require(prediction_type == "residue", "prediction_type", prediction_type, wanted)
        schedules: dict[str, NoiseSchedule] = {
            "linear": Polynomial(1),
            "cosine": Cosine(),
            "linear_beta": LinearBeta(beta_start, beta_end),
        }
        require_choice("schedule", schedule, schedules)
        self.steps, self.schedule = num_train_timesteps, schedules[schedule]
        if self.steps is not None:
            self.schedule = InSteps(self.schedule, self.steps)
        self.max_steps = self.steps or self.max_steps
        self.default_steps = min(DEFAULT_SAMPLING_STEPS, self.max_steps)
        self.set_loss(loss, time_sampling)
        self.shift = shift

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
