"""Paradigms with an absorbing source: corruption, loss, the exact-k bound and sampling steps.

Each residue is masked independently, with a probability that grows towards the prior; paradigms
differ in their time axis, in the weight of each time, and in their samplers. An unmasked residue
keeps probability one on itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from d2plm.core.batch import PackedBatch, segment_sum
from d2plm.core.noise import Key, uniform
from d2plm.paradigms.paradigm import Corrupted, Denoiser, Paradigm, Step, denoise, target_index

SUM_MARGIN = 1e-5  # the probabilities of an fp32 softmax add up to 1 within less than this


class MaskedParadigm(Paradigm):
    """A paradigm that corrupts residues by masking them.

    Attributes:
        loss_kind: `elbo` weights the cross-entropy of a masked residue by |du/dt|/u, with u the
            corrupted fraction, so that the loss per maskable residue is a bound: T·(ᾱ_{t−1} −
            ᾱ_t)/(1 − ᾱ_t) for T steps, κ̇_t/(1 − κ_t) for a flow. `mean` is the mean over the
            masked residues.
        shift: predict the residue at i from the hidden state at i − 1.
    """

    source = "mask"
    estimator = "exact-k bound"
    shift: bool = False

    def time_weights(self, rates: Tensor, fraction: Tensor) -> Tensor:
        return rates / fraction.clamp(min=torch.finfo(fraction.dtype).tiny)

    def position_nats(
        self, log_p: Tensor, batch: PackedBatch, corrupted: Corrupted, places: Tensor | slice
    ) -> Tensor:
        return F.nll_loss(log_p, corrupted.targets[places], reduction="none")

    def logit_places(self, places: Tensor) -> Tensor:
        return places - 1 if self.shift else places

    def maskable(self, batch: PackedBatch) -> Tensor:
        maskable = super().maskable(batch)
        return maskable & (batch.positions() > 0) if self.shift else maskable

    def log_probabilities(self, logits: Tensor) -> Tensor:
        return super().log_probabilities(logits.roll(1, dims=0) if self.shift else logits)

    def masked_log_probabilities(
        self, model: Denoiser, batch: PackedBatch, masked: Tensor, fraction: Tensor
    ) -> Tensor:
        """log p(residue | the unmasked residues) [T, K], with the `masked` tokens hidden.

        Args:
            masked: bool [T], a subset of the maskable residues.
            fraction: float64 [S], the masked fraction of each sequence, which determines its time.
        """
        times = self.time_at_corrupted_fraction(fraction).float()
        tokens = batch.computable().masked_fill(masked, self.vocabulary.mask)
        return self.log_probabilities(denoise(model, batch, tokens, times))

    def bound_noise(
        self, batch: PackedBatch, key: Key, draw: int, draws: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The exact-k bound: k masks, k stratified over the draws.

        NELBO(x) = Σ_k (1/k)·E_{|M|=k} Σ_{i∈M} −log p(x_i | x_{¬M}), the order-agnostic
        autoregressive bound (Hoogeboom et al., arXiv:2110.02037, eq. 4), estimated with k drawn
        from {1..L} and the weight L/k: no singularity and no empty mask.
        """
        segments, maskable = batch.segment_ids(), self.maskable(batch)
        length = segment_sum(maskable.double(), segments, batch.num_segments)
        shared = uniform(key.stream("mask_count"), batch.draw_ids)
        masked_count = (length * (shared + draw) / draws).floor() + 1
        masked_count = masked_count.clamp(max=length)
        masked = random_subsets(
            batch, maskable, masked_count, key.stream(f"bound {draw}"), segments
        )
        tokens = batch.computable().masked_fill(masked, self.vocabulary.mask)
        return tokens, masked_count / length.clamp(min=1), length / masked_count.clamp(min=1)

    def bound_terms(
        self, log_p: Tensor, batch: PackedBatch, tokens: Tensor, fraction: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        masked = tokens != batch.computable()
        nats = cross_entropy(log_p, batch, masked)
        return nats, nats, masked

    def prior_tokens(self, key: Key, *indices: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.full_like(indices[0], self.vocabulary.mask, dtype=dtype)

    def transition(self, log_p: Tensor, tokens: Tensor, step: Step) -> Tensor:
        """Masks are filled from `log_p` and shown residues masked, see `step_probabilities`."""
        fill, remask = step_probabilities(step)
        filled = F.pad(fill * log_p.exp(), (1, 0), value=1 - fill)
        shown = torch.zeros_like(filled)
        shown[:, 0] = remask
        masked = tokens == self.vocabulary.mask
        shown.scatter_(-1, target_index(tokens, ~masked)[:, None] + 1, 1 - remask)
        return torch.where(masked[:, None], filled, shown)

    def may_change(self, tokens: Tensor, draws: Tensor, step: Step) -> Tensor:
        # The draw alone decides whether a mask is filled or a residue masked: `categorical` returns
        # the mask, which comes first in a distribution, for draws below its probability.
        fill, remask = step_probabilities(step)
        highest, lowest = draws * (1 + SUM_MARGIN), draws * (1 - SUM_MARGIN)
        return torch.where(tokens == self.vocabulary.mask, highest >= 1 - fill, lowest < remask)


def cross_entropy(log_p: Tensor, batch: PackedBatch, masked: Tensor) -> Tensor:
    """float64 [T]: −log p of each `masked` residue under `log_p` [T, K]; 0 elsewhere."""
    targets = target_index(batch.tokens, masked)
    return torch.where(masked, F.nll_loss(log_p, targets, reduction="none").double(), 0.0)


def step_probabilities(step: Step) -> tuple[float, float]:
    """The probabilities that a mask is filled, and that a shown residue is masked, in a step.

    The latter is σ = min(`step.renoise`, `remask_limit`), the former (kept_s − (1 − σ)·kept_t)/(1 −
    kept_t), so that a residue is shown with probability (1 − σ)·kept_t + fill·(1 − kept_t) = kept_s
    for every σ: the marginals are those of the forward process (Wang et al., arXiv:2503.00307, sec.
    3). With σ = 0 it is the posterior's (ᾱ_s − ᾱ_t)/(1 − ᾱ_t), which is a flow's velocity
    integrated over the step.
    """
    now, then = step.now, step.then
    remask = min(step.renoise, remask_limit(now, then))
    return (min((then - (1 - remask) * now) / (1 - now), 1.0) if now < 1 else 1.0), remask


def remask_limit(now: float, then: float) -> float:
    """min(1, (1 − kept_s)/kept_t), above which a mask would be filled with probability above 1."""
    return min(1.0, (1 - then) / now) if now > 0 else 1.0


def random_subsets(
    batch: PackedBatch, eligible: Tensor, sizes: Tensor, key: Key, segments: Tensor
) -> Tensor:
    """bool [T]: a uniformly random subset of `sizes[s]` eligible tokens of each segment s."""
    draws = uniform(key, batch.draw_ids[segments], batch.positions())
    draws = torch.where(eligible, draws, 1.0)
    return eligible & (rank_in_segment(draws, batch.cu_seqlens, segments) < sizes[segments])


def rank_in_segment(values: Tensor, cu_seqlens: Tensor, segments: Tensor) -> Tensor:
    """int64 [T]: the rank, from 0, of each of `values` [T] in [0, 1] within its segment."""
    by_segment = torch.argsort(segments.double() * 2 + values.double(), stable=True)
    rank = torch.empty_like(segments)
    rank[by_segment] = torch.arange(values.shape[0], device=segments.device)
    return rank - cu_seqlens[segments]
