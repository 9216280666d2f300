"""Spearman's rank correlation of scores with measured effects, with its interval.

Variants of the same positions are resampled together because their scores and effects are
correlated; an interval over single variants, such as Fisher's transformation, is too narrow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.number_text import counted
from d2plm.evaluation.likelihood import CONFIDENCE, RESAMPLES
from d2plm.families.variants import Variant

BATCH_RANKS = 4_000_000  # maximum number of ranks in memory
MIN_VALUES, MIN_POSITIONS = 3, 10  # minimum distinct measurements; position sets for an interval


@dataclass(frozen=True, slots=True)
class RankCorrelation:
    """Spearman's rho over a number of measured variants, with its 95 % interval.

    NaN if there are too few distinct values, or too few positions for an interval.
    """

    variants: int
    rho: float = math.nan
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        measured = f"({counted(self.variants, 'measured variant')})"
        if math.isnan(self.rho):
            return f"no rank correlation, too few different values {measured}"
        interval = "" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"Spearman's rho {self.rho:.3f}{interval} {measured}"


def rank_correlation(
    scores: NDArray[np.float64], measured: NDArray[np.float64], variants: Sequence[Variant]
) -> RankCorrelation:
    """Spearman's rho of scores float64 [N] and measured effects [N], ignoring NaN.

    The interval is a percentile bootstrap over the sets of positions that variants change, with the
    same resamples in every call with the same variants.
    """
    known = np.flatnonzero(np.isfinite(measured))
    scores, measured = scores[known], measured[known]
    if len(np.unique(measured)) < MIN_VALUES or len(np.unique(scores)) < 2:
        return RankCorrelation(len(known))
    numbers: dict[tuple[int, ...], int] = {}
    sites = [numbers.setdefault(variants[i].positions, len(numbers)) for i in known.tolist()]
    every = np.ones((1, len(known)))
    rho = float(_weighted_spearman(scores, measured, every)[0])
    if len(numbers) < MIN_POSITIONS:
        return RankCorrelation(len(known), rho)
    random, count, resampled = np.random.default_rng(0), len(numbers), []
    batch = max(1, BATCH_RANKS // len(known))
    for done in range(0, RESAMPLES, batch):
        size = min(batch, RESAMPLES - done)
        times = random.multinomial(count, np.full(count, 1 / count), size)
        resampled.append(_weighted_spearman(scores, measured, times[:, sites]))
    tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.nanquantile(np.concatenate(resampled), tails).tolist()
    return RankCorrelation(len(known), rho, low, high)


def _weighted_spearman(
    first: NDArray[np.float64], second: NDArray[np.float64], times: NDArray[Any]
) -> NDArray[np.float64]:
    """float64 [B]: Spearman's rho of pairs [N], each repeated `times` [B, N]; NaN if constant."""
    a, b = (_centred_ranks(values, times) for values in (first, second))
    product, squares = (times * a * b).sum(1), (times * a * a).sum(1) * (times * b * b).sum(1)
    with np.errstate(invalid="ignore"):
        return product / np.sqrt(squares)


def _centred_ranks(values: NDArray[np.float64], times: NDArray[Any]) -> NDArray[np.float64]:
    """float64 [B, N]: the rank of each value minus the mean; equal values share a rank."""
    order = np.argsort(values, kind="stable")
    first = np.flatnonzero(np.diff(values[order], prepend=-np.inf))
    of_value = np.add.reduceat(times[:, order].astype(float), first, axis=1)
    ranks = of_value.cumsum(1) - of_value / 2
    centred = np.empty(times.shape)
    centred[:, order] = np.repeat(ranks, np.diff(first, append=len(values)), axis=1)
    return centred - times.sum(1, keepdims=True) / 2
