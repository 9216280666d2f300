"""Rows: what benchmarks report, those of several with their goals, and the table of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MFU_GOAL = 55  # % of the datasheet's peak, 450 M parameters on one H200


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table.

    Attributes:
        what: was measured, under which conditions.
        value, unit: the result.
        goal: the least (or, with `at_most`, the largest) value wanted; None where there is none.
        spread: the quartiles, where the value is a median.
    """

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_most: bool = False
    spread: tuple[float, float] | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def as_json(self) -> dict[str, Any]:
        """All of it, and whether the goal is met."""
        return {**asdict(self), "met": self.met}

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> "Row":
        """What `as_json` gave."""
        return cls(**{key: value for key, value in content.items() if key != "met"})


def ratio_row(
    what: str,
    numerator: Sequence[float],
    denominator: Sequence[float],
    goal: float | None = None,
    *,
    at_most: bool = False,
) -> Row:
    """How many times as long an arm's turns take as another arm's turns beside them, the median."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive") if ratios[1:] else 3 * ratios
    return Row(f"time of {what}", middle, "×", goal, at_most, (low, high))


def ema_row(with_ema: Sequence[float], without: Sequence[float], device: "torch.device") -> Row:
    """What the moving average costs."""
    goal = 1.005 if device.type == "cuda" else 1.02
    return ratio_row("a step with EMA ÷ without", with_ema, without, goal, at_most=True)


def recompilation_row(count: float, when: str) -> Row:
    """How often the compiler has run where it must not."""
    return Row(f"recompilations {when}", count, "", 0, at_most=True)


def flops_rows(
    flops: float, seconds: float, device: "torch.device", dtype: "torch.dtype"
) -> list[Row]:
    """Model FLOP/s, and their share of the device's peak where that is known."""
    from d2plm.training.throughput import known_peak

    rate, peak = flops / seconds / 1e12, known_peak(device, dtype)
    rows = [Row("model FLOP/s", rate, "TFLOP/s")]
    if peak is not None:
        what = f"MFU, of {peak:g} TFLOP/s (datasheet)"
        rows.append(Row(what, 100 * rate / peak, "%", MFU_GOAL))
    return rows


def rate_unit(device: "torch.device") -> str:
    """Of a rate in tokens: a GPU's clock or the time of the process's CPUs."""
    return "tokens/s" if device.type == "cuda" else "tokens/CPU-s"


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    quartiles = "quartiles" if any(row.spread for row in rows) else ""
    cells = [("", "", quartiles, "goal", "")]
    for row in rows:
        sign = "≤" if row.at_most else "≥"
        goal = "" if row.goal is None else f"{sign} {_number(row.goal)}"
        met = {None: "", True: "met", False: "missed"}[row.met]
        spread = "" if row.spread is None else " – ".join(map(_number, row.spread))
        value = f"{_number(row.value)} {row.unit}".rstrip()
        cells.append((row.what, value, spread, goal, met))
    widths = [max(len(cell[column]) for cell in cells) for column in range(5)]
    return "\n".join(
        f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}  {e}".rstrip()
        for a, b, c, d, e in cells
    )


def _number(value: float) -> str:
    return (
        f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if value < 0.9 else f"{value:.4g}"
    )
