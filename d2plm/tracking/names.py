"""What runs are called where nobody has named them: what they are, and when they began.

A run begins before its model is built, so the size comes into its name later; a name that someone
has given it in the meantime stays.
"""

import re
from datetime import datetime

_STAMP = r"\d\d-\d\d \d\d:\d\d"


def title(name: str, paradigm: str) -> str:
    """The part of a name that is known from the start, such as `demo diffusion`.

    Args:
        name: of the experiment.
        paradigm: its name; not repeated where the experiment is called after it.
    """
    words = paradigm.replace("_", " ")
    return name if name in (paradigm, words) else f"{name} {words}"


def stamped(title: str, time: datetime) -> str:
    """`title` and the time, such as `demo diffusion 11-22 02:21`."""
    return f"{title} {time:%m-%d %H:%M}"


def with_size(name: str, title: str, size: str) -> str | None:
    """`demo diffusion 2.1M 11-22 02:21` for `demo diffusion 11-22 02:21`.

    Args:
        name: of a run.
        title: that it began with.
        size: as `short_number` gives it.

    Returns:
        None where the run is called otherwise, or so already.
    """
    found = re.fullmatch(rf"{re.escape(title)}(?: [\d.]+[kMB]?)? ({_STAMP})", name)
    if found is None:
        return None
    new = f"{title} {size} {found[1]}"
    return None if new == name else new
