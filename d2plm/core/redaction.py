"""Redaction of secrets, and of users and passwords in addresses, in trackers and error messages."""

import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from d2plm.core.errors import first_line

# The user and password between `://` and the host. The second form is a password with a slash, as
# in database addresses, but not a port followed by an `@` in the path.
_USER_INFO = re.compile(r"://(?:[^\s/?#]*|[^\s:/@]*:(?!\d+/)[^\s@]*)@")
# HF_TOKEN, AWS_SECRET_ACCESS_KEY; not token_budget, experts_per_token.
_SECRET = re.compile(
    r"(?:password|passwd|passphrase)$"
    r"|(?:^|[._-])(?:pwd|pass|secret|(?<!per_)token|credentials?|authorization"
    r"|(?:api|access|private|secret)_?key)$",
    re.IGNORECASE,
)
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")  # apiToken
# Matches up to a space or quotation mark: a search from each `=` takes quadratic time.
_ASSIGNED = re.compile(r"""(?<![\w.\-])([\w.\-]{1,100})=(?!null\b)(['"]?)([^\s'"…]+)(…?)""")
_QUOTED = re.compile(r"""(['"])([\w.\-]{1,100})\1: (['"])[^'"]+\3""")  # JSON, dictionaries
_HEADER = re.compile(r"(authorization: (?:\w+ )?)\S+", re.IGNORECASE)
# Tokens recognisable by their form: Hugging Face, GitHub, GitLab, Slack, OpenAI, AWS, JWT.
_TOKEN = re.compile(
    r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|xox[abp]-|sk-|AKIA|eyJ)[A-Za-z0-9_.\-]{16,}"
)
HIDDEN = "***"


def redacted(text: str) -> str:
    """`text` with `***` for tokens, users and passwords in URIs, and values of secret keys."""

    def hidden(assigned: re.Match[str]) -> str:
        key, quote, value, more = assigned.groups()
        end = value[-1] if value[1:] and value[-1] in ";:," else ""
        return f"{key}={quote}{HIDDEN}{end}" if _is_secret(key) and not more else assigned[0]

    def hidden_in_quotes(pair: re.Match[str]) -> str:
        quote, key, other = pair.groups()
        return f"{quote}{key}{quote}: {other}{HIDDEN}{other}" if _is_secret(key) else pair[0]

    text = _QUOTED.sub(hidden_in_quotes, _HEADER.sub(rf"\1{HIDDEN}", text))
    return _ASSIGNED.sub(hidden, _TOKEN.sub(HIDDEN, _USER_INFO.sub(f"://{HIDDEN}@", text)))


def _is_secret(key: str) -> bool:
    return _SECRET.search(_HUMP.sub("_", key)) is not None


def redacted_line(error: Exception) -> str:
    """The first line of an error, redacted; of the SQLite error that caused it, if any."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, sqlite3.Error):
        cause = cause.__cause__ or cause.__context__
    return redacted(first_line(cause or error))


def redacted_value(key: str, value: object) -> bool | int | float | str:
    """A setting's value for trackers, hidden if `key`, such as `a.HF_TOKEN`, is a secret's."""
    if value not in (None, "") and _is_secret(key):
        return HIDDEN
    return value if isinstance(value, bool | int | float) else redacted(str(value))


def redacted_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings without secrets and passwords."""
    return {str(key): _redacted(str(key), value) for key, value in settings.items()}


def _redacted(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return HIDDEN if value and _is_secret(key) else redacted_settings(value)
    if isinstance(value, list | tuple):
        return [_redacted(key, item) for item in value]
    return value if value is None else redacted_value(key, value)
