"""The likelihood bound of a model on held-out proteins, with its interval, and the MLM-15 figure.

Draws are keyed by the sequence's index only, so all models see the same masks. Intervals resample
homology clusters, not residues. All sums are in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from d2plm.core.batch import PackedBatch, segment_sum
from d2plm.core.errors import ModelError, require_number
from d2plm.core.estimate import Estimate
from d2plm.core.noise import Key
from d2plm.core.vocabulary import Tokens
from d2plm.data.cache import digest_of
from d2plm.data.loader import pack_all
from d2plm.evaluation.result import Bound, Compared
from d2plm.paradigms.masked import MaskedParadigm, cross_entropy, random_subsets
from d2plm.paradigms.paradigm import BoundDraw, Denoiser, Paradigm

MASKING_VERSION = 1  # increment if the masks of a seed change
MLM_FRACTION = 0.15
FRACTION_BINS = 10  # bins of equal width in the calibration curve
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of N sequences, optionally in B bins of their draws.

    Attributes:
        nats: float64 [N] or [N, B], summed over the predicted residues.
        residues: int64 [N] or float64 [N, B], number of predicted residues.
    """

    nats: NDArray[np.float64]
    residues: NDArray[Any]

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nats.sum() / self.residues.sum()))


@dataclass(frozen=True)
class SequenceScores:
    """One model's scores of N sequences.

    Attributes:
        draws: float64 [N, D], each draw's estimate of the NELBO of the predicted residues.
        residues: int64 [N], number of residues scored.
        mlm15: with 15 % of the residues masked; None if not requested, or for a paradigm without
            masks.
        calibration: over all draws, by corrupted fraction in FRACTION_BINS equally wide bins.
        estimator: name of the bound's estimator.
        masks_digest: digest of everything that determines the draws.
    """

    draws: NDArray[np.float64]
    residues: NDArray[np.int64]
    mlm15: CrossEntropy | None
    calibration: CrossEntropy
    estimator: str
    masks_digest: str

    @property
    def nats(self) -> NDArray[np.float64]:
        """float64 [N]: estimate of the NELBO, the mean over the draws."""
        return self.draws.mean(axis=1)


