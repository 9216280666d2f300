"""Discrete flow matching (Gat et al., arXiv:2407.15595) from a mask or a uniform source.

Continuous time t from 0 (the source) to 1 (data). Along the mixture path a residue shows its clean
value with probability κ_t and a token of the source otherwise. The model predicts p_{1|t}; the
velocity is u_t = κ̇_t/(1 − κ_t)·(p_{1|t} − δ_{x_t}). With the mask as source this is masked
diffusion on another time axis; with random residues as source every position is a target, and
residues can be revised.
"""

from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.core.errors import require
from d2plm.core.noise import Key, uniform
from d2plm.core.vocabulary import FIRST
from d2plm.paradigms.masked import MaskedParadigm
from d2plm.paradigms.noise_schedules import Cosine, Cubic, NoiseSchedule, Polynomial
from d2plm.paradigms.paradigm import Corrupted, Paradigm, Step, target_index
from d2plm.paradigms.uniform_noise import (
    KAPPA_MARGIN,
    generalised_kl_nats,
    jump,
    log_posterior,
    posterior_step,
    random_residues,
    time_reversal_nats,
)
from d2plm.settings.paradigm import FlowMatchingSettings


def flow_matching(settings: FlowMatchingSettings) -> Paradigm:
    """The flow from the settings' source; `ConfigError` if the loss is not defined for it."""
    return (MaskFlowMatching if settings.source == "mask" else UniformFlowMatching)(settings)


class FlowMatching(Paradigm):
    """Flow matching along the mixture path from a source to the data.

    Raises `ConfigError` if the loss is not defined for the source.
    """

    Settings = FlowMatchingSettings
    settings: FlowMatchingSettings
    prior_time = 0.0
    data_time = 1.0

    def __init__(self, settings: FlowMatchingSettings | None = None, /, **named: Any) -> None:
        super().__init__(settings or FlowMatchingSettings(**{"source": self.source, **named}))

    def build(self) -> None:
        settings = self.settings
        require(settings.source == self.source, "source", settings.source, repr(self.source))
        schedules: dict[str, NoiseSchedule] = {
            "linear": Polynomial(1),
            "polynomial": Polynomial(settings.polynomial_degree),
            "cosine": Cosine(),
            "cubic": Cubic(settings.cubic_start_slope, settings.cubic_end_slope),
        }
        self.schedule = schedules[settings.schedule]
        self.default_steps = settings.num_flow_steps
        self.set_loss(settings.loss, settings.time_sampling)


class MaskFlowMatching(FlowMatching, MaskedParadigm):
    """Flow matching from the mask to the data; `MaskedParadigm` has the losses."""

    name = "flow_matching"
    description = "discrete flow matching (from a mask)"
    samplers = ("euler", "ancestral", "first_hitting", "confidence", "remdm")


class UniformFlowMatching(FlowMatching):
    """Flow matching from random residues to the data.

    A corrupted residue cannot be distinguished from a clean one, so every residue is a target, and
    nothing is carried over. The model's softmax is p(x | the other positions); Bayes' rule with the
    residue z shown at the position gives p_{1|t}(x | z) ∝ p(x)·(1 + K·κ_t/(1 − κ_t)·1[x = z]).

    The loss `elbo` is the time-reversal bound (see `time_reversal_nats`), `generalised_kl` the
    looser bound of the flow's own velocity (see `generalised_kl_nats`), and `mean` the mean of −log
    p_{1|t}(x_1 | x_t) over all residues, which is no bound.
    """

    name = "flow_matching_uniform"
    description = "discrete flow matching (from random residues)"
    source = "uniform"
    estimator = "time-reversal bound"
    losses = ("elbo", "generalised_kl", "mean")
    samplers = ("euler", "ancestral")
    refused_samplers = MappingProxyType(
        dict.fromkeys(
            ("first_hitting", "confidence", "remdm"),
            "it fills in masks, and a uniform source has none",
        )
    )

    def predicted(self, batch: PackedBatch, replaced: Tensor) -> Tensor:
        return self.maskable(batch)

    def time_weights(self, rates: Tensor, fraction: Tensor) -> Tensor:
        return rates  # turns the mean over times into ∫ dκ

    def position_nats(
        self, log_p: Tensor, batch: PackedBatch, corrupted: Corrupted, places: Tensor | slice
    ) -> Tensor:
        shown = target_index(corrupted.tokens, self.maskable(batch))[places]
        kappa = self.schedule.kept(corrupted.times)[batch.segment_ids()[places]]
        clean = corrupted.targets[places]
        if self.loss_kind == "mean":
            return F.nll_loss(log_posterior(log_p, shown, kappa), clean, reduction="none")
        if self.loss_kind == "elbo":
            return time_reversal_nats(log_p, shown, clean, kappa)
        return generalised_kl_nats(log_p, shown, clean, kappa)

    def bound_noise(
        self, batch: PackedBatch, key: Key, draw: int, draws: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The time-reversal bound at one κ: the integral over κ does not depend on the schedule.

        1 − κ is drawn with the density 1/(2·√(1 − κ)), stratified over the draws.
        """
        root = 1 - (uniform(key.stream("noise_level"), batch.draw_ids) + draw) / draws
        fraction = root.clamp(min=KAPPA_MARGIN**0.5) ** 2
        segments, maskable = batch.segment_ids(), self.maskable(batch)
        tokens, _ = self.with_noise(
            batch, maskable, fraction, key.stream(f"bound {draw}"), segments
        )
        return tokens, fraction, 2 * root

    def bound_terms(
        self, log_p: Tensor, batch: PackedBatch, tokens: Tensor, fraction: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        maskable, kappa = self.maskable(batch), (1 - fraction)[batch.segment_ids()]
        shown, clean = (target_index(row, maskable) for row in (tokens, batch.tokens))
        nats = time_reversal_nats(log_p, shown, clean, kappa)
        posterior = log_posterior(log_p.double(), shown, kappa)
        cross_entropy = F.nll_loss(posterior, clean, reduction="none")
        return torch.where(maskable, nats, 0.0), torch.where(maskable, cross_entropy, 0.0), maskable

    def prior_tokens(self, key: Key, *indices: Tensor, dtype: torch.dtype) -> Tensor:
        return random_residues(key, self.vocabulary.predicted, *indices).to(dtype)

    def transition(self, log_p: Tensor, tokens: Tensor, step: Step) -> Tensor:
        shown = tokens.long() - FIRST
        if step.sampler == "ancestral":
            residues = posterior_step(log_p, shown, step.now, step.then)
        else:
            residues = jump(log_p, shown, step.now, step.then, step.renoise)
        return F.pad(residues, (1, 0))
