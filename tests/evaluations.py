"""Artificial models and scores from which tests build evaluations."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2plm.core.batch import segment_ids, segment_sum
from d2plm.core.estimate import Estimate
from d2plm.evaluation.likelihood import FRACTION_BINS, CrossEntropy, SequenceScores
from d2plm.evaluation.result import Bound, Compared, Evaluation, GivenRelatives, RelativesBelow
from d2plm.evaluation.summary import HeldOut, summarise
from d2plm.generation.lengths import LengthHistogram

NGRAMS = ("unigram", "2-gram", "3-gram", "4-gram", "5-gram")
BASELINES = ("uniform", *NGRAMS, "composition", *(f"composition × {name}" for name in NGRAMS))


def context_model(tokens: Tensor, cu_seqlens: Tensor, _max: int, times: Tensor) -> Tensor:
    """Logits from each token, the sum of its own sequence and the time: exact in any batch."""
    segments = segment_ids(cu_seqlens, tokens.shape[0])
    total = segment_sum(tokens.long(), segments, cu_seqlens.shape[0] - 1)[segments]
    letters = torch.arange(33)
    phase = (total + 3 * tokens.long())[:, None] * (letters + 1) % 17
    return phase.double() / 8 + times[segments][:, None] * (letters % 3)


def uniform_model(tokens: Tensor, _cu: Tensor, _max: int, _times: Tensor) -> Tensor:
    """Equal logits."""
    return torch.zeros(len(tokens), 33, dtype=torch.float64)


def invented_scores(
    residues: NDArray[np.int64],
    per_residue: float,
    seed: int = 0,
    *,
    noise: float = 0.01,
    masked: bool = True,
) -> SequenceScores:
    """Scores of sequences of `residues` [N], around `per_residue` nats."""
    random, count = np.random.default_rng(seed), len(residues)
    draws = residues[:, None] * (per_residue + random.normal(0, noise, (count, 4)))
    by_fraction = random.uniform(1, 2, (count, FRACTION_BINS))
    mlm15 = CrossEntropy(0.15 * residues * per_residue, np.ceil(0.15 * residues).astype(int))
    return SequenceScores(
        draws=draws,
        residues=residues,
        mlm15=mlm15 if masked else None,
        calibration=CrossEntropy(by_fraction * 2.9, by_fraction),
        estimator="exact-k bound" if masked else "time-reversal bound",
        masks_digest="masks",
    )


def invented_baselines(residues: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Nats [N] of each baseline, the last the best."""
    return {name: residues * (2.95 - 0.01 * place) for place, name in enumerate(BASELINES)}


def summary(
    scores: SequenceScores, proteins: HeldOut, others: Any = None, **named: Any
) -> Evaluation:
    """Without quality and settings, unless they are named."""
    lengths = LengthHistogram.of(scores.residues, 400)
    given = {"quality": None, "settings": {}, "digests": {}, **named}
    return summarise(scores, others or {}, proteins, lengths, **given)


def invented_bound(nats: float, difference: float | None = None) -> Bound:
    """A bound with an interval of ±0.1 nats; with a difference, that of another model."""
    nelbo = Estimate(nats, (nats - 0.1, nats + 0.1))
    if difference is None:
        return Bound(nelbo, nelbo.exp())
    ends = sorted((difference / 2, 2 * difference))
    return Compared(nelbo, nelbo.exp(), difference=Estimate(difference, (ends[0], ends[1])))


def invented_given_relatives() -> GivenRelatives:
    """What an evaluation given relatives found, of a model that is better the nearer they are."""

    def row(identity: float, nats: float) -> RelativesBelow:
        baselines: Any = {
            "profile HMMs": invented_bound(nats + 0.4, -0.4),
            "HMM of their alignment": invented_bound(nats + 0.3, -0.3),
        }
        return RelativesBelow(identity, int(20 * identity), invented_bound(nats), baselines)

    unrelated: Any = invented_bound(2.86, 0.01)
    below = [row(0.9, 1.6), row(0.5, 2.5)]
    return GivenRelatives(8, 24, invented_bound(2.85), below, unrelated, 9e-8)


def invented_evaluation(model: float, baselines: Mapping[str, float], **others: Any) -> Evaluation:
    """An evaluation of a model and baselines of these perplexities, with other attributes."""
    nats = math.log(model)
    compared: dict[str, Any] = {
        name: invented_bound(math.log(other), nats - math.log(other))
        for name, other in baselines.items()
    }
    evaluation = Evaluation(
        estimator="exact-k bound",
        interval="95 % bootstrap over homology clusters",
        sequences=200,
        residues=20_000,
        clusters=100,
        model=invented_bound(nats),
        length_nats=5.0,
        baselines=compared,
        others={},
        by_identity=None,
        calibration={},
        given_relatives=None,
        quality=None,
        settings={},
        digests={},
        masking_version=1,
    )
    return replace(evaluation, **others)
