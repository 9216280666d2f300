"""Numbers as text: short counts, intervals and durations, the same wherever they are shown."""

from collections.abc import Mapping, Sequence
from typing import Any


def short_number(number: float) -> str:
    """Two or three digits and a letter: 0.52, 946, 21.3k, 2.1M, 3.0B."""
    for letter, unit in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * unit:
            return f"{number / unit:.{0 if number >= 100 * unit else 1}f}{letter}"
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def counted(number: int, noun: str) -> str:
    """A number of things: `1 text`, `1,902 texts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def interval_text(interval: Sequence[float] | None, form: str) -> str:
    """`[low, high]`; a single homology cluster has no interval."""
    if interval is None:
        return "(one cluster)"
    low, high = interval
    return f"[{low:{form}}, {high:{form}}]"


def difference_text(paired: Mapping[str, Any], per: str = "residue") -> str:
    """A `paired_difference` of two models, such as `-0.0144 nats/residue [-0.0166, -0.0117]`."""
    interval = interval_text(paired["interval"], "+.4f")
    return f"{paired['nelbo_difference']:+.4f} nats/{per} {interval}"


def duration(seconds: float) -> str:
    """Seconds in the two largest units: `2 d 3 h`, `1 h 12 min`, `4 min 10 s`, `35 s`."""
    seconds = round(seconds)
    for size, unit, smaller, smaller_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // smaller} {smaller_unit}"
    return f"{seconds} s"
