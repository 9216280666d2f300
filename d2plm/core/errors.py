"""The errors a user can cause, one type per layer.

Each message says what is wrong, where, and how to fix it; the command line prints it as one line
and exits with a non-zero code. Any other exception that escapes is a defect of D2PLM itself.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches


class D2PLMError(Exception):
    """Base of all errors caused by the input, the settings or the environment.

    Attributes:
        exit_code: exit code of the command that the error ends.
        document: the results of the command up to the error, for `--json`.
    """

    exit_code = 1
    document: object = None


class ConfigError(D2PLMError):
    """A configuration key is unknown or holds an impossible value."""

    exit_code = 2


class DataError(D2PLMError):
    """A sequence file or store is missing, damaged or holds something that is not a protein."""


class SplitError(DataError):
    """There are too few sequences or clusters for the split."""


class ModelError(D2PLMError):
    """A model folder is incomplete, or does not support a request."""


class CheckpointError(D2PLMError):
    """A checkpoint is missing, damaged or belongs to another run."""


class TrackingError(D2PLMError):
    """A tracker is not installed, cannot be reached or refuses a request."""


class ClusterError(D2PLMError):
    """A cluster or its pipeline server cannot be reached, or refuses."""


class DoctorError(D2PLMError):
    """The machine or the cluster lacks something; the findings have been printed."""


class LaunchError(D2PLMError):
    """A launched process or job failed; a meaningful exit code is passed on."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def root_cause(error: BaseException) -> BaseException:
    """The first exception in the chain of `error`, which libraries wrap several times."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def first_line(error: BaseException | str) -> str:
    """The first line of a message, or the type of an error without one."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def require(condition: bool, key: str, value: object, wanted: str) -> None:
    """Raise `ConfigError` naming `key` unless `condition` holds; `wanted` completes "must be …"."""
    if not condition:
        raise ConfigError(f"{key}={value!r}: must be {wanted}")


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
        low, high: the bounds; None means unbounded.
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
def as_keys(section: str, others: Mapping[str, str] | None = None) -> Iterator[None]:
    """Replace the argument's name at the start of a `ConfigError` by its key in the configuration.

    The library names arguments (`steps=0: must be …`); the code that reads the configuration
    knows the keys (`generation.steps=0: must be …`). Other messages are unchanged.

    Args:
        section: section of the configuration that contains the arguments.
        others: argument → key, for arguments from elsewhere.
    """
    try:
        yield
    except ConfigError as error:
        message = str(error)
        argument, equals, _ = message.partition("=")
        if not equals or not argument.isidentifier():
            raise
        key = (others or {}).get(argument, f"{section}.{argument}")
        raise ConfigError(key + message.removeprefix(argument)) from error


@contextmanager
def from_extra(
    what: str, extra: str, kind: type[D2PLMError], otherwise: str = ""
) -> Iterator[None]:
    """Convert failing imports in the block to an error of this `kind` that names d2plm's extra."""
    try:
        yield
    except ImportError as error:
        raise kind(
            f"{what} is not installed ({error}); install d2plm[{extra}]{otherwise}"
        ) from error


def require_choice(key: str, value: str, choices: Collection[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`, suggesting the nearest one."""
    if value not in choices:
        raise ConfigError(
            f"{key}={value!r}: must be one of {', '.join(choices)}{did_you_mean(value, choices)}"
        )


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """` (did you mean 'x'?)` for the nearest choice, or an empty string."""
    near = nearest(word, choices)
    return "" if near is None else f" (did you mean '{near}'?)"


def nearest(word: str, choices: Collection[str]) -> str | None:
    """The choice most similar to `word`, regardless of case, if any is similar enough."""
    spelt = {choice.lower(): choice for choice in choices}
    near = get_close_matches(str(word).lower(), list(spelt), n=1)
    return spelt[near[0]] if near else None
