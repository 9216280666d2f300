"""What the two masked paradigms share: corruption, loss and the exact-k bound.

With an absorbing source each canonical residue is masked independently, with a probability that
grows towards the prior; paradigms differ in their time axis, in the weight of each time, and in how
they sample. A residue that is not masked keeps probability one on itself.
"""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from d2plm.alphabet import CANONICAL_START, CANONICAL_STOP, MASK
from d2plm.batch import PackedBatch, segment_sum
from d2plm.errors import require, require_choice
from d2plm.noise import Key, stratified, uniform
from d2plm.paradigms.base import Corrupted, Denoiser, Paradigm

LOSSES = ("elbo", "mean")
TIME_SAMPLINGS = ("uniform", "low_variance")


class MaskedParadigm(Paradigm):
    """A paradigm whose corruption is the mask.

    Attributes:
        loss_kind: `elbo`, weighted so that the loss is a bound, per maskable residue; or `mean`,
            the plain mean over the masked residues.
        time_sampling: `uniform` in the paradigm's time, or `low_variance`: with the mask fraction u
            drawn with density ½·u^(−½) and the weights divided accordingly. The loss is the same;
            the variance of its sum of a sequence's cross-entropies, ∫ L/(u·q(u)) du for density q,
            is the smallest there is (4·L, where uniform u gives L·log of the smallest 1/u).
        shift: predict the residue at i from the hidden state at i − 1.
    """

    loss_kind: str
    time_sampling: str
    shift: bool = False

    @abstractmethod
    def times_of(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """(times, weights), float64 [S] each, of uniform `draws` in [0, 1).

        The weight is that of a masked residue's cross-entropy which makes the loss a bound: for
        `uniform` time sampling it is `elbo_weight`, else that divided by the times' density.
        """

    @abstractmethod
    def time_at_mask_fraction(self, fraction: Tensor) -> Tensor:
        """The time at which `fraction` of the residues is expected to be masked, float64."""

    @abstractmethod
    def elbo_weight(self, times: Tensor) -> Tensor:
        """The weight of a masked residue's cross-entropy that makes the loss a bound, float64."""

    def corrupt(self, batch: PackedBatch, key: Key) -> Corrupted:
        segments = batch.segment_ids()
        times, elbo_weights = self.times_of(
            stratified(key.stream("time"), batch.draw_ids, batch.global_sequences)
        )
        draws = uniform(key.stream("mask"), batch.draw_ids[segments], batch.positions())
        maskable = self.maskable(batch)
        masked = maskable & (draws < self.mask_fraction(times)[segments])
        if self.loss_kind == "elbo":
            weights = torch.where(masked, elbo_weights[segments], 0.0)
            count = maskable.sum(dtype=torch.float64)
        else:
            weights = masked.double()
            count = masked.sum(dtype=torch.float64)
        return Corrupted(
            tokens=batch.tokens.masked_fill(masked, MASK),
            targets=_canonical_index(batch.tokens, masked),
            times=times.float(),
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
        if self.shift:
            logits = logits.roll(1, dims=0)
        canonical = logits[:, CANONICAL_START:CANONICAL_STOP]
        return canonical.to(torch.promote_types(canonical.dtype, torch.float32)).log_softmax(-1)

    def cross_entropy(
        self, model: Denoiser, batch: PackedBatch, masked: Tensor, fraction: Tensor
    ) -> Tensor:
        times = self.time_at_mask_fraction(fraction).float()
        logits = model(
            batch.tokens.masked_fill(masked, MASK), batch.cu_seqlens, batch.max_seqlen, times
        )
        nats = self._nats(logits, _canonical_index(batch.tokens, masked))
        return torch.where(masked, nats.double(), 0.0)

    def bound(
        self,
        model: Denoiser,
        batch: PackedBatch,
        key: Key,
        *,
        draw: int = 0,
        draws: int = 1,
        control: Tensor | None = None,
    ) -> Tensor:
        """One unbiased estimate of the NELBO of each sequence, nats, float64 [S].

        The exact-k bound NELBO(x) = Σ_k (1/k)·E_{|M|=k} Σ_{i∈M} −log p(x_i | x_{¬M}), the
        order-agnostic autoregressive bound (Hoogeboom et al., arXiv:2110.02037, eq. 4), estimated
        with k drawn from {1..L} and the weight L/k: no singularity and no empty mask.

        Args:
            key: keys the masks; with `batch.draw_ids` = sequence ids they are the same for every
                model.
            draw, draws: this is estimate `draw` of `draws`, over which k is stratified.
            control: −log of a unigram model's probabilities [20], float64; subtracted at the masked
                residues and added back exactly, it lowers the variance and changes no expectation.
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
        nats = self.cross_entropy(model, batch, masked, masked_count / length.clamp(min=1))
        if control is None:
            known = torch.zeros_like(length)
        else:
            unigram = control[_canonical_index(batch.tokens, maskable)]
            nats = nats - torch.where(masked, unigram, 0.0)
            known = segment_sum(torch.where(maskable, unigram, 0.0), segments, batch.num_segments)
        weight = length / masked_count.clamp(min=1)
        return known + weight * segment_sum(nats, segments, batch.num_segments)

    def _nats(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.nll_loss(self.log_probabilities(logits), targets, reduction="none")


def random_subsets(
    batch: PackedBatch, eligible: Tensor, sizes: Tensor, key: Key, segments: Tensor
) -> Tensor:
    """bool [T]: a uniformly random subset of `sizes[s]` eligible tokens of each segment s."""
    draws = uniform(key, batch.draw_ids[segments], batch.positions())
    draws = torch.where(eligible, draws, 1.0)
    by_segment = torch.argsort(segments.double() * 2 + draws)
    rank = torch.empty_like(segments)
    rank[by_segment] = torch.arange(batch.num_tokens, device=segments.device)
    rank = rank - batch.cu_seqlens[segments]
    return eligible & (rank < sizes[segments])


def _canonical_index(tokens: Tensor, where: Tensor) -> Tensor:
    """int64 [T]: index among the twenty canonical residues; 0 outside `where`."""
    return torch.where(where, tokens.long() - CANONICAL_START, 0)


def check_loss(loss: str, time_sampling: str) -> tuple[str, str]:
    """Both arguments as they are; raises `ConfigError` unless they are known and go together."""
    require_choice("paradigm.loss", loss, LOSSES)
    require_choice("paradigm.time_sampling", time_sampling, TIME_SAMPLINGS)
    require(
        loss == "elbo" or time_sampling == "uniform",
        "paradigm.time_sampling",
        time_sampling,
        "'uniform' with paradigm.loss='mean', which has no weights to divide",
    )
    return loss, time_sampling
