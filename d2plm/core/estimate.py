"""Estimates with 95 % intervals, and the rule for when a difference counts as shown.

A negative difference of likelihood bounds is an improvement. A difference counts only if its whole
interval has its sign; without an interval, as for a single homology cluster, nothing is shown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

Interval = tuple[float, float]


class Verdict(StrEnum):
    """The result of a paired comparison, in the words used by every output."""

    BETTER = "better than"
    WORSE = "worse than"
    UNDECIDED = "not shown to differ from"


def verdict(*intervals: Interval | None) -> Verdict:
    """Whether a difference is better, worse or undecided according to all its intervals."""
    known = [interval for interval in intervals if interval is not None]
    if len(known) < len(intervals):
        return Verdict.UNDECIDED
    if all(high < 0 for _, high in known):
        return Verdict.BETTER
    return Verdict.WORSE if all(low > 0 for low, _ in known) else Verdict.UNDECIDED


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval, None if all sequences are in one homology cluster."""

    value: float
    interval: Interval | None

    @property
    def ends(self) -> Interval:
        """The interval, or the value twice without one."""
        return self.interval or (self.value, self.value)

    @property
    def verdict(self) -> Verdict:
        return verdict(self.interval)

    def exp(self) -> "Estimate":
        """The perplexity of a value in nats."""
        low, high = map(math.exp, self.ends)
        return Estimate(math.exp(self.value), self.interval and (low, high))

    def __format__(self, form: str) -> str:
        """`17.437 [17.295, 17.573]`, each number in the format `form`."""
        return f"{self.value:{form}} {interval_text(self.interval, form)}"


def interval_text(interval: Sequence[float] | None, form: str) -> str:
    """`[low, high]`, or `(one cluster)` without an interval."""
    if interval is None:
        return "(one cluster)"
    low, high = interval
    return f"[{low:{form}}, {high:{form}}]"


def difference_text(difference: Estimate, token: str = "residue") -> str:  # noqa: S107
    """A difference of bounds, such as `-0.0144 nats/residue [-0.0166, -0.0117]`."""
    interval = interval_text(difference.interval, "+.4f")
    return f"{difference.value:+.4f} nats/{token} {interval}"
