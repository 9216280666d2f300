"""What trackers and their errors may show: no secret, and no user and password of any address."""

import re
from collections.abc import Mapping
from typing import Any

from d2plm.core.errors import first_line

# What stands between `://` and the host. The second form is a password that itself holds a slash,
# as database addresses may, and not a port with an `@` later in the path.
_USER_INFO = re.compile(r"://(?:[^\s/?#]*|[^\s:/@]*:(?!\d+/)[^\s@]*)@")
# Of environment variables above all: HF_TOKEN, AWS_SECRET_ACCESS_KEY; not of token_budget.
_SECRET = re.compile(
    r"(?:^|[._-])(?:password|passwd|secret|token|credentials?|(?:api|access|private|secret)_?key)$",
    re.IGNORECASE,
)
HIDDEN = "***"


def redacted(text: str) -> str:
    """`text` with the user and password of every URI in it replaced by `***`."""
    return _USER_INFO.sub(f"://{HIDDEN}@", text)


def redacted_line(error: Exception) -> str:
    """The first line of an error, redacted."""
    return redacted(first_line(error))


def redacted_value(key: str, value: object) -> bool | int | float | str:
    """A setting's value as trackers show it: a number, or text; none where the key is a secret's.

    Args:
        key: with the sections before it, such as `launcher.environment.HF_TOKEN`.
        value: of any type.
    """
    if value not in (None, "") and _SECRET.search(key):
        return HIDDEN
    return value if isinstance(value, bool | int | float) else redacted(str(value))


def redacted_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with the same structure, without secrets and without passwords."""
    return {str(key): _redacted(str(key), value) for key, value in settings.items()}


def _redacted(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redacted_settings(value)
    if isinstance(value, list | tuple):
        return [_redacted(key, item) for item in value]
    return value if value is None else redacted_value(key, value)
