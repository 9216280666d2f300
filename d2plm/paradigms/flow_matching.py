"""Discrete flow matching (Gat et al., arXiv:2407.15595) from a mask or a uniform source.

Continuous time t from 0 (the source) to 1 (data). Along the mixture path a residue shows its clean
value with probability κ_t and a token of the source otherwise. The model gives p_{1|t}; the
velocity is u_t = κ̇_t/(1 − κ_t)·(p_{1|t} − δ_{x_t}). With the mask as source this is masked
diffusion on another time axis; with random residues as source every position is a target, and what
was written can be rewritten.
"""

import math
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import register_to_config
from torch import Tensor

from d2plm.core.alphabet import CANONICAL, CANONICAL_START
from d2plm.core.batch import PackedBatch, segment_sum
from d2plm.core.errors import require_choice, require_number
from d2plm.core.noise import Key, stratified, uniform
from d2plm.paradigms.base import (
    BoundDraw,
    Corrupted,
    Denoiser,
    Paradigm,
    canonical_index,
    canonical_log_softmax,
)
from d2plm.paradigms.masked import MaskedParadigm, check_loss

SOURCES = ("mask", "uniform")
SCHEDULERS = ("linear", "polynomial", "cosine", "cubic")
UNIFORM_LOSSES = ("elbo", "generalised_kl", "mean")
MAX_MONOTONE_SLOPE = 3.0  # both end slopes at most 3 keep the cubic increasing
RESIDUES = len(CANONICAL)
KAPPA_MARGIN = 1e-12  # κ is kept this far from 0 and 1, where the uniform bound is 0/0


def flow_matching(source: str = "mask", **settings: Any) -> Paradigm:
    """The flow from `source`: `MaskFlowMatching` or `UniformFlowMatching`, with its settings.

    Raises:
        ConfigError: for another source, or an impossible setting.
    """
    require_choice("paradigm.source", source, SOURCES)
    return (MaskFlowMatching if source == "mask" else UniformFlowMatching)(**settings)


class _MixturePath(Paradigm):
    """The path's schedulers κ_t, which both sources share.

    κ_t: `linear` t; `polynomial` t^n; `cosine` 1 − cos(πt/2); `cubic`
    −2t³ + 3t² + a(t³ − 2t² + t) + b(t³ − t²), whose end slopes are a and b.
    """

    prior_time = 0.0
    data_time = 1.0
    max_steps = 100_000

    def _set_path(
        self, scheduler: str, degree: float, slopes: tuple[float, float], num_flow_steps: int
    ) -> None:
        require_choice("paradigm.scheduler", scheduler, SCHEDULERS)
        require_number("paradigm.polynomial_degree", degree, low=0, low_open=True)
        for key, slope in zip(("start", "end"), slopes, strict=True):
            require_number(f"paradigm.cubic_{key}_slope", slope, low=0, high=MAX_MONOTONE_SLOPE)
        require_number("paradigm.num_flow_steps", num_flow_steps, integer=True, low=1)
        self.scheduler, self.degree, self.slopes = scheduler, degree, slopes
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

    def corruption_rate(self, times: Tensor) -> Tensor:
        """κ̇_t, the derivative of κ by time; float64."""
        t = times.double()
        if self.scheduler == "linear":
            return torch.ones_like(t)
        if self.scheduler == "polynomial":
            return self.degree * t ** (self.degree - 1)
        if self.scheduler == "cosine":
            return math.pi / 2 * torch.sin(math.pi / 2 * t)
        a, b = self.slopes
        return (3 * (a + b - 2) * t + 2 * (3 - 2 * a - b)) * t + a

    def corrupted_fraction(self, times: Tensor) -> Tensor:
        return 1 - self.kappa(times)

    def time_at_corrupted_fraction(self, fraction: Tensor) -> Tensor:
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


class MaskFlowMatching(_MixturePath, MaskedParadigm):
    """Flow matching along the mixture path from the mask to the data.

    Args:
        scheduler, polynomial_degree, cubic_start_slope, cubic_end_slope: κ_t, with its n, a and b
            (a and b in [0, 3]).
        loss: `elbo` weights a masked residue by κ̇_t/(1 − κ_t), which makes the loss a likelihood
            bound; `mean` is the plain mean over masked residues.
        time_sampling: `uniform` or `low_variance`, see `Paradigm`.
        num_flow_steps: Euler steps of the sampler when none are asked for.

    Raises:
        ConfigError: on an impossible value.
    """

    name = "flow_matching"
    samplers = ("euler", "ancestral", "first_hitting", "confidence", "remdm")

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
    ) -> None:
        slopes = (cubic_start_slope, cubic_end_slope)
        self._set_path(scheduler, polynomial_degree, slopes, num_flow_steps)
        self.loss_kind, self.time_sampling = check_loss(loss, time_sampling)


