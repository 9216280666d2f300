"""The interface of a paradigm: a corruption process, its loss, its bound and its sampling steps.

A new paradigm is one class, registered under a name with `d2plm.settings.registry.register`. Every
paradigm corrupts each residue independently: with a probability that grows towards the prior, it is
replaced by a token of the source. "Residue" means any of the vocabulary's K predicted tokens, for
proteins the twenty canonical residues; the model's distribution is a softmax over these. Special
tokens, padding and read-only tokens are never corrupted and never a target.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from d2plm.core.batch import PackedBatch, Relatives, segment_sum
from d2plm.core.errors import require, require_choice
from d2plm.core.noise import Key, stratified, uniform
from d2plm.core.vocabulary import FIRST, PROTEIN, Vocabulary
from d2plm.paradigms.noise_schedules import NoiseSchedule
from d2plm.settings.paradigm import ParadigmSettings

# Above this vocabulary size the logits of a whole batch are never in memory (docs/performance.md):
# training computes them in chunks, evaluation and generation in smaller passes.
LARGE_VOCABULARY = 4096
CHUNK_LOGITS, PASS_LOGITS = 2**24, 2**25  # elements
SMALLEST_ROOT = 1e-6  # smallest square root of a corrupted fraction that is drawn


class Denoiser(Protocol):
    """A model: corrupted tokens [T], bounds [S + 1] and times [S] of S segments → logits [T, V]."""

    def __call__(
        self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor, /
    ) -> Tensor: ...


class ExtendedDenoiser(Protocol):
    """A `Denoiser` that accepts relatives of the segments, or `reduce`.

    Called in this form only if there are relatives, or with `reduce`, which maps the hidden states
    and their projection to the result, instead of logits.
    """

    def __call__(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        times: Tensor,
        relatives: Relatives | None,
        reduce: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor] | None = None,
        /,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Corrupted:
    """A corrupted batch and its targets.

    Attributes:
        tokens: integer [T], the noised tokens, as in `PackedBatch.computable`.
        targets: int64 [T], index of the clean residue among the K; 0 if the weight is 0.
        times: float64 [S], the paradigm's time of each segment, in [0, 1].
        weights: float64 [T], weight of each position's loss; 0 if it is no target.
        count: float64 scalar, this batch's part of the global batch's normaliser.
    """

    tokens: Tensor
    targets: Tensor
    times: Tensor
    weights: Tensor
    count: Tensor


@dataclass(frozen=True)
class BoundDraw:
    """One draw of the bound for each of S sequences, all float64 [S].

    Attributes:
        nats: estimate of the NELBO; the mean over all draws is unbiased.
        fraction: masked fraction of the residues; for the uniform source, which may replace a
            residue by itself, the probability of replacement.
        cross_entropy: Σ −log p(clean residue) over the predicted residues, nats.
        predicted: number of predicted residues.
    """

    nats: Tensor
    fraction: Tensor
    cross_entropy: Tensor
    predicted: Tensor


@dataclass(frozen=True)
class Step:
    """A sampler's step from time t to time s, nearer to the data.

    Attributes:
        now, then: κ_t and κ_s, the probabilities that a residue is clean.
        renoise: probability that a residue shown at t is corrupted again; the paradigm limits it so
            that the marginal at s is kept.
    """

    now: float
    then: float
    sampler: str
    renoise: float = 0.0


class Paradigm(ABC):
    """The interface that training, evaluation and sampling use.

    Times are those of the paradigm's own paper, scaled to [0, 1].

    Args:
        settings: an object of the class's `Settings`; its fields may be given by name instead.

    Attributes:
        Settings: class of its settings, which are saved with every model.
        vocabulary: vocabulary of the model; set it unless it is that of proteins.
        name: name in folders, experiments and messages.
        description: sentence in a model card.
        source: the prior: `mask`, or `uniform`, random residues.
        estimator: name of the bound's estimator in reports.
        prior_time, data_time: times of the prior and of the data: 0 and 1, or 1 and 0.
        schedule: probability that a residue is clean.
        samplers: supported samplers, the default first.
        refused_samplers: the other samplers, each with the reason.
        default_steps, max_steps: numbers of sampler steps.
        losses: supported losses: `elbo`, a bound; `mean` over the predicted residues; others.
        loss_kind: the loss in use.
        time_sampling: `uniform` in the paradigm's time, or `low_variance`: with the corrupted
            fraction u drawn with density ½·u^(−½) and the loss weighted accordingly. The expected
            loss is the same. The variance of a time's contribution *at that time* grows towards the
            data, as 1/u for the mask and ln²u/u for the uniform source; stratification removes the
            variance among times. A density near the square root of the former keeps the remaining
            variance small.
    """

    config_name = "paradigm_config.json"
    Settings: type[ParadigmSettings] = ParadigmSettings
    vocabulary: Vocabulary = PROTEIN
    name: str
    description: str
    source: str
    estimator: str
    prior_time: float
    data_time: float
    schedule: NoiseSchedule
    samplers: tuple[str, ...]
    refused_samplers: Mapping[str, str] = MappingProxyType({})
    default_steps: int
    max_steps: int = 100_000
    losses: tuple[str, ...] = ("elbo", "mean")
    loss_kind: str
    time_sampling: str

    def __init__(self, settings: ParadigmSettings | None = None, /, **named: Any) -> None:
        self.settings = self.Settings(**named) if settings is None else settings
        self.build()

    @abstractmethod
    def build(self) -> None:
        """Set the attributes that depend on the settings."""

    def save_config(self, folder: str | Path) -> None:
        """Write the settings and the vocabulary for `load_paradigm`."""
        settings = asdict(self.settings)
        del settings["name"]  # the name of a run
        (Path(folder) / self.config_name).write_text(json.dumps(settings, indent=2, sort_keys=True))
        self.vocabulary.save(Path(folder))

    def set_loss(self, loss: str, time_sampling: str) -> None:
        """Set both; raises `ConfigError` unless they are known and compatible."""
        require_choice("loss", loss, self.losses)
        wanted = "'uniform' with loss='mean', which has no weights to divide"
        require(
            loss != "mean" or time_sampling == "uniform", "time_sampling", time_sampling, wanted
        )
        self.loss_kind, self.time_sampling = loss, time_sampling

    def corrupt(self, batch: PackedBatch, key: Key) -> Corrupted:
        """Corrupt a batch at random times; every draw is keyed by `key` and `batch.draw_ids`."""
        draws = stratified(key.stream("time"), batch.draw_ids, batch.global_sequences)
        times, rates = self.times_of(draws)
        fraction = self.corrupted_fraction(times)
        segments, maskable = batch.segment_ids(), self.maskable(batch)
        tokens, replaced = self.with_noise(batch, maskable, fraction, key, segments)
        predicted, mean = self.predicted(batch, replaced), self.loss_kind == "mean"
        weights = self.time_weights(rates, fraction)[segments]
        return Corrupted(
            tokens=tokens,
            targets=target_index(batch.tokens, predicted),
            times=times,
            weights=torch.where(predicted, 1.0 if mean else weights, 0.0),
            count=(predicted if mean else maskable).sum(dtype=torch.float64),
        )

    def with_noise(
        self, batch: PackedBatch, maskable: Tensor, fraction: Tensor, key: Key, segments: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(tokens [T], where bool [T]): a fraction [S] of the residues replaced by the source."""
        indices = (batch.draw_ids[segments], batch.positions())
        draws = uniform(key.stream("mask"), *indices)
        replaced = maskable & (draws < fraction[segments])
        clean = batch.computable()
        source = self.prior_tokens(key, *indices, dtype=clean.dtype)
        return torch.where(replaced, source, clean), replaced

    def predicted(self, batch: PackedBatch, replaced: Tensor) -> Tensor:
        """bool [T]: the targets, by default the `replaced` residues."""
        return replaced

    @abstractmethod
    def time_weights(self, rates: Tensor, fraction: Tensor) -> Tensor:
        """Weight of each time [S] in the `elbo` loss, given |du/dt| and the fraction u."""

    def loss(
        self, logits: Tensor, batch: PackedBatch, corrupted: Corrupted
    ) -> tuple[Tensor, Tensor]:
        """(weighted sum of the positions' losses [nats], its normaliser).

        The training loss is the sum of the first over all micro-batches and ranks, divided by that
        of the second, so the gradient does not depend on how the global batch is divided.
        """
        log_p = self.log_probabilities(logits)
        return self._weighted(log_p, batch, corrupted, slice(None)), corrupted.count

    def model_loss(
        self,
        model: Denoiser,
        batch: PackedBatch,
        corrupted: Corrupted,
        *,
        whole_logits: bool = False,
    ) -> Tensor:
        """The weighted sum of `loss`, computed with a model.

        With a large vocabulary only the positions that have a weight are projected to logits, a
        chunk at a time, and again in the backward. This needs a whole `DiT`: with context or
        pipeline parallelism, `whole_logits` must be true.
        """
        tokens, times = corrupted.tokens, corrupted.times
        if whole_logits or self.vocabulary.size <= LARGE_VOCABULARY:
            return self.loss(denoise(model, batch, tokens, times), batch, corrupted)[0]
        places = corrupted.weights.nonzero()[:, 0]
        rows = max(1, CHUNK_LOGITS // self.vocabulary.size)

        def reduce(hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
            def nats(hidden: Tensor, places: Tensor) -> Tensor:
                log_p = predicted_log_softmax(project(hidden), self.vocabulary)
                return self._weighted(log_p, batch, corrupted, places)

            parts = hidden.index_select(0, self.logit_places(places)).split(rows)
            return torch.stack(
                [
                    recomputed(nats, *part, use_reentrant=False, preserve_rng_state=False)
                    for part in zip(parts, places.split(rows), strict=True)
                ]
            ).sum()

        arguments = (tokens, batch.cu_seqlens, batch.max_seqlen, times)
        return cast(ExtendedDenoiser, model)(*arguments, None, reduce)

    def _weighted(
        self, log_p: Tensor, batch: PackedBatch, corrupted: Corrupted, places: Tensor | slice
    ) -> Tensor:
        nats = self.position_nats(log_p, batch, corrupted, places)
        return (nats * corrupted.weights[places].to(nats.dtype)).sum()

    @abstractmethod
    def position_nats(
        self, log_p: Tensor, batch: PackedBatch, corrupted: Corrupted, places: Tensor | slice
    ) -> Tensor:
        """The unweighted loss of each of M positions, nats [M].

        `log_p` [M, K] are log-probabilities given the other positions; `places` are the indices of
        the M among the T positions, int64 [M] or a slice.
        """

    def logit_places(self, places: Tensor) -> Tensor:
        """Positions of the logits that predict the residues at `places`, by default the same."""
        return places

    def bound(
        self,
        model: Denoiser,
        batch: PackedBatch,
        key: Key,
        *,
        draw: int | Sequence[int] = 0,
        draws: int = 1,
        control: Tensor | None = None,
    ) -> BoundDraw:
        """One estimate of the NELBO of each sequence.

        The mean over `draw` = 0 … `draws` − 1 is unbiased; each draw is one stratum.

        Args:
            batch: S sequences, with relatives of all draws.
            draw: several draws share a forward pass; the result has the S estimates of the first
                draw, then of the next, and so on.
            key: keys the draws; with `batch.draw_ids` = sequence ids they are the same for every
                model.
            control: −log of a unigram model's probabilities [K], float64, as a control variate:
                lower variance, the same expectation.
        """

        def total(values: Tensor) -> Tensor:
            return segment_sum(values, batch.segment_ids(), batch.num_segments)

        numbers = [draw] if isinstance(draw, int) else draw
        noise = (self.bound_noise(batch, key, number, draws) for number in numbers)
        tokens, fraction, weights = (torch.cat(parts) for parts in zip(*noise, strict=True))
        batch = batch.repeated(len(numbers))
        times = self.time_at_corrupted_fraction(fraction).float()
        logits = denoise(model, batch, tokens, times)
        terms = self.bound_terms(self.log_probabilities(logits), batch, tokens, fraction)
        nats, cross_entropy, predicted = (total(values.double()) for values in terms)
        known = torch.zeros_like(nats)
        if control is not None:
            maskable, unigram = self.maskable(batch), -control.expand(len(tokens), -1)
            nats = nats - total(self.bound_terms(unigram, batch, tokens, fraction)[0])
            clean = control[target_index(batch.tokens, maskable)]
            known = total(torch.where(maskable, clean, 0.0))
        return BoundDraw(known + weights * nats, fraction, cross_entropy, predicted)

    @abstractmethod
    def bound_noise(
        self, batch: PackedBatch, key: Key, draw: int, draws: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The corruption of one draw of the bound.

        Returns tokens integer [T], the corrupted fraction float64 [S], and the factor float64 [S]
        of the sum of `bound_terms` in the bound.
        """

    @abstractmethod
    def bound_terms(
        self, log_p: Tensor, batch: PackedBatch, tokens: Tensor, fraction: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each position's (term of the bound, cross-entropy, whether it is predicted), [T] each.

        Args:
            log_p: [T, K], log-probabilities given the other positions.
            batch: the clean batch.
            tokens, fraction: as returned by `bound_noise`.
        """

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Logits [T, V] → log p(residue | the other positions) [T, K], in fp32 or better."""
        return predicted_log_softmax(logits, self.vocabulary)

    def pass_tokens(self, token_budget: int) -> int:
        """Tokens per pass of evaluation or generation: the budget, unless the logits are large."""
        return min(token_budget, max(1, PASS_LOGITS // self.vocabulary.size))

    def maskable(self, batch: PackedBatch) -> Tensor:
        """bool [T]: the residues that may be corrupted and predicted."""
        tokens = batch.computable()
        return (tokens >= FIRST) & (tokens < self.vocabulary.stop)

    @abstractmethod
    def prior_tokens(self, key: Key, *indices: Tensor, dtype: torch.dtype) -> Tensor:
        """`dtype` [N]: tokens drawn from the prior, keyed by `indices` [N] each."""

    @abstractmethod
    def transition(self, log_p: Tensor, tokens: Tensor, step: Step) -> Tensor:
        """float64 [N, 1 + K]: the distribution of each residue after a step; the mask comes first.

        Nothing is drawn here, so that tests can multiply the steps and compare a sampler's exact
        law.

        Args:
            log_p: float64 [N, K], log-probabilities of the residues given the other positions.
            tokens: integer [N], the tokens at the positions to generate, before the step.
        """

    def may_change(self, tokens: Tensor, draws: Tensor, step: Step) -> Tensor:
        """bool [N]: whether a step may change each token [N], known before the model is evaluated.

        `draws`, float64 [N] in [0, 1), are those that will sample the step's distribution.
        """
        return torch.ones_like(tokens, dtype=torch.bool)

    def corrupted_fraction(self, times: Tensor) -> Tensor:
        """Probability that a residue is corrupted at `times`, same shape, float64."""
        return 1 - self.schedule.kept(self._flow_times(times))

    def corruption_rate(self, times: Tensor) -> Tensor:
        """Derivative of `corrupted_fraction` towards the prior, same shape, float64."""
        return self.schedule.rate(self._flow_times(times))

    def time_at_corrupted_fraction(self, fraction: Tensor) -> Tensor:
        """The time at which this fraction of the residues is expected to be corrupted, float64."""
        return self._flow_times(self.schedule.time_at(fraction.double()))

    def kept(self, time: float) -> float:
        """Probability that a residue is clean: ᾱ_t of diffusion, κ_t of a flow."""
        if time == self.data_time:
            return 1.0
        return 1 - float(self.corrupted_fraction(torch.tensor(time, dtype=torch.float64)))

    def times_of(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Uniform `draws` in [0, 1) [S] → (times, d corrupted fraction / d draw), float64 [S].

        The mean over draws of `f(times) · rate` is then ∫ f du over the corrupted fraction u.
        """
        if self.time_sampling == "uniform":
            times = self.prior_time + (self.data_time - self.prior_time) * draws.double()
            return times, self.corruption_rate(times)
        root = (1 - draws.double()).clamp(min=SMALLEST_ROOT)
        return self.time_at_corrupted_fraction(root**2), 2 * root

    def _flow_times(self, times: Tensor) -> Tensor:
        """Convert between the paradigm's times and the schedule's, which are 0 at the prior."""
        return times.double() if self.data_time == 1 else 1 - times.double()


def denoise(model: Denoiser, batch: PackedBatch, tokens: Tensor, times: Tensor) -> Tensor:
    """Logits [T, V] of the batch with its tokens corrupted to `tokens` [T], at `times` [S]."""
    arguments = (tokens, batch.cu_seqlens, batch.max_seqlen, times)
    if batch.relatives is None:
        return model(*arguments)
    return cast(ExtendedDenoiser, model)(*arguments, batch.relatives)


def target_index(tokens: Tensor, where: Tensor) -> Tensor:
    """int64 [T]: index among the K predicted tokens; 0 outside `where`."""
    return torch.where(where, tokens.long() - FIRST, 0)


def predicted_log_softmax(logits: Tensor, vocabulary: Vocabulary = PROTEIN) -> Tensor:
    """Logits [T, V] → log-probabilities of the K predicted tokens [T, K], in fp32 or better."""
    predicted = logits[:, FIRST : vocabulary.stop]
    return predicted.to(torch.promote_types(predicted.dtype, torch.float32)).log_softmax(-1)
