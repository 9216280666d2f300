"""Artificial scores from which tests build evaluations."""

from typing import Any

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


def invented_given_relatives() -> dict[str, Any]:
    """What an evaluation given relatives found, of a model that is better the nearer they are."""

    def figures(nats: float) -> dict[str, Any]:
        ends = [float(np.exp(nats - 0.1)), float(np.exp(nats + 0.1))]
        return {"nelbo": nats, "perplexity": float(np.exp(nats)), "perplexity_interval": ends}

    def row(identity: float, nats: float) -> dict[str, Any]:
        baselines = {"profile HMMs": nats + 0.4, "HMM of their alignment": nats + 0.3}
        paired = {
            name: {"nelbo_difference": nats - other, "interval": [nats - other - 0.1, -0.1]}
            for name, other in {**baselines, "alone": 2.85}.items()
        }
        of_baselines = {name: figures(other) for name, other in baselines.items()}
        shown = {"with_relatives": int(20 * identity), "model": figures(nats), **of_baselines}
        return {"identity": identity, **shown, "paired": paired}

    change = {"nelbo_difference": 0.01, "interval": [0.005, 0.015]}
    return {
        "choice": {"identities": [0.9, 0.5], "most": 8, "masks_per_sequence": 2, "proteins": 24},
        "alone": figures(2.85),
        "below": [row(0.9, 1.6), row(0.5, 2.5)],
        "controls": {
            "unrelated": {"model": figures(2.86), "paired": {"alone": change}},
            "order": {"sequences": 5, "largest_difference": 9e-8},
        },
    }
