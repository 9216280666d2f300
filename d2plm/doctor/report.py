"""What a check gives, how all of them are run, and how it is told.

A check is a function without arguments that gives a `Verdict`. Each has a thread of its own, which
is left behind after a limit: a mount or a server that never answers cannot be interrupted, and must
not keep the others' verdicts back.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

from d2plm.core.errors import D2PLMError, first_line
from d2plm.core.progress import Progress
from d2plm.core.redaction import redacted
from d2plm.core.terminal import JSON, output_modes, result


class Status(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARNING = "warning"  # it works, but slower or less safely
    FAILED = "failed"
    SKIPPED = "skipped"  # not wanted, or not allowed to be seen


COLOURS = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.FAILED: "bold red",
    Status.SKIPPED: "dim",
}


@dataclass(frozen=True)
class Verdict:
    """What a check found, in one line, and in another how to mend it."""

    status: Status
    found: str
    mend: str = ""


Check = Callable[[], Verdict]
Verdicts = dict[str, Verdict]  # by the check's name


def ok(found: str) -> Verdict:
    """All is well."""
    return Verdict(Status.OK, found)


def warning(found: str, mend: str) -> Verdict:
    """It works, but slower or less safely than it could."""
    return Verdict(Status.WARNING, found, mend)


def failed(found: str, mend: str) -> Verdict:
    """It does not work."""
    return Verdict(Status.FAILED, found, mend)


def skipped(found: str, mend: str = "") -> Verdict:
    """Nothing is known, as nobody asked or nobody may."""
    return Verdict(Status.SKIPPED, found, mend)


def examine(checks: Mapping[str, Check], limit_seconds: float) -> Verdicts:
    """Run all checks beside each other; one that breaks or hangs is a failed one.

    Args:
        limit_seconds: after which those that have not answered are given up.
    """
    given: Verdicts = {}
    threads = [
        threading.Thread(target=_examine_one, args=(name, check, given), daemon=True)
        for name, check in checks.items()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_seconds
    with Progress("checking", len(threads)) as progress:
        for done, thread in enumerate(threads, 1):
            thread.join(max(0.0, deadline - time.monotonic()))
            progress.update(done)
    hung = failed(
        f"no answer within {limit_seconds:g} s",
        "look whether the disk, mount or server that it asks is alive",
    )
    return {name: given.get(name, hung) for name in checks}


def _examine_one(name: str, check: Check, given: Verdicts) -> None:
    try:
        given[name] = check()
    except D2PLMError as error:  # which says itself how it is mended
        given[name] = failed(redacted(str(error)), "")
    except Exception as error:  # a defect of one check is not to cost the others
        given[name] = failed(
            redacted(f"the check broke: {type(error).__name__}: {first_line(error)}"),
            "this is a defect of d2plm doctor; please report it",
        )


def as_rows(verdicts: Verdicts) -> list[dict[str, str]]:
    """A list of {check, status, found, mend}."""
    return [{"check": name, **asdict(verdict)} for name, verdict in verdicts.items()]


def as_lines(verdicts: Verdicts) -> str:
    """A line for each check, and what they come to: for a log."""
    width = max(map(len, verdicts), default=0)
    lines = [
        f"{verdict.status:8} {name:{width}}  {' → '.join(filter(None, _texts(verdict)))}"
        for name, verdict in verdicts.items()
    ]
    return "\n".join([*lines, "", summary(verdicts)])


def show(verdicts: Verdicts) -> None:
    """Print the table: in colour, and wrapped, on a terminal; nothing where JSON is wanted."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal or JSON in output_modes():
        result(as_lines(verdicts))
        return
    table = Table.grid(padding=(0, 2))
    for name, verdict in verdicts.items():
        found = Text(verdict.found)
        if verdict.mend:
            found.append(f"\n→ {verdict.mend}", style="cyan")
        table.add_row(Text(verdict.status, style=COLOURS[verdict.status]), Text(name), found)
    console.print(table)
    console.print(f"\n{summary(verdicts)}")


def _texts(verdict: Verdict) -> tuple[str, str]:
    return " ".join(verdict.found.split()), " ".join(verdict.mend.split())


def summary(verdicts: Verdicts) -> str:
    """How many of each."""
    counts = Counter(verdict.status for verdict in verdicts.values())
    return ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