class UniformFlowMatching(_MixturePath):
    """Flow matching along the mixture path from random residues to the data.

    A corrupted residue cannot be told from a clean one, so that every residue is a target, and
    nothing is carried over. The model's softmax is p(x | the other positions); Bayes' rule with the
    noise that residue i shows, z, gives p_{1|t}(x | z) ∝ p(x)·(1 + 20·κ_t/(1 − κ_t)·1[x = z]).

    Args:
        scheduler, polynomial_degree, cubic_start_slope, cubic_end_slope: as of `MaskFlowMatching`.
        loss: `elbo` is the time-reversal bound (see `time_reversal_nats`); `generalised_kl` the
            looser bound of the flow's own velocity (see `generalised_kl_nats`); `mean` the mean of
            −log p_{1|t}(x_1 | x_t) over all residues, which is no bound.
        time_sampling: `uniform` or `low_variance`, see `Paradigm`.
        num_flow_steps: steps of the sampler when none are asked for.

    Raises:
        ConfigError: on an impossible value.
    """

    name = "flow_matching_uniform"
    source = "uniform"
    estimator = "time-reversal bound"
    samplers = ("euler", "ancestral")
    refused_samplers = MappingProxyType(
        dict.fromkeys(
            ("first_hitting", "confidence", "remdm"),
            "it fills in masks, and a uniform source has none",
        )
    )

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
    ) -> None:
        slopes = (cubic_start_slope, cubic_end_slope)
        self._set_path(scheduler, polynomial_degree, slopes, num_flow_steps)
        self.loss_kind, self.time_sampling = check_loss(loss, time_sampling, UNIFORM_LOSSES)

    def corrupt(self, batch: PackedBatch, key: Key) -> Corrupted:
        times, rates = self.times_of(
            stratified(key.stream("time"), batch.draw_ids, batch.global_sequences)
        )
        segments, maskable = batch.segment_ids(), batch.maskable()
        tokens = self._noised(batch, maskable, self.corrupted_fraction(times), key, segments)
        # The rate turns the draw of a time into ∫ dκ; a mean has no such weights.
        weights = torch.where(maskable, 1.0 if self.loss_kind == "mean" else rates[segments], 0.0)
        return Corrupted(
            tokens=tokens,
            targets=canonical_index(batch.tokens, maskable),
            times=times,
            weights=weights.float(),
            count=maskable.sum(dtype=torch.float64),
        )

    def loss(
        self, logits: Tensor, batch: PackedBatch, corrupted: Corrupted
    ) -> tuple[Tensor, Tensor]:
        maskable, segments = batch.maskable(), batch.segment_ids()
        shown = canonical_index(corrupted.tokens, maskable)
        kappa = self.kappa(corrupted.times)[segments]
        log_p = self.log_probabilities(logits)
        if self.loss_kind == "mean":
            posterior = log_posterior(log_p, shown, kappa)
            nats = F.nll_loss(posterior, corrupted.targets, reduction="none")
        elif self.loss_kind == "elbo":
            nats = time_reversal_nats(log_p, shown, corrupted.targets, kappa)
        else:
            nats = generalised_kl_nats(log_p, shown, corrupted.targets, kappa)
        return (nats * corrupted.weights).sum(), corrupted.count

    def bound(
        self,
        model: Denoiser,
        batch: PackedBatch,
        key: Key,
        *,
        draw: int = 0,
        draws: int = 1,
        control: Tensor | None = None,
    ) -> BoundDraw:
        """One estimate of the NELBO of each sequence, by the time-reversal bound.

        The integral over κ does not depend on the scheduler; 1 − κ is drawn with density
        ½·(1 − κ)^(−½), stratified over the draws.
        """
        segments, maskable = batch.segment_ids(), batch.maskable()
        root = 1 - (uniform(key.stream("noise_level"), batch.draw_ids) + draw) / draws
        fraction = root.clamp(min=KAPPA_MARGIN**0.5) ** 2
        noise = key.stream(f"bound {draw}")
        tokens = self._noised(batch, maskable, fraction, noise, segments)
        times = self.time_at_corrupted_fraction(fraction).float()
        log_p = self.log_probabilities(
            model(tokens, batch.cu_seqlens, batch.max_seqlen, times)
        ).double()
        shown = canonical_index(tokens, maskable)
        clean = canonical_index(batch.tokens, maskable)
        kappa = (1 - fraction)[segments]

        def per_sequence(values: Tensor) -> Tensor:
            return segment_sum(torch.where(maskable, values, 0.0), segments, batch.num_segments)

        nats = time_reversal_nats(log_p, shown, clean, kappa)
        known = torch.zeros_like(fraction)
        if control is not None:
            unigram = -control.expand(len(shown), -1)
            nats = nats - time_reversal_nats(unigram, shown, clean, kappa)
            known = per_sequence(control[clean])
        posterior = log_posterior(log_p, shown, kappa)
        return BoundDraw(
            nats=known + 2 * root * per_sequence(nats),
            fraction=fraction,
            cross_entropy=per_sequence(F.nll_loss(posterior, clean, reduction="none")),
            predicted=per_sequence(torch.ones_like(kappa)),
        )

    def log_probabilities(self, logits: Tensor) -> Tensor:
        return canonical_log_softmax(logits)

    def _noised(
        self, batch: PackedBatch, maskable: Tensor, fraction: Tensor, key: Key, segments: Tensor
    ) -> Tensor:
        """uint8 [T]: the tokens with this fraction [S] of the residues drawn anew, uniformly."""
        indices = (batch.draw_ids[segments], batch.positions())
        replaced = maskable & (uniform(key.stream("mask"), *indices) < fraction[segments])
        return torch.where(
            replaced, random_residues(key, *indices).to(batch.tokens.dtype), batch.tokens
        )


