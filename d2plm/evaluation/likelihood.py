"""The likelihood bound of a model on held-out proteins, with its interval, and the MLM-15 figure.

Masks are keyed by the sequence's index alone, so every model that is compared sees the same ones;
intervals come from resampling homology clusters, not residues. Everything is summed in float64.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import bootstrap

from d2plm.batch import PackedBatch, segment_sum
from d2plm.data.loader import pack_all
from d2plm.errors import ModelError, require_number
from d2plm.noise import Key
from d2plm.paradigms.base import Denoiser, Paradigm
from d2plm.paradigms.masked import random_subsets

MASKING_VERSION = 1  # raise when the masks of a seed change
MLM_FRACTION = 0.15
RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class SequenceScores:
    """What one model gave each of N sequences.

    Attributes:
        nats: float64 [N], estimate of the NELBO of the canonical residues.
        residues: int64 [N], canonical residues scored.
        mlm_nats: float64 [N], summed cross-entropy at the 15 % masked.
        mlm_residues: int64 [N], how many these were.
        masks_digest: of everything that the masks are a function of.
    """

    nats: NDArray[np.float64]
    residues: NDArray[np.int64]
    mlm_nats: NDArray[np.float64]
    mlm_residues: NDArray[np.int64]
    masks_digest: str


@dataclass(frozen=True)
class Estimate:
    """A corpus-level figure and its 95 % bootstrap interval over clusters."""

    value: float
    low: float
    high: float

    def exp(self) -> "Estimate":
        """The same in perplexity."""
        return Estimate(*(float(np.exp(x)) for x in (self.value, self.low, self.high)))


def score_sequences(
    model: Denoiser,
    paradigm: Paradigm,
    sequences: Sequence[NDArray[np.uint8]],
    *,
    masks_per_sequence: int = 16,
    max_length: int = 1024,
    seed: int = 0,
    token_budget: int = 16384,
    device: torch.device | str = "cpu",
    unigram: NDArray[np.float64] | None = None,
    data_digest: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SequenceScores:
    """Bound and MLM-15 cross-entropy of each sequence's first `max_length` − 2 residues.

    Args:
        model: packed tokens → logits, in evaluation mode.
        sequences: uint8 residue tokens, without special tokens.
        masks_per_sequence: exact-k masks of each sequence, k stratified over them.
        max_length: tokens with `<cls>` and `<eos>`.
        seed: of the masks.
        token_budget: tokens of one forward pass.
        unigram: float64 [20], frequencies for the control variate (lower variance, no bias).
        data_digest: of the sequences, recorded in the masks' digest.
        progress: called with (forward passes done, their total).

    Raises:
        ConfigError: on a value out of range.
        ModelError: if the model gives a NaN or infinite score.
    """
    require_number("evaluation.masks_per_sequence", masks_per_sequence, integer=True, low=1)
    batches = pack_all(sequences, token_budget, max_length)
    control = None if unigram is None else torch.from_numpy(-np.log(unigram)).to(device)
    nats = torch.zeros(len(sequences), dtype=torch.float64)
    mlm_nats, residues, mlm_residues = (torch.zeros_like(nats) for _ in range(3))
    total, done = len(batches) * (masks_per_sequence + 1), 0
    with torch.inference_mode():
        for host_batch in batches:
            batch = host_batch.to(device)
            ids = host_batch.sequence_ids[host_batch.real()]
            estimate = torch.zeros(batch.num_segments, dtype=torch.float64, device=device)
            for draw in range(masks_per_sequence):
                estimate += paradigm.bound(
                    model,
                    batch,
                    Key(seed),
                    draw=draw,
                    draws=masks_per_sequence,
                    control=control,
                ).nats
                progress(done := done + 1, total)
            cross_entropy, masked, length = _mlm(model, paradigm, batch, seed)
            progress(done := done + 1, total)
            for store, values in (
                (nats, estimate / masks_per_sequence),
                (mlm_nats, cross_entropy),
                (mlm_residues, masked),
                (residues, length),
            ):
                store[ids] = values.cpu()[: len(ids)]
    if not torch.isfinite(nats).all():
        first = int((~torch.isfinite(nats)).nonzero()[0, 0])
        raise ModelError(f"the model's score of sequence {first} is not finite: it has diverged")
    return SequenceScores(
        nats=nats.numpy(),
        residues=residues.long().numpy(),
        mlm_nats=mlm_nats.numpy(),
        mlm_residues=mlm_residues.long().numpy(),
        masks_digest=_masks_digest(seed, masks_per_sequence, max_length, data_digest),
    )


def _mlm(
    model: Denoiser, paradigm: Paradigm, batch: PackedBatch, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(cross-entropy, masked residues, residues) of each segment with 15 % masked."""
    segments, maskable = batch.segment_ids(), paradigm.maskable(batch)
    length = segment_sum(maskable.double(), segments, batch.num_segments)
    count = (MLM_FRACTION * length).round().clamp(min=1).clamp(max=length)
    masked = random_subsets(batch, maskable, count, Key(seed).stream("mlm"), segments)
    fraction = count / length.clamp(min=1)
    nats = paradigm.cross_entropy(model, batch, masked, fraction)
    return segment_sum(nats, segments, batch.num_segments), count, length


def corpus_estimate(
    nats: NDArray[np.float64], residues: NDArray[np.int64], clusters: NDArray[np.integer]
) -> Estimate:
    """ΣΝats / Σresidues with its bootstrap interval over clusters.

    Give a difference of two models' nats for the paired comparison.

    Args:
        nats: float64 [N].
        residues: integer [N].
        clusters: integer [N], the homology cluster of each sequence.
    """
    _, members = np.unique(clusters, return_inverse=True)
    cluster_nats = np.bincount(members, weights=nats)
    cluster_residues = np.bincount(members, weights=residues)
    value = float(cluster_nats.sum() / cluster_residues.sum())
    if len(cluster_nats) < 2:
        return Estimate(value, float("nan"), float("nan"))
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
    return Estimate(value, float(interval.low), float(interval.high))


def _masks_digest(seed: int, masks: int, max_length: int, data_digest: str) -> str:
    plan = {
        "version": MASKING_VERSION,
        "seed": seed,
        "masks_per_sequence": masks,
        "max_length": max_length,
        "data": data_digest,
    }
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