def score_sequences(
    model: Denoiser,
    paradigm: Paradigm,
    sequences: Sequence[Tokens],
    *,
    masks_per_sequence: int = 16,
    max_length: int = 1024,
    seed: int = 0,
    token_budget: int = 16384,
    device: torch.device | str = "cpu",
    unigram: NDArray[np.float64] | None = None,
    data_digest: str = "",
    relatives: Sequence[Sequence[NDArray[np.uint8]]] | None = None,
    with_mlm15: bool = True,
    rank: int = 0,
    world_size: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SequenceScores:
    """Bound and MLM-15 cross-entropy of each sequence's first `max_length` − 2 residues.

    Args:
        model: packed tokens → logits, in evaluation mode.
        sequences: tokens of the paradigm's vocabulary, without special tokens.
        masks_per_sequence: stratified draws of the bound per sequence: exact-k masks, or noise
            levels of a uniform source.
        max_length: in tokens, including `<cls>` and `<eos>`.
        token_budget: tokens per forward pass; at most `pass_tokens` for a large vocabulary.
        unigram: float64 [K], frequencies for the control variate (lower variance, no bias).
        data_digest: recorded in the masks' digest.
        relatives: relatives of each sequence, for a model that takes them; the bound is then
            on −log p(sequence | its relatives).
        with_mlm15: compute the MLM-15 cross-entropy, with one more forward pass.
        rank, world_size: score only every `world_size`-th batch; the figures of other sequences
            stay 0. All ranks make the same number of passes, as a sharded model requires.
        progress: called with (forward passes done, their total).

    Raises:
        ConfigError: if a value is out of range.
        ModelError: if a score is NaN or infinite.
    """
    require_number("masks_per_sequence", masks_per_sequence, integer=True, low=1)
    batches = pack_all(sequences, paradigm.pass_tokens(token_budget), max_length, relatives)
    control = None if unigram is None else torch.from_numpy(-np.log(unigram)).to(device)
    masked = paradigm if with_mlm15 and isinstance(paradigm, MaskedParadigm) else None
    count = len(sequences)
    scores = SequenceScores(
        draws=np.zeros((count, masks_per_sequence)),
        residues=np.zeros(count, dtype=np.int64),
        mlm15=None if masked is None else CrossEntropy(np.zeros(count), np.zeros(count, int)),
        calibration=CrossEntropy(*np.zeros((2, count, FRACTION_BINS))),
        estimator=paradigm.estimator,
        masks_digest=digest_of(
            {
                "version": MASKING_VERSION,
                "estimator": paradigm.estimator,
                "seed": seed,
                "masks_per_sequence": masks_per_sequence,
                "max_length": max_length,
                "data": data_digest,
            }
        ),
    )
    rounds = -(-len(batches) // world_size)
    total, done = rounds * (masks_per_sequence + (masked is not None)), 0
    # Not inference_mode: parameters that a sharded model gathers in it could not be trained later.
    with torch.no_grad():
        for first in range(0, len(batches), world_size):
            # A rank without a batch repeats the last one: all ranks make the same passes.
            own = first + rank < len(batches)
            host_batch = batches[first + rank if own else -1]
            batch = host_batch.to(device)
            ids = host_batch.sequence_ids[host_batch.real()].numpy()[: None if own else 0]
            for draw in range(masks_per_sequence):
                bound = paradigm.bound(
                    model, batch, Key(seed), draw=draw, draws=masks_per_sequence, control=control
                )
                _add_draw(scores, ids, draw, bound)
                progress(done := done + 1, total)
            length = segment_sum(
                paradigm.maskable(batch).double(), batch.segment_ids(), batch.num_segments
            )
            scores.residues[ids] = _on_host(length, ids)
            if masked is not None and scores.mlm15 is not None:
                nats, hidden = _mlm15(model, masked, batch, length, seed)
                scores.mlm15.nats[ids] = _on_host(nats, ids)
                scores.mlm15.residues[ids] = _on_host(hidden, ids)
                _require_finite(scores.mlm15.nats[ids], ids, "cross-entropy with 15 % masked")
                progress(done := done + 1, total)
    return scores


def _add_draw(scores: SequenceScores, ids: NDArray[np.int64], draw: int, bound: BoundDraw) -> None:
    """Record a draw of the sequences `ids`, the first segments of a batch."""
    scores.draws[ids, draw] = _on_host(bound.nats, ids)
    _require_finite(scores.draws[ids, draw], ids, f"bound (draw {draw + 1})")
    # Bin b holds the fractions in (b/B, (b + 1)/B], so that 1 is in the last bin.
    fraction = _on_host(bound.fraction, ids)
    bins = np.clip(np.ceil(fraction * FRACTION_BINS) - 1, 0, None).astype(np.int64)
    scores.calibration.nats[ids, bins] += _on_host(bound.cross_entropy, ids)
    scores.calibration.residues[ids, bins] += _on_host(bound.predicted, ids)


def _on_host(values: torch.Tensor, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    return values[: len(ids)].cpu().numpy()


def _require_finite(values: NDArray[np.float64], ids: NDArray[np.int64], quantity: str) -> None:
    wrong = ids[~np.isfinite(values)]
    if len(wrong):
        raise ModelError(
            f"the model's {quantity} of sequence {wrong[0]} is not finite: it has diverged"
        )


def _mlm15(
    model: Denoiser, paradigm: MaskedParadigm, batch: PackedBatch, length: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy, number of masked residues) of each segment, with 15 % of `length` masked."""
    segments = batch.segment_ids()
    count = (MLM_FRACTION * length).round().clamp(min=1).clamp(max=length)
    masked = random_subsets(
        batch, paradigm.maskable(batch), count, Key(seed).stream("mlm"), segments
    )
    fraction = count / length.clamp(min=1)
    log_p = paradigm.masked_log_probabilities(model, batch, masked, fraction)
    nats = cross_entropy(log_p, batch, masked)
    return segment_sum(nats, segments, batch.num_segments), count


def corpus_estimate(
    nats: NDArray[np.float64], residues: NDArray[Any], clusters: NDArray[np.integer]
) -> Estimate:
    """ΣΝats / Σresidues with its bootstrap interval over clusters.

    For a paired comparison, pass the difference of two models' nats.

    Args:
        nats: float64 [N].
        residues: [N], number of residues per sequence.
        clusters: integer [N], the homology cluster of each sequence.
    """
    _, members = np.unique(clusters, return_inverse=True)
    cluster_nats = np.bincount(members, weights=nats)
    cluster_residues = np.bincount(members, weights=residues)
    value = float(cluster_nats.sum() / cluster_residues.sum())
    if len(cluster_nats) < 2:
        return Estimate(value, None)
    from scipy.stats import bootstrap  # the import takes most of a second

    interval = bootstrap(
        (cluster_nats, cluster_residues),
        lambda n, r, axis: n.sum(axis) / r.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=max(1, 4_000_000 // len(cluster_nats)),
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(value, (float(interval.low), float(interval.high)))


def bound_of(
    nats: NDArray[np.float64],
    residues: NDArray[np.integer],
    clusters: NDArray[np.integer],
    units: NDArray[np.integer] | None = None,
) -> Bound:
    """The bound of N sequences, also per byte or base if `units` [N] are given.

    Other arguments as for `corpus_estimate`.
    """
    nelbo = corpus_estimate(nats, residues, clusters)
    bits = None if units is None else corpus_estimate(nats / np.log(2), units, clusters)
    return Bound(nelbo, nelbo.exp(), bits)


def compared_with(
    ours: NDArray[np.float64],
    theirs: NDArray[np.float64],
    residues: NDArray[np.integer],
    clusters: NDArray[np.integer],
    units: NDArray[np.integer] | None = None,
) -> Compared:
    """The bound of the nats `theirs` [N], with the paired difference `ours` − `theirs`."""
    difference = corpus_estimate(ours - theirs, residues, clusters)
    return Compared(**vars(bound_of(theirs, residues, clusters, units)), difference=difference)
