"""Few combinations of settings in which every pair of values occurs, in place of their product."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

SAMPLES = 4000


def covering_array(
    factors: Mapping[str, Sequence[Any]],
    is_possible: Callable[[dict[str, Any]], bool],
    cost: Callable[[dict[str, Any]], float],
    strength: int = 2,
) -> list[dict[str, Any]]:
    """Rows {factor: value} in which every possible combination of `strength` values occurs.

    The row that adds most new combinations for its cost is taken from a sample of the possible ones
    until the sample has no others; the sample is always the same.
    """
    random, names = np.random.default_rng(0), [*factors]
    drawn = [
        [int(random.integers(len(values))) for values in factors.values()] for _ in range(SAMPLES)
    ]
    levels = np.array([row for row in drawn if is_possible(_named(factors, row))])
    costs = np.array([cost(_named(factors, row)) for row in levels.tolist()])
    base = max(map(len, factors.values()))
    columns = []
    for number, chosen in enumerate(combinations(range(len(names)), strength)):
        code = np.full(len(levels), number)
        for factor in chosen:
            code = code * base + levels[:, factor]
        columns.append(code)
    codes = np.stack(columns, axis=1)
    missing = np.zeros(codes.max() + 1, dtype=bool)
    missing[codes] = True
    rows = []
    while missing.any():
        best = int((missing[codes].sum(axis=1) / costs).argmax())
        missing[codes[best]] = False
        rows.append(_named(factors, levels[best].tolist()))
    return rows


def _named(factors: Mapping[str, Sequence[Any]], levels: Sequence[int]) -> dict[str, Any]:
    return {
        name: values[level] for (name, values), level in zip(factors.items(), levels, strict=True)
    }