def random_residues(key: Key, *indices: Tensor) -> Tensor:
    """int64 tokens: a uniformly random canonical residue for each of the `indices`."""
    return (uniform(key.stream("source"), *indices) * RESIDUES).long() + CANONICAL_START


def log_posterior(log_p: Tensor, shown: Tensor, kappa: Tensor) -> Tensor:
    """log p_{1|t} [T, 20] under the uniform source.

    Args:
        log_p: [T, 20], log-probabilities given the other positions.
        shown: int64 [T], index of the residue that each position shows.
        kappa: float64 [T], κ_t.
    """
    kappa = kappa.clamp(max=1 - KAPPA_MARGIN)
    evidence = torch.log1p(RESIDUES * kappa / (1 - kappa)).to(log_p.dtype)
    return log_p.scatter_add(-1, shown[:, None], evidence[:, None]).log_softmax(-1)


def time_reversal_nats(log_p: Tensor, shown: Tensor, clean: Tensor, kappa: Tensor) -> Tensor:
    """What each position adds to the time-reversal bound per unit of κ, nats, float64 [T].

    Uniform noise is a Markov chain that jumps at the rate −κ̇/κ to a random residue. Its reverse
    jumps from z to y at the rate κ̇/(20·κ)·r_y with r_y = q_t(y | x_1)/q_t(z | x_1), where
    q_t(y | x) = κ·1[y = x] + (1 − κ)/20; the model's reverse has r̂_y with the mixture of q_t(· | x)
    over its p(x | the other positions) instead. The divergence of the two paths,

        ∫ dκ/(20·κ) · E_z Σ_y [ r̂_y − r_y + r_y·log(r_y/r̂_y) ],

    bounds −log p(x_1), with equality for exact posteriors (Schiff et al., arXiv:2412.10193, there
    written in α = κ; derived in docs/science.md).

    Args:
        log_p: [T, 20], the model's log-probabilities given the other positions.
        shown: int64 [T], index z of the residue that each position shows.
        clean: int64 [T], index of x_1.
        kappa: float64 [T], κ_t.
    """
    kappa = kappa.clamp(KAPPA_MARGIN, 1 - KAPPA_MARGIN)[:, None]
    noise = ((1 - kappa) / RESIDUES).log()
    model = torch.logaddexp(log_p.double() + kappa.log(), noise)
    truth = noise.expand_as(model).scatter(-1, clean[:, None], torch.logaddexp(kappa.log(), noise))
    model_ratio = model - model.gather(-1, shown[:, None])
    ratio = truth - truth.gather(-1, shown[:, None])
    log_quotient = ratio - model_ratio
    # r·(e^(−d) − 1 + d) with d = log(r/r̂): no cancellation where the two agree.
    divergence = ratio.exp() * (torch.expm1(-log_quotient) + log_quotient)
    return divergence.sum(-1) / (RESIDUES * kappa[:, 0])


def generalised_kl_nats(log_p: Tensor, shown: Tensor, clean: Tensor, kappa: Tensor) -> Tensor:
    """What each position adds to the generalised KL bound per unit of κ, nats, float64 [T].

    1/(1 − κ)·[1 − p(z|z) + 1[x_1 ≠ z]·(−log p(x_1|z) − 1)] with p = p_{1|t}: the divergence of the
    flow's own velocities (Shaul et al., arXiv:2412.03487). A bound, but loose: its path jumps
    straight to x_1, which says more of x_1 than the path of the time reversal.

    Arguments as of `time_reversal_nats`.
    """
    kappa = kappa.clamp(KAPPA_MARGIN, 1 - KAPPA_MARGIN)
    posterior = log_posterior(log_p.double(), shown, kappa)
    stays = posterior.gather(-1, shown[:, None])[:, 0]
    truth = posterior.gather(-1, clean[:, None])[:, 0]
    return (-torch.expm1(stays) + torch.where(clean != shown, -truth - 1, 0.0)) / (1 - kappa)
