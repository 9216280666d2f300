"""Spearman's rho with its interval, against SciPy and on data of a known correlation."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import bootstrap, spearmanr

from d2plm.evaluation.rank_correlation import rank_correlation
from d2plm.families.variants import Variant

Array = NDArray[np.float64]


def of_positions(positions: int, each: int = 1) -> list[Variant]:
    return [Variant((p,), (4 + i,)) for p in range(positions) for i in range(each)]


def correlated(random: np.random.Generator, count: int, r: float) -> tuple[Array, Array]:
    first, noise = random.normal(size=(2, count))
    return first, r * first + math.sqrt(1 - r * r) * noise


def test_rho_and_interval_are_scipys_where_every_variant_has_a_position_of_its_own() -> None:
    random = np.random.default_rng(0)
    scores, measured = (values.round(1) for values in correlated(random, 80, 0.6))  # with ties
    found = rank_correlation(scores, measured, of_positions(80))
    expected = bootstrap(
        (scores, measured),
        lambda x, y: spearmanr(x, y).statistic,
        paired=True,
        vectorized=False,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert found.variants == 80
    assert found.rho == pytest.approx(spearmanr(scores, measured).statistic, abs=1e-12)
    # Two independent sets of 2,000 resamples: the ends of each are known to about 0.006.
    assert found.low == pytest.approx(expected.low, abs=0.025)
    assert found.high == pytest.approx(expected.high, abs=0.025)


def test_variants_of_one_position_are_no_independent_evidence() -> None:
    scores, measured = correlated(np.random.default_rng(3), 60, 0.5)
    alone = rank_correlation(scores, measured, of_positions(60))
    copies = [np.repeat(values, 19) for values in (scores, measured)]
    together = rank_correlation(*copies, of_positions(60, each=19))
    assert together.variants == 60 * 19
    found = (together.rho, together.low, together.high)
    assert found == pytest.approx((alone.rho, alone.low, alone.high), abs=1e-9)


def test_only_measured_variants_count() -> None:
    scores, measured = np.array([1.0, 9, 2, 3, 0]), np.array([10.0, np.nan, 30, 20, 5])
    found = rank_correlation(scores, measured, of_positions(5))
    assert found.variants == 4
    assert found.rho == pytest.approx(0.8)
    (scores, measured), variants = correlated(np.random.default_rng(3), 60, 0), of_positions(20, 3)
    measured[::4] = np.nan
    known = np.flatnonzero(np.isfinite(measured))
    of_known = rank_correlation(scores[known], measured[known], [variants[i] for i in known])
    assert rank_correlation(scores, measured, variants) == of_known


def test_of_too_few_different_values_there_is_no_correlation() -> None:
    nan = math.nan
    for scores, measured in (
        ([1, 1, 1], [1, 2, 3]),
        ([1, 2, 3], [1, 2, 2]),
        ([1, 2, 3], [nan] * 3),
    ):
        found = rank_correlation(np.array(scores), np.array(measured), of_positions(3))
        assert found.variants == np.isfinite(measured).sum()
        assert math.isnan(found.rho) and math.isnan(found.low)
        assert "no rank correlation" in str(found)


@pytest.mark.parametrize(("positions", "has_interval"), [(9, False), (10, True)])
def test_of_few_positions_there_is_no_interval(positions: int, has_interval: bool) -> None:
    values = np.arange(3.0 * positions)
    found = rank_correlation(values, values, of_positions(positions, each=3))
    assert found.rho == pytest.approx(1)
    assert math.isnan(found.low) == math.isnan(found.high) == (not has_interval)
    interval = " [1.000, 1.000]" if has_interval else ""
    assert str(found) == f"Spearman's rho 1.000{interval} ({len(values)} measured variants)"
