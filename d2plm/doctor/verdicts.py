"""Running checks and printing their verdicts.

Each check runs in a thread that is abandoned after a time limit, because waiting for a mount or a
server cannot be interrupted and must not block the other verdicts.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from d2plm.core.errors import D2PLMError, first_line
from d2plm.core.progress import Progress
from d2plm.core.redaction import redacted
from d2plm.core.terminal import aligned, result


@dataclass(frozen=True)
class Verdict:
    """What a check found and, if there is a problem, how to fix it, one line each.

    `status` is ok, warning (it works, but slower or less safely than it could), failed, or skipped
    (not requested, or no permission).
    """

    status: str
    found: str
    fix: str = ""


Check = Callable[[], Verdict]
Verdicts = dict[str, Verdict]  # by the check's name

ok = partial(Verdict, "ok")
warning = partial(Verdict, "warning")
failed = partial(Verdict, "failed")
skipped = partial(Verdict, "skipped")


def examine(checks: Mapping[str, Check], limit_seconds: float) -> Verdicts:
    """Run all checks concurrently; one that raises an error or exceeds the limit has failed."""
    hung = failed(f"no answer within {limit_seconds:g} s", "check the disk or server that it reads")
    verdicts = dict.fromkeys(checks, hung)

    def run(name: str, check: Check) -> None:
        try:
            verdicts[name] = check()
        except D2PLMError as error:  # its message includes the fix
            verdicts[name] = failed(redacted(str(error)))
        except Exception as error:  # a bug in one check must not affect the others
            crash = f"the check crashed: {type(error).__name__}: {first_line(error)}"
            verdicts[name] = failed(redacted(crash), "please report this bug in d2plm doctor")

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_seconds
    with Progress("checking", len(threads)) as progress:
        for done, thread in enumerate(threads, 1):
            thread.join(max(0.0, deadline - time.monotonic()))
            progress.update(done)
    return dict(verdicts)


def show(verdicts: Verdicts) -> None:
    """Print one line per verdict, and the number of each status."""
    rows = {
        f"{one.status:9}{name}": " → ".join(filter(None, (" ".join(one.found.split()), one.fix)))
        for name, one in verdicts.items()
    }
    counts = Counter(one.status for one in verdicts.values()).most_common()
    summary = ", ".join(f"{number} {status}" for status, number in counts)
    result(f"{aligned(rows)}\n\n{summary}")
