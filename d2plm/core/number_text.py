"""Short forms of counts and durations, the same in all outputs."""


def short_number(number: float) -> str:
    """Two or three digits and a letter: 0.52, 946, 21.3k, 2.1M, 3.0B."""
    for letter, unit in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * unit:
            return f"{number / unit:.{0 if number >= 100 * unit else 1}f}{letter}"
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def counted(number: int, noun: str) -> str:
    """`1 text`, `1,902 texts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
