"""What a command says, and where: results on standard output, everything else on standard error.

Messages, warnings and libraries' logs are single lines. How a command speaks holds for the
processes that it starts, too, so it is kept in the environment, where they find it.
"""

import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TextIO

VARIABLE = "D2PLM_OUTPUT"
QUIET, JSON, DEBUG = "quiet", "json", "debug"
OPTIONS = {
    "--quiet": (QUIET, "only errors, and what the command is asked for"),
    "--json": (JSON, "the result as one JSON document; everything else goes to standard error"),
    "--debug": (DEBUG, "all that libraries say, and where errors and warnings come from"),
}
HELP = ("-h", "--help")
GLOBAL_OPTIONS = (*HELP, "--version", *OPTIONS)
OWN = ("d2plm", "pipelines")  # packages whose messages are shown as they are
# Libraries speak with handlers of their own, or show bars of their own, unless they are told here.
LIBRARIES = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

_standard_output: TextIO | None = None  # where JSON goes while what is printed goes elsewhere


def manner() -> set[str]:
    """How the present command speaks: a subset of `QUIET`, `JSON` and `DEBUG`."""
    return set(os.environ.get(VARIABLE, "").split())


def take_options(words: Sequence[str]) -> tuple[list[str], set[str]]:
    """(the words without the options of `OPTIONS`, wherever they stand; what those ask for)."""
    asked = {OPTIONS[word][0] for word in words if word in OPTIONS}
    return [word for word in words if word not in OPTIONS], asked


@contextmanager
def speaking(how: Collection[str]) -> Iterator[None]:
    """Have this process, and those that it starts, speak so inside the block.

    With `JSON`, whatever is printed goes to standard error, and `write_document` alone does not.
    """
    global _standard_output
    before, output = os.environ.get(VARIABLE), _standard_output
    root, show_warning = logging.getLogger(), warnings.showwarning
    handlers, level = list(root.handlers), root.level
    os.environ[VARIABLE] = " ".join(sorted(how))
    configure_logging()
    try:
        if JSON not in how:
            yield
            return
        _standard_output = output or sys.stdout
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _standard_output, warnings.showwarning = output, show_warning
        root.handlers[:] = handlers
        root.setLevel(level)
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def configure_logging() -> None:
    """Our own messages as plain lines on standard error, and no flood from libraries."""
    root, how = logging.getLogger(), manner()
    says_all = os.environ.get("RANK", "0") == "0" and QUIET not in how
    root.handlers[:] = [known for known in root.handlers if not isinstance(known, Lines)]
    lines = Lines(DEBUG in how)
    root.addHandler(lines)
    root.setLevel(logging.INFO if says_all else logging.ERROR)
    if DEBUG in how:
        return
    for variable, value in LIBRARIES.items():
        os.environ.setdefault(variable, value)
    warnings.showwarning = lines.show_warning


class Lines(logging.Handler):
    """A line on standard error for each message of ours, and for each new warning of a library.

    Args:
        everything: whether libraries are shown whole, and where errors come from.
    """

    def __init__(self, everything: bool = False) -> None:
        super().__init__()
        self.everything = everything
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Show a message, unless it is a library's chatter or was shown before."""
        try:
            package, text = record.name.partition(".")[0], record.getMessage()
            kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            if self.everything:
                self._write(f"{kind}{record.name}: {self.format(record)}")
            elif package in OWN:
                self._write(kind + text)
            elif record.levelno >= logging.WARNING:
                self._write_once(f"{kind}{package}: {_first_line(text)}")
        except Exception:  # logging's own rule: a message that cannot be shown ends no work
            self.handleError(record)

    def show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """In place of `warnings.showwarning`, which takes three lines and names files."""
        if logging.getLogger().isEnabledFor(logging.WARNING):
            self._write_once(f"warning: {_package(filename)}: {_first_line(str(message))}")

    def _write_once(self, line: str) -> None:
        if line not in self._shown:
            self._shown.add(line)
            self._write(line)

    def _write(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)  # whatever that is now: a bar puts itself there


def result(text: str) -> None:
    """Print what the command was asked for; with `--json` its document stands for it."""
    if JSON not in manner():
        print(text, flush=True)


def done(text: str) -> None:
    """Print what the command has done, which `--quiet` leaves out."""
    if QUIET not in manner():
        result(text)


def write_document(document: object) -> None:
    """The result of a command as JSON, on standard output."""
    text = json.dumps(_plain(document), indent=2, ensure_ascii=False)
    print(text, file=_standard_output or sys.stdout, flush=True)


def _plain(value: Any) -> Any:
    """`value` in the types of JSON, which has no number that is none."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _package(filename: str) -> str:
    """The package that a source file belongs to."""
    parts = Path(filename).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    return next((part for part in OWN if part in parts), Path(filename).stem)
