"""What trackers and their errors may show: no user and no password of any address."""

import re

from d2plm.errors import first_line

# What stands between `://` and the host. The second form is a password that itself holds a slash,
# as database addresses may, and not a port with an `@` later in the path.
_USER_INFO = re.compile(r"://(?:[^\s/?#]*|[^\s:/@]*:(?!\d+/)[^\s@]*)@")


def redacted(text: str) -> str:
    """`text` with the user and password of every URI in it replaced by `***`."""
    return _USER_INFO.sub("://***@", text)


def redacted_line(error: Exception) -> str:
    """The first line of an error, redacted."""
    return redacted(first_line(error))
