"""What trackers and their errors may show: no user and no password of any address."""

import re

# What stands between `://` and the host. The second form is a password that itself holds a slash,
# as database addresses may, and not a port with an `@` later in the path.
_USER_INFO = re.compile(r"://(?:[^\s/?#]*|[^\s:/@]*:(?!\d+/)[^\s@]*)@")


def redacted(text: str) -> str:
    """`text` with the user and password of every URI in it replaced by `***`."""
    return _USER_INFO.sub("://***@", text)


def first_line(error: Exception) -> str:
    """The first line of an error, or its type if it says nothing."""
    return redacted(next(iter(str(error).strip().splitlines()), type(error).__name__))
