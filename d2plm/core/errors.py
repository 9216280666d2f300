"""The errors a user can cause, one type per layer.

Each message says what is wrong, where, and how to fix it; the command line prints it as one line
and exits with a non-zero code. Any other exception that escapes is a defect of D2PLM itself.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches

MAX_SHOWN = 300  # letters of a value in a message


class D2PLMError(Exception):
    """Base of all errors caused by the input, the settings or the environment.

    Attributes:
        exit_code: exit code of the command.
        document: results of the command up to the error, for `--json`.
    """

    exit_code = 1
    document: object = None


class ConfigError(D2PLMError):
    """A setting is unknown or has an impossible value.

    The library names its arguments; the layer that reads configurations adds their section with
    `within`, so that the message contains the full keys.

    Args:
        reason: what is wrong and what to do; completes "KEY=VALUE: …".
        settings: argument or key → value, of the wrong settings; may be empty.
    """

    exit_code = 2

    def __init__(self, reason: str, settings: Mapping[str, object] | None = None) -> None:
        super().__init__(reason, dict(settings or {}))  # the arguments that pickle passes on
        self.reason, self.settings = reason, dict(settings or {})

    def __str__(self) -> str:
        shown = {k: "null" if v is None else in_one_line(v) for k, v in self.settings.items()}
        named = ", ".join(f"{key}={value}" for key, value in shown.items())
        return f"{named}: {self.reason}" if named else self.reason

    def within(self, section: str, keys: Mapping[str, str] | None = None) -> "ConfigError":
        """The same error with full keys: `keys[argument]`, or `section` and the argument."""
        prefix, elsewhere = f"{section}." if section else "", keys or {}
        named = {elsewhere.get(key, prefix + key): v for key, v in self.settings.items()}
        return type(self)(self.reason, named)


class DataError(D2PLMError):
    """A sequence file or store is missing, damaged or contains an invalid sequence."""


class SplitError(DataError):
    """There are too few sequences or clusters for the split."""


class ModelError(D2PLMError):
    """A model folder is incomplete, or does not support a request."""


class CheckpointError(D2PLMError):
    """A checkpoint is missing, damaged or belongs to another run."""


class OutputError(D2PLMError):
    """Standard output is full or closed."""


class TrackingError(D2PLMError):
    """A tracker is not installed, cannot be reached or rejects a request."""


class ClusterError(D2PLMError):
    """A cluster or its pipeline server cannot be reached, or rejects a request."""


class DoctorError(D2PLMError):
    """The machine or the cluster lacks something; the findings have been printed."""


class LaunchError(D2PLMError):
    """A launched process or job failed; its exit code is passed on."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def root_cause(error: BaseException) -> BaseException:
    """The first exception in the chain of `error`, which libraries may wrap several times."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def first_line(error: BaseException | str) -> str:
    """The first line of a message, or the type of an error without a message."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def in_one_line(value: object) -> str:
    """A value in one line of a message, cut if it is long."""
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def require(condition: bool, key: str, value: object, wanted: str) -> None:
    """Raise `ConfigError` naming `key` unless `condition` holds; `wanted` completes "must be …"."""
    if not condition:
        raise ConfigError(f"must be {wanted}", {key: value})


def require_number(
    key: str,
    value: object,
    *,
    integer: bool = False,
    optional: bool = False,
    low: float | None = None,
    high: float | None = None,
    low_open: bool = False,
    high_open: bool = False,
) -> None:
    """Raise `ConfigError` unless `value` is a number between `low` and `high`.

    Args:
        integer: whether only whole numbers are allowed.
        optional: whether None is also allowed.
        low, high: bounds; None is no bound.
        low_open, high_open: whether the bound itself is excluded.
    """
    kind = int if integer else (int, float)
    fits = (optional and value is None) or (
        isinstance(value, kind)
        and not isinstance(value, bool)
        and (low is None or (value > low if low_open else value >= low))  # type: ignore[operator]  # a number
        and (high is None or (value < high if high_open else value <= high))  # type: ignore[operator]  # a number
    )
    wanted = "an integer" if integer else "a number"
    if low is not None:
        wanted += f" {'>' if low_open else '≥'} {low:g}"
    if high is not None:
        wanted += f"{' and' if low is not None else ''} {'<' if high_open else '≤'} {high:g}"
    require(fits, key, value, wanted)


@contextmanager
def within(section: str, keys: Mapping[str, str] | None = None) -> Iterator[None]:
    """Name full keys in a `ConfigError` of the block unless it has them; see the method."""
    try:
        yield
    except ConfigError as error:
        if any("." in key for key in error.settings):
            raise
        raise error.within(section, keys) from error


@contextmanager
def from_extra(
    what: str, extra: str, kind: type[D2PLMError], otherwise: str = ""
) -> Iterator[None]:
    """Convert an `ImportError` in the block to an error of type `kind` that names d2plm's extra."""
    try:
        yield
    except ImportError as error:
        raise kind(
            f"{what} is not installed ({error}); install d2plm[{extra}]{otherwise}"
        ) from error


def require_choice(key: str, value: str, choices: Collection[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`, suggesting the nearest one."""
    if not isinstance(value, str) or value not in choices:
        wanted = f"one of {', '.join(choices)}{did_you_mean(value, choices)}"
        raise ConfigError(f"must be {wanted}", {key: value})


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """` (did you mean 'x'?)` for the nearest choice, or an empty string."""
    near = nearest(word, choices)
    return "" if near is None else f" (did you mean '{near}'?)"


def nearest(word: str, choices: Collection[str]) -> str | None:
    """The choice most similar to `word`, regardless of case, if any is similar enough."""
    spelt = {choice.lower(): choice for choice in choices}
    near = get_close_matches(str(word).lower(), list(spelt), n=1)
    return spelt[near[0]] if near else None
