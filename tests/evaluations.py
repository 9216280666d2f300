"""Invented scores, of which tests make evaluations."""

import numpy as np
from numpy.typing import NDArray

from d2plm.evaluation.likelihood import FRACTION_BINS, CrossEntropy, SequenceScores

NGRAMS = ("unigram", "2-gram", "3-gram", "4-gram", "5-gram")
BASELINES = ("uniform", *NGRAMS, "composition", *(f"composition × {name}" for name in NGRAMS))


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
