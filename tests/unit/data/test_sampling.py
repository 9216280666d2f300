"""Draws: shares of a mixture, passes that continue over epochs, one new member per cluster."""

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import chisquare

from d2plm.core.errors import ConfigError, DataError
from d2plm.data.sampling import Draws, Part

SEEDS = st.integers(0, 2**40)


def labels(*clusters: int) -> np.ndarray:
    return np.array(clusters, dtype=np.int32)


def by_part(drawn: np.ndarray, sizes: list[int]) -> list[list[int]]:
    """The members that were drawn of each part, numbered from 0 in each."""
    firsts = np.cumsum([0, *sizes])
    which = np.searchsorted(firsts, drawn, side="right") - 1
    return [(drawn[which == part] - firsts[part]).tolist() for part in range(len(sizes))]


@given(
    parts=st.lists(st.tuples(st.integers(10, 60), st.integers(1, 20)), min_size=1, max_size=4),
    scale=st.sampled_from([0.01, 1, 7]),
    epochs=st.integers(1, 6),
)
def test_shares_are_the_weights(parts: list[tuple[int, int]], scale: float, epochs: int) -> None:
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    try:
        draws = Draws([Part(size, weight=scale * weight) for size, weight in parts], 0)
    except ConfigError:
        smallest = Fraction(min(weights), sum(weights))
        assert smallest * sum(sizes) < 1.5  # less than a draw, give or take the rounding
        return
    for epoch in range(epochs):
        drawn = draws.epoch(epoch)
        assert len(drawn) == sum(sizes)
        for weight, members in zip(weights, by_part(drawn, sizes), strict=True):
            assert abs(len(members) - Fraction(weight, sum(weights)) * sum(sizes)) <= 1


@given(
    sizes=st.lists(st.integers(5, 40), min_size=2, max_size=3),
    weights=st.tuples(*[st.sampled_from([0.2, 0.5, 1.0, 3.0])] * 3),
    clustered=st.tuples(*[st.booleans()] * 3),
    epochs=st.integers(1, 8),
)
def test_over_epochs_no_member_or_cluster_comes_again_before_all_came_as_often(
    sizes: list[int], weights: tuple[float, ...], clustered: tuple[bool, ...], epochs: int
) -> None:
    own = [np.arange(size) // (1 + pairs) for size, pairs in zip(sizes, clustered, strict=False)]
    numbers, shares = [int(one[-1]) + 1 for one in own], weights[: len(sizes)]
    assume(min(shares) / sum(shares) * sum(numbers) >= 1)  # a share below one draw is rejected
    parts = [
        Part(len(one), labels(*one) if number < len(one) else None, weight)
        for one, number, weight in zip(own, numbers, shares, strict=True)
    ]
    draws, counts = Draws(parts, 3), [Counter[int]() for _ in parts]
    for epoch in range(epochs):
        for part, members in enumerate(by_part(draws.epoch(epoch), sizes)):
            assert abs(len(members) - shares[part] / sum(shares) * sum(numbers)) <= 1
            counts[part].update(own[part][members].tolist())
    for counter, number in zip(counts, numbers, strict=True):
        often = [counter[member] for member in range(number)]
        assert max(often) - min(often) <= 1


def test_parts_of_the_same_size_do_not_give_the_same_members() -> None:
    parts = [Part(200, weight=1), Part(200, weight=1), Part(10, weight=2)]
    drawn = Draws(parts, 0).epoch(0)
    for quarter in np.array_split(drawn, 4):  # shuffled into one another
        assert 12 < np.count_nonzero(quarter < 200) < 40
    first, second, _ = by_part(drawn, [200, 200, 10])
    assert len(set(first)) == pytest.approx(102, abs=1)
    assert len({*first} & {*second}) == pytest.approx(102 / 2, abs=15)


@given(
    clusters=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 5), min_size=1),
    seed=SEEDS,
    epoch=st.integers(0, 50),
)
def test_an_epoch_draws_one_of_each_cluster(clusters: list[int], seed: int, epoch: int) -> None:
    drawn = Draws([Part(len(clusters), labels(*clusters))], seed).epoch(epoch)
    assert sorted(clusters[member] for member in drawn) == sorted(set(clusters))


def test_members_of_a_cluster_are_drawn_with_equal_chances_and_fresh_each_epoch() -> None:
    clusters = labels(7, 3, 7, 9, 3, 7, 7, 7)  # 5, 2 and 1 members, in no order
    draws = Draws([Part(len(clusters), clusters)], 0)
    epochs = [draws.epoch(epoch).tolist() for epoch in range(3000)]
    for label in (3, 7, 9):
        members = np.flatnonzero(clusters == label).tolist()
        chosen = [next(i for i in drawn if clusters[i] == label) for drawn in epochs]
        counts = [chosen.count(member) for member in members]
        assert sum(counts) == len(epochs)
        if len(members) > 1:
            assert chisquare(counts).pvalue > 1e-3
            # Consecutive epochs agree as often as independent draws do.
            agreeing = sum(a == b for a, b in zip(chosen, chosen[1:], strict=False))
            expected = (len(chosen) - 1) / len(members)
            assert agreeing == pytest.approx(expected, abs=4 * expected**0.5)


@pytest.mark.parametrize("weight", [0, float("nan"), float("inf"), "1", True, None, 0.001])
def test_a_weight_that_gives_no_draw_or_is_no_number_is_rejected(weight: Any) -> None:
    with pytest.raises(ConfigError, match="weight"):
        Draws([Part(5, weight=1.0), Part(5, weight=weight)], 0)
    with pytest.raises(DataError, match="no sequences"):
        Draws([Part(5), Part(0)], 0)
