"""The forward-backward recursions and the features of `alignment`, compiled at their first use.

They need Numba: they visit every pair of a target's and a relative's residues, and each cell
depends on its neighbours. Probabilities are scaled and in fp64; no logarithm is taken in the inner
loops. If two different alignments each score above about 660 nats, as in long tandem repeats, the
second is out of fp64's range: their probabilities are then inexact, and are scaled down if their
sum exceeds 1. `SMALLEST` keeps values above the subnormal numbers, which take a hundred times as
long.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

SMALLEST = 1e-290
RESCALED = 16  # rows between two changes of the scale
NEGLIGIBLE = 1e-6  # posterior probabilities below this are left out
_FAST = {"reassoc", "contract", "nsz", "arcp", "nnan", "ninf"}

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Letters = NDArray[np.uint8]


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile at the first call, or load the code that another process has compiled.

    The code is cached next to this file or in the user's cache folder. If neither is writable, as
    in a container, every process compiles for some seconds.
    """

    def compile_it(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(cache=True, nogil=True, **options)(function)  # type: ignore[no-any-return]
        except RuntimeError:
            return njit(nogil=True, **options)(function)  # type: ignore[no-any-return]

    return compile_it


@compiled(fastmath=_FAST, inline="always")
def _match(row: Floats, odds: Floats, before: Floats, begin: float) -> None:
    """Match states of a row, given the states that may precede them in the previous row."""
    for j in range(1, len(row)):
        row[j] = odds[j] * (before[j - 1] + begin)


@compiled(fastmath=_FAST - {"reassoc"}, inline="always")
def _delete(row: Floats, deletes: Floats, opened: float, extended: float) -> None:
    """Delete states of a row: opened · match + extended · delete of the previous column.

    In groups of four columns, so that only every fourth product waits for the previous one.
    """
    second, third = extended * extended, extended * extended * extended
    fourth, whole = second * second, len(row) - len(row) % 4
    carried = SMALLEST
    for j in range(0, whole, 4):
        one = opened * row[j] + SMALLEST
        two = extended * one + (opened * row[j + 1] + SMALLEST)
        three = extended * two + (opened * row[j + 2] + SMALLEST)
        four = extended * three + (opened * row[j + 3] + SMALLEST)
        deletes[j] = carried
        deletes[j + 1] = extended * carried + one
        deletes[j + 2] = second * carried + two
        deletes[j + 3] = third * carried + three
        carried = fourth * carried + four
    for j in range(whole, len(row)):
        deletes[j] = carried
        carried = extended * carried + (opened * row[j] + SMALLEST)


@compiled(fastmath=_FAST, inline="always")
def _carry(
    row: Floats, deletes: Floats, inserts: Floats, before: Floats, opened: float, extended: float
) -> None:
    """States that may precede the next row's matches, and its inserts."""
    close = 1 - extended
    for j in range(len(row)):
        before[j] = row[j] + close * (inserts[j] + deletes[j])
        inserts[j] = extended * inserts[j] + (opened * row[j] + SMALLEST)


@compiled(fastmath=_FAST)
def _align_pair(
    target: Letters,
    relative: Letters,
    odds: Floats,
    opened: float,
    extended: float,
    inside: float,
    out: NDArray[np.float32],
) -> None:
    """Fill the first 21 columns of `out` [L, F]; see `align`."""
    rows, columns = len(target), len(relative)
    tables = np.empty((2, 21, columns))  # for the forward and the (reversed) backward recursion
    for letter in range(21):
        for j in range(columns):
            tables[0, letter, j] = tables[1, letter, columns - 1 - j] = odds[letter, relative[j]]
    matches, scales = np.empty((2, rows, columns)), np.empty((2, rows))
    inserts, before, deletes = np.zeros((2, columns)), np.zeros((2, columns)), np.zeros(columns)
    scale, begin = np.zeros(2), np.ones(2)
    total, total_scale = 0.0, -1e300
    for i in range(rows):
        for way in range(2):
            letter = target[i] if way == 0 else target[rows - 1 - i]
            row = matches[way, i]
            row[0] = tables[way, letter, 0] * begin[way]
            edge = 1.0 if i == 0 else inside
            _match(row, tables[way, letter], before[way], edge * begin[way])
            scales[way, i] = scale[way]
        ended = 0.0
        for j in range(columns):
            ended += matches[0, i, j]
        if i < rows - 1:
            ended = ended * inside + matches[0, i, columns - 1] * (1 - inside)
        if scale[0] > total_scale:
            total *= math.exp(max(total_scale - scale[0], -700.0))
            total_scale = scale[0]
        total += ended * math.exp(max(scale[0] - total_scale, -700.0))
        for way in range(2):
            row = matches[way, i]
            _delete(row, deletes, opened, extended)
            _carry(row, deletes, inserts[way], before[way], opened, extended)
            if i % RESCALED == RESCALED - 1:
                largest = before[way].max()
                for j in range(columns):
                    before[way, j] /= largest
                    inserts[way, j] /= largest
                scale[way] += math.log(largest)
                begin[way] = math.exp(-scale[way])
    places = math.log(rows + columns)
    # Relative to one path that aligns nothing, and a path from each possible beginning.
    log_odds = math.log(max(total, SMALLEST)) + total_scale - places
    evidence = max(log_odds, 0.0) + math.log1p(math.exp(-abs(log_odds))) + places
    joint = before[0]
    for i in range(rows):
        back = rows - 1 - i
        log_factor = scales[0, i] + scales[1, back] - evidence
        for j in range(columns):
            joint[j] = matches[0, i, j] * matches[1, back, columns - 1 - j]
        factor = math.exp(min(log_factor, 600.0))
        least = NEGLIGIBLE / max(factor, SMALLEST)
        for letter in range(21):
            out[i, letter] = 0
        for j in range(columns):
            if joint[j] > least:
                out[i, relative[j]] += joint[j] * factor
        covered = 0.0
        for letter in range(21):
            out[i, letter] /= odds[target[i], letter]
            covered += out[i, letter]
        if covered > 1:
            for letter in range(21):
                out[i, letter] /= covered


@compiled()
def _describe(target: Letters, windows: Integers, out: NDArray[np.float32]) -> None:
    """Fill the other columns of `out` [L, F]; see `Alignment`."""
    rows = len(target)
    before = np.zeros((rows + 1, 3))  # sums of agreeing, aligned and all visible residues
    for i in range(rows):
        visible = target[i] < 20
        out[i, 21] = out[i, :20].sum()
        before[i + 1] = before[i]
        if visible:
            before[i + 1, 0] += out[i, target[i]]
            before[i + 1, 1] += out[i, 21]
            before[i + 1, 2] += 1
    for number in range(len(windows)):
        column, reach = 22 + 3 * number, windows[number]
        for i in range(rows):
            first, last = max(i - reach, 0), min(i + reach + 1, rows)
            agreeing = before[last, 0] - before[first, 0]
            aligned = before[last, 1] - before[first, 1]
            seen = before[last, 2] - before[first, 2]
            out[i, column] = (agreeing + 0.5) / (aligned + 1.5)  # a third if nothing is visible
            out[i, column + 1] = 0.3 * math.log1p(max(aligned, 0.0))
            out[i, column + 2] = aligned / max(seen, 1.0)


@compiled()
def align_pairs(
    targets: Letters,
    target_bounds: Integers,
    target_of: Integers,
    relatives: Letters,
    relative_bounds: Integers,
    relative_of: Integers,
    odds: Floats,
    opened: float,
    extended: float,
    inside: float,
    windows: Integers,
    out: NDArray[np.float32],
    out_bounds: Integers,
) -> None:
    """Align and describe each pair (`target_of`, `relative_of`) of packed sequences."""
    for pair in range(len(target_of)):
        relative = relative_of[pair]
        target = targets[target_bounds[target_of[pair]] : target_bounds[target_of[pair] + 1]]
        lines = out[out_bounds[pair] : out_bounds[pair + 1]]
        _align_pair(
            target,
            relatives[relative_bounds[relative] : relative_bounds[relative + 1]],
            odds,
            opened,
            extended,
            inside,
            lines,
        )
        _describe(target, windows, lines)
