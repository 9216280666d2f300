"""Output of the commands: results on standard output, everything else on standard error.

Messages, warnings and library logs are single lines. The output modes also apply to child
processes, so they are stored in the environment.
"""

import io
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TextIO

from d2plm.core.errors import OutputError, first_line

VARIABLE = "D2PLM_OUTPUT"
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2  # descriptors
QUIET, JSON, DEBUG = "quiet", "json", "debug"
OPTIONS = {
    "--quiet": (QUIET, "only errors and the requested output"),
    "--json": (JSON, "the result as one JSON document; everything else goes to standard error"),
    "--debug": (DEBUG, "all messages of libraries, and where errors and warnings come from"),
}
HELP = ("-h", "--help")
MULTIRUN = ("-m", "--multirun")
SWITCHES = {"--dry-run": "dry_run=true"}
CONFIG_OPTIONS = ("--config-name", "--config-dir", "--config-file")  # with a value each
MODULE = "--module"  # with a value; it may occur several times
GLOBAL_OPTIONS = (*HELP, "--version", *OPTIONS)
OWN = ("d2plm", "pipelines")  # packages whose messages are shown as they are
LIBRARIES = {  # with their own handlers or progress bars
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f]")  # except tabs and line ends

_standard_output: TextIO | None = None  # for the JSON document, while prints go elsewhere


class _Stream(io.FileIO):
    """Standard output or standard error; failed writes to the latter are ignored."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if self.fileno() == STANDARD_ERROR:
                return len(content)
            raise OutputError(
                f"standard output cannot be written ({error.strerror}); redirect it to a file with "
                "enough space, or to a program that reads all of it"
            ) from error


def open_streams() -> None:
    """Make failed writes to standard output an `OutputError` instead of an `OSError`."""
    for number, name in ((STANDARD_OUTPUT, "stdout"), (STANDARD_ERROR, "stderr")):
        former = getattr(sys, name)
        if former is None:  # closed: no other file may get its number
            os.dup2(os.open(os.devnull, os.O_RDONLY), number)
        stream = io.TextIOWrapper(
            io.BufferedWriter(_Stream(number, "w", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace" if former is None else former.errors,
            line_buffering=number == STANDARD_ERROR or os.isatty(number),
        )
        setattr(sys, name, stream)


def output_modes() -> set[str]:
    """The modes of the current command: a subset of `QUIET`, `JSON` and `DEBUG`."""
    return set(os.environ.get(VARIABLE, "").split())


@contextmanager
def output_in(modes: Collection[str]) -> Iterator[None]:
    """Set the output modes of this process, and of those started inside the block.

    With `JSON`, prints go to standard error, and only `write_document` to standard output.
    """
    global _standard_output
    before, output = os.environ.get(VARIABLE, ""), _standard_output
    root, show_warning = logging.getLogger(), warnings.showwarning
    handlers, level = list(root.handlers), root.level
    os.environ[VARIABLE] = " ".join(sorted(modes))
    configure_logging()
    try:
        if JSON in modes:
            _standard_output = output or sys.stdout
        with redirect_stdout(sys.stderr) if JSON in modes else nullcontext():
            yield
    finally:
        _standard_output, warnings.showwarning = output, show_warning
        root.handlers[:] = handlers
        root.setLevel(level)
        os.environ[VARIABLE] = before


def configure_logging() -> None:
    """Show this package's messages and library warnings as lines on standard error."""
    root, modes = logging.getLogger(), output_modes()
    shows_all = os.environ.get("RANK", "0") == "0" and QUIET not in modes
    root.handlers[:] = [known for known in root.handlers if not isinstance(known, LineHandler)]
    handler = LineHandler(DEBUG in modes)
    root.addHandler(handler)
    root.setLevel(logging.INFO if shows_all else logging.ERROR)
    if DEBUG not in modes:
        for variable, value in LIBRARIES.items():
            os.environ.setdefault(variable, value)
        warnings.showwarning = handler.show_warning  # type: ignore[assignment]  # a narrower one


class LineHandler(logging.Handler):
    """Writes each message of this package as a line, and each distinct library warning once.

    With `everything`, all library messages and the origins of messages are shown.
    """

    def __init__(self, everything: bool = False) -> None:
        super().__init__()
        self.everything = everything
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless it is a repeated library warning or below warning level."""
        try:
            package, text = record.name.partition(".")[0], record.getMessage()
            is_warning = record.levelno >= logging.WARNING
            kind = f"{record.levelname.lower()}: " if is_warning else ""
            if self.everything:
                self._write(f"{kind}{record.name}: {self.format(record)}")
            elif package in OWN:
                self._write(kind + text)
            elif is_warning:
                self._write_once(f"{kind}{package}: {first_line(text)}")
        except Exception:  # logging's own rule: a message that cannot be shown ends no work
            self.handleError(record)

    def show_warning(
        self, message: Warning | str, category: type, filename: str, *_: object
    ) -> None:
        """Replaces `warnings.showwarning`, which prints three lines with file names."""
        if logging.getLogger().isEnabledFor(logging.WARNING):
            self._write_once(f"warning: {_package(filename)}: {first_line(message)}")

    def _write_once(self, line: str) -> None:
        if line not in self._shown:
            self._shown.add(line)
            self._write(line)

    def _write(self, line: str) -> None:
        print(shown(line), file=sys.stderr, flush=True)  # looked up now: a bar replaces it


def shown(text: str) -> str:
    """A message with escaped control characters, which could steer the terminal."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def result(text: str) -> None:
    """Print the result of a command, except with `--json`."""
    if JSON not in output_modes():
        print(text, flush=True)


def done(text: str) -> None:
    """Print what the command has done, except with `--quiet`."""
    if QUIET not in output_modes():
        result(text)


def aligned(rows: Mapping[str, str], indent: str = "") -> str:
    """Names and texts in two columns."""
    width = max(map(len, rows), default=0) + 2
    return "\n".join(f"{indent}{name:{width}}{text}" for name, text in rows.items())


def write_document(document: object) -> None:
    """Write the result of a command as JSON to standard output; NaN and infinities become null."""
    plain = json.loads(json.dumps(document, default=_plain), parse_constant=lambda _: None)
    text = json.dumps(plain, indent=2, ensure_ascii=False)
    print(text, file=_standard_output or sys.stdout, flush=True)


def _plain(value: Any) -> Any:
    """Convert a value without a JSON type: dataclasses, arrays, paths."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _package(filename: str) -> str:
    parts = Path(filename).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    return next((part for part in OWN if part in parts), Path(filename).stem)


def first_few(names: Sequence[str]) -> str:
    """The first five names, followed by … if there are more."""
    return f"{', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
