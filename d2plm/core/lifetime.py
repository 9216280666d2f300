"""Ending a process with the one that started it, even if that one is killed with SIGKILL.

A child receives its parent's process id in the environment and watches it from a thread. Unlike
PR_SET_PDEATHSIG, this works at any depth and for any starting thread. Other programs run under this
file as a script, which watches the parent for them and ends their whole process group.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

PARENT = "D2PLM_PARENT"  # id of the process to end with
POLL_SECONDS = 1.0
CANNOT_RUN = 127  # a shell's exit code for a missing program


def for_children() -> dict[str, str]:
    """Environment variables for children that must end with this process."""
    return {PARENT: str(os.getpid())}


def watched(command: Sequence[str]) -> list[str]:
    """The command that runs another program in its own process group and ends it with its parent.

    The command returns the program's exit code, or ends by the same signal.
    """
    return [sys.executable, "-I", __file__, *command]


def end_with_parent(end: Callable[[], object] | None = None) -> None:
    """Call `end` as soon as the process named in `PARENT` has ended; the default is SIGKILL.

    Without the variable, nothing happens. Children of this process do not inherit the variable.
    """
    parent = os.environ.pop(PARENT, "")
    if not parent.isdecimal():
        return

    def watch() -> None:
        _wait_for_end(int(parent))
        (end or (lambda: os.kill(os.getpid(), signal.SIGKILL)))()

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _wait_for_end(pid: int) -> None:
    """Return once no process `pid` is running, at once on Linux."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or an old kernel
        while True:
            try:
                os.kill(pid, 0)
            except (ProcessLookupError, PermissionError):  # the latter: another user's by now
                return
            time.sleep(POLL_SECONDS)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()


def main() -> int:
    """Run the arguments as a command, and end as it ends."""
    end_with_parent(lambda: os.killpg(0, signal.SIGKILL))
    try:
        code = subprocess.run(sys.argv[1:], check=False).returncode
    except OSError as error:
        print(f"{sys.argv[1]}: {error.strerror}", file=sys.stderr)
        return CANNOT_RUN
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
