"""What the paradigms with an absorbing source share: corruption, loss and the exact-k bound.

With an absorbing source each canonical residue is masked independently, with a probability that
grows towards the prior; paradigms differ in their time axis, in the weight of each time, and in how
they sample. A residue that is not masked keeps probability one on itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from d2plm.core.alphabet import MASK
from d2plm.core.batch import PackedBatch, segment_sum
from d2plm.core.errors import require, require_choice
from d2plm.core.noise import Key, stratified, uniform
from d2plm.paradigms.base import (
    TIME_SAMPLINGS,
    BoundDraw,
    Corrupted,
    Denoiser,
    Paradigm,
    canonical_index,
    canonical_log_softmax,
)

LOSSES = ("elbo", "mean")


class MaskedParadigm(Paradigm):
    """A paradigm whose corruption is the mask.

    Attributes:
        loss_kind: `elbo`, weighted so that the loss is a bound, per maskable residue; or `mean`,
            the plain mean over the masked residues.
        shift: predict the residue at i from the hidden state at i − 1.
    """

    source = "mask"
    estimator = "exact-k bound"
    loss_kind: str
    shift: bool = False

    def elbo_weight(self, times: Tensor) -> Tensor:
        """The weight of a masked residue's cross-entropy that makes the loss a bound, float64.

        T·(ᾱ_{t−1} − ᾱ_t)/(1 − ᾱ_t) of diffusion in T steps, −ᾱ′_t/(1 − ᾱ_t) in continuous time,
        κ̇_t/(1 − κ_t) of a flow.
        """
        return self.corruption_rate(times) / _positive(self.corrupted_fraction(times))

    def corrupt(self, batch: PackedBatch, key: Key) -> Corrupted:
        segments = batch.segment_ids()
        times, rates = self.times_of(
            stratified(key.stream("time"), batch.draw_ids, batch.global_sequences)
        )
        fraction = self.corrupted_fraction(times)
        draws = uniform(key.stream("mask"), batch.draw_ids[segments], batch.positions())
        maskable = self.maskable(batch)
        masked = maskable & (draws < fraction[segments])
        if self.loss_kind == "elbo":
            weights = torch.where(masked, (rates / _positive(fraction))[segments], 0.0)
            count = maskable.sum(dtype=torch.float64)
        else:
            weights = masked.double()
            count = masked.sum(dtype=torch.float64)
        return Corrupted(
            tokens=batch.tokens.masked_fill(masked, MASK),
            targets=canonical_index(batch.tokens, masked),
            times=times,
            weights=weights.float(),
            count=count,
        )

    def loss(
        self, logits: Tensor, batch: PackedBatch, corrupted: Corrupted
    ) -> tuple[Tensor, Tensor]:
        nats = self._nats(logits, corrupted.targets)
        return (nats * corrupted.weights).sum(), corrupted.count

    def maskable(self, batch: PackedBatch) -> Tensor:
        if self.shift:
            return batch.maskable() & (batch.positions() > 0)
        return batch.maskable()

    def log_probabilities(self, logits: Tensor) -> Tensor:
        return canonical_log_softmax(logits.roll(1, dims=0) if self.shift else logits)

    def masked_log_probabilities(
        self, model: Denoiser, batch: PackedBatch, masked: Tensor, fraction: Tensor
    ) -> Tensor:
        """log p(residue | what is not masked) [T, 20], with the `masked` tokens hidden.

        Args:
            masked: bool [T], a subset of the maskable residues.
            fraction: float64 [S], the share of each sequence that is masked; the model is told the
                time that belongs to it.
        """
        times = self.time_at_corrupted_fraction(fraction).float()
        tokens = batch.tokens.masked_fill(masked, MASK)
        return self.log_probabilities(model(tokens, batch.cu_seqlens, batch.max_seqlen, times))

    def cross_entropy(
        self, model: Denoiser, batch: PackedBatch, masked: Tensor, fraction: Tensor
    ) -> Tensor:
        """float64 [T]: −log p of each masked residue given the others; 0 elsewhere.

        Arguments as of `masked_log_probabilities`.
        """
        log_p = self.masked_log_probabilities(model, batch, masked, fraction)
        targets = canonical_index(batch.tokens, masked)
        return torch.where(masked, F.nll_loss(log_p, targets, reduction="none").double(), 0.0)

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
        """One estimate of the NELBO of each sequence, by the exact-k bound.

        NELBO(x) = Σ_k (1/k)·E_{|M|=k} Σ_{i∈M} −log p(x_i | x_{¬M}), the order-agnostic
        autoregressive bound (Hoogeboom et al., arXiv:2110.02037, eq. 4), estimated with k drawn
        from {1..L} and the weight L/k: no singularity and no empty mask.
        """
        segments = batch.segment_ids()
        maskable = self.maskable(batch)
        length = segment_sum(maskable.double(), segments, batch.num_segments)
        shared = uniform(key.stream("mask_count"), batch.draw_ids)
        masked_count = (length * (shared + draw) / draws).floor() + 1
        masked_count = masked_count.clamp(max=length)
        masked = random_subsets(
            batch, maskable, masked_count, key.stream(f"bound {draw}"), segments
        )
        fraction = masked_count / length.clamp(min=1)
        nats = self.cross_entropy(model, batch, masked, fraction)
        cross_entropy = segment_sum(nats, segments, batch.num_segments)
        known, expected = torch.zeros_like(length), torch.zeros_like(length)
        if control is not None:
            unigram = control[canonical_index(batch.tokens, maskable)]
            known = segment_sum(torch.where(maskable, unigram, 0.0), segments, batch.num_segments)
            expected = segment_sum(torch.where(masked, unigram, 0.0), segments, batch.num_segments)
        weight = length / masked_count.clamp(min=1)
        return BoundDraw(
            nats=known + weight * (cross_entropy - expected),
            fraction=fraction,
            cross_entropy=cross_entropy,
            predicted=masked_count,
        )

    def _nats(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.nll_loss(self.log_probabilities(logits), targets, reduction="none")


def random_subsets(
    batch: PackedBatch, eligible: Tensor, sizes: Tensor, key: Key, segments: Tensor
) -> Tensor:
    """bool [T]: a uniformly random subset of `sizes[s]` eligible tokens of each segment s."""
    draws = uniform(key, batch.draw_ids[segments], batch.positions())
    draws = torch.where(eligible, draws, 1.0)
    return eligible & (rank_in_segment(draws, batch.cu_seqlens, segments) < sizes[segments])


def rank_in_segment(values: Tensor, cu_seqlens: Tensor, segments: Tensor) -> Tensor:
    """int64 [T]: the rank, from 0, of each of `values` [T], in [0, 1], within its segment."""
    by_segment = torch.argsort(segments.double() * 2 + values.double(), stable=True)
    rank = torch.empty_like(segments)
    rank[by_segment] = torch.arange(values.shape[0], device=segments.device)
    return rank - cu_seqlens[segments]


def check_loss(loss: str, time_sampling: str, losses: tuple[str, ...] = LOSSES) -> tuple[str, str]:
    """Both arguments as they are; raises `ConfigError` unless they are known and go together."""
    require_choice("paradigm.loss", loss, losses)
    require_choice("paradigm.time_sampling", time_sampling, TIME_SAMPLINGS)
    require(
        loss != "mean" or time_sampling == "uniform",
        "paradigm.time_sampling",
        time_sampling,
        "'uniform' with paradigm.loss='mean', which has no weights to divide",
    )
    return loss, time_sampling


def _positive(fraction: Tensor) -> Tensor:
    return fraction.clamp(min=torch.finfo(fraction.dtype).tiny)
