"""Running checks and printing their verdicts.

A check is a function without arguments that returns a `Verdict`. Each check runs in a thread that
is abandoned after a time limit, because waiting for a mount or a server cannot be interrupted and
must not block the other verdicts.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from d2plm.core.errors import D2PLMError, first_line
from d2plm.core.progress import Progress
from d2plm.core.redaction import redacted
from d2plm.core.terminal import result


class Status(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"  # works, but slower or less safely than it could
    FAILED = "failed"
    SKIPPED = "skipped"  # not requested, or no permission


COLOURS = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.FAILED: "bold red",
    Status.SKIPPED: "dim",
}


@dataclass(frozen=True)
class Verdict:
    """What a check found and, if there is a problem, how to fix it, one line each."""

    status: Status
    found: str
    fix: str = ""


Check = Callable[[], Verdict]
Verdicts = dict[str, Verdict]  # by the check's name


ok = partial(Verdict, Status.OK)
warning = partial(Verdict, Status.WARNING)
failed = partial(Verdict, Status.FAILED)
skipped = partial(Verdict, Status.SKIPPED)


def examine(checks: Mapping[str, Check], limit_seconds: float) -> Verdicts:
    """Run all checks concurrently; a check that raises an error or exceeds the limit has failed."""
    returned: Verdicts = {}

    def run(name: str, check: Check) -> None:
        try:
            returned[name] = check()
        except D2PLMError as error:  # its message includes the fix
            returned[name] = failed(redacted(str(error)), "")
        except Exception as error:  # a bug in one check must not affect the others
            returned[name] = failed(
                redacted(f"the check crashed: {type(error).__name__}: {first_line(error)}"),
                "this is a bug in d2plm doctor; please report it",
            )

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_seconds
    with Progress("checking", len(threads)) as progress:
        for done, thread in enumerate(threads, 1):
            thread.join(max(0.0, deadline - time.monotonic()))
            progress.update(done)
    hung = failed(
        f"no answer within {limit_seconds:g} s", "check the disk, mount or server that it reads"
    )
    return {name: returned.get(name, hung) for name in checks}


def show(verdicts: Verdicts) -> None:
    """Print one line per verdict, in colour on a terminal, and the number of each status."""
    from rich.console import Console
    from rich.text import Text

    console, width = Console(), max(map(len, verdicts))
    with console.capture() as text:
        for name, verdict in verdicts.items():
            found = f" {name:{width}}  {' '.join(verdict.found.split())}"
            fix = (f" → {verdict.fix}" if verdict.fix else "", "cyan")
            status = (f"{verdict.status:8}", COLOURS[verdict.status])
            console.print(Text.assemble(status, found, fix), soft_wrap=True)
    counts = Counter(verdict.status for verdict in verdicts.values())
    summary = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    result(f"{text.get()}\n{summary}")
