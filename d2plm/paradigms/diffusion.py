"""Absorbing discrete diffusion (Austin et al., arXiv:2107.03006, D3PM with an absorbing state).

x_t masks each residue independently with probability 1 − ᾱ_t, t = 1..T. The times given to the
model are t/T: 0 is clean, 1 fully masked. Without T, time is continuous in (0, 1] (Sahoo et al.,
arXiv:2406.07524; Shi et al., arXiv:2406.04329), the limit T → ∞ of every schedule except
`linear_beta`, whose β belong to T = 1000 and are not scaled by T.
"""

from types import MappingProxyType

import torch
from torch import Tensor

from d2plm.paradigms.masked import MaskedParadigm
from d2plm.paradigms.noise_schedules import Cosine, InSteps, LinearBeta, NoiseSchedule, Polynomial
from d2plm.settings.paradigm import DiffusionSettings

DEFAULT_SAMPLING_STEPS = 128


class AbsorbingDiffusion(MaskedParadigm):
    """Absorbing diffusion in T steps, or in continuous time.

    With `shift`, residue i is predicted from the hidden state at i − 1, as in checkpoints adapted
    from left-to-right models; the first token then cannot be predicted.
    """

    Settings = DiffusionSettings
    settings: DiffusionSettings
    name = "diffusion"
    description = "absorbing discrete diffusion (from a mask)"
    prior_time = 1.0
    data_time = 0.0
    samplers = ("ancestral", "first_hitting", "confidence", "remdm")
    refused_samplers = MappingProxyType(
        {"euler": "it follows the velocity of a flow; 'ancestral' is the exact step"}
    )

    def build(self) -> None:
        settings = self.settings
        schedules: dict[str, NoiseSchedule] = {
            "linear": Polynomial(1),
            "cosine": Cosine(),
            "linear_beta": LinearBeta(settings.beta_start, settings.beta_end),
        }
        self.steps, self.schedule = settings.num_train_timesteps, schedules[settings.schedule]
        if self.steps is not None:
            self.schedule = InSteps(self.schedule, self.steps)
        self.max_steps = self.steps or self.max_steps
        self.default_steps = min(DEFAULT_SAMPLING_STEPS, self.max_steps)
        self.set_loss(settings.loss, settings.time_sampling)
        self.shift = settings.shift

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
