"""Child processes: how they start, end with this process, and pass on their exit codes.

A child never outlives the process that started it, even if that is killed with SIGKILL. Our own
programs receive their parent's process id in the environment and watch it from a thread; unlike
PR_SET_PDEATHSIG, this works at any depth and for any starting thread. Other programs run in a
process group of their own, which a shell kills when the pipe to this process closes.
"""

import atexit
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2plm.core.errors import LaunchError
from d2plm.core.machine import usable_cores
from d2plm.core.waiting import waiting

PARENT = "D2PLM_PARENT"  # id of the process to end with
POLL_SECONDS = 0.2
GRACE_SECONDS = 120  # for the last step and its checkpoint, before a process is killed
SIGNAL_BASE = 128  # a shell reports death by signal n as 128 + n
# Exit code of a process that lost a peer: the training operator restarts pods with codes above 127,
# and this one has no other meaning.
LOST = SIGNAL_BASE + signal.SIGUSR1
# Makes glibc keep large blocks. Otherwise it returns them to the kernel at once, and a training
# step on CPU spends its time on page faults.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# The background process kills the group at the end of the pipe; the program replaces the shell.
_UNTIL_THE_PIPE_CLOSES = 'exec 3<&0; (read -r _ <&3; kill -KILL 0) & exec "$@" </dev/null 3<&-'


@contextmanager
def handled(
    handler: Callable[[int, Any], None], *numbers: int, kept_on_exit: bool = False
) -> Iterator[None]:
    """Handle signals during the block, in the main thread only.

    Args:
        kept_on_exit: whether a SystemExit from the block keeps the handler, and ignores the signals
            while the interpreter exits: a second signal then cannot change the exit code.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if in_main}
    try:
        yield
    except SystemExit:
        while kept_on_exit and before:
            atexit.register(signal.signal, before.popitem()[0], signal.SIG_IGN)
        raise
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def deferred() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the end of the block.

    A process started inside the block is recorded before a handler can raise, so it can be ended.
    Python runs handlers in the main thread only; in other threads this does nothing.
    """
    held: list[int] = []
    with handled(lambda number, _: held.append(number), signal.SIGINT, signal.SIGTERM):
        yield
    for received in held:
        signal.raise_signal(received)


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Raise `SystemExit(143)` on SIGTERM (in the main thread), so that the stack unwinds."""

    def unwind(_signal: int, _frame: object) -> None:
        raise SystemExit(SIGNAL_BASE + signal.SIGTERM)

    with handled(unwind, signal.SIGTERM):
        yield


def for_children() -> dict[str, str]:
    """Environment variables for our own programs, which must end with this process."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Kill this process when the process named in `PARENT` has ended, at once on Linux.

    Without the variable, nothing happens. Children of this process do not inherit it.
    """
    parent = os.environ.pop(PARENT, "")
    if parent.isdecimal():
        threading.Thread(target=_killed_after, args=[int(parent)], daemon=True).start()


def _killed_after(parent: int) -> None:
    try:
        poll = select.poll()
        poll.register(os.pidfd_open(parent), select.POLLIN)
        poll.poll()
    except (AttributeError, OSError):  # ended already, not Linux, or an old kernel
        with suppress(ProcessLookupError, PermissionError):  # the id may be another user's by now
            while True:
                os.kill(parent, 0)
                time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def child(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a program that calls `end_with_parent`, and end it at the end of the block.

    An exception in the block sends SIGTERM, and SIGKILL after `GRACE_SECONDS` or at a second
    exception. The program has its own process group: a signal to the group of this process reaches
    it once, through this process, and not again while it saves.

    Args:
        environment: variables in addition to this process's.
        **options: options of `subprocess.Popen`.
    """
    variables = {**os.environ, **for_children(), **(environment or {})}
    with ExitStack() as stack:
        with deferred():
            process = subprocess.Popen(command, env=variables, process_group=0, **options)
            stack.callback(_end, process)
        yield process


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin is None:
        process.terminate()
    else:
        process.stdin.close()  # kills the process group of `run_program`
    what = f"process {process.pid} to save and end; it is killed after {GRACE_SECONDS} s"
    try:
        with waiting(what), suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:
        process.kill()
        process.wait()


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
) -> int:
    """Run a program as `child` does; returns its exit code as a shell would."""
    with child(command, environment, **options) as process:
        return exit_code(process.wait())


def run_program(command: Sequence[str], folder: Path, log: Path) -> int:
    """Run a program that does not watch its parent; returns its exit code as a shell would.

    Its process group is killed when it has ended, on an exception, and when this process ends.

    Args:
        folder: working directory.
        log: file to which its output is appended.
    """
    words = ["sh", "-c", _UNTIL_THE_PIPE_CLOSES, "sh", *command]
    pipe, output = subprocess.PIPE, subprocess.STDOUT
    what = f"{' '.join(command[:2])}, which writes to {log}"
    with log.open("ab") as file, waiting(what):
        return run(words, cwd=folder, stdin=pipe, stdout=file, stderr=output)


def exit_code(code: int) -> int:
    """The exit code as a shell reports it: 128 + n for death by signal n."""
    return SIGNAL_BASE - code if code < 0 else code


def described(code: int) -> str:
    """`exit code 3`, or `exit code 137, SIGKILL`."""
    names = {SIGNAL_BASE + number: f", {number.name}" for number in signal.Signals}
    return f"exit code {code}{names.get(code, '')}"


def last_lines(log: Path, number: int = 1, start: int = 0) -> str:
    """The last lines of a program's log, from byte `start` on, for an error message."""
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-number:]) or "no output"


def train_locally(config_file: Path, processes: int = 1, options: Sequence[str] = ()) -> None:
    """Run `d2plm train` with the composed configuration in `config_file`, under torchrun if needed.

    Further command-line words, such as `--module mine.py`, are in `options`. Raises `LaunchError`
    if training fails, after its own message has been printed.
    """
    left = config_file.with_name(".torchrun")  # workers' errors; also removes a killed run's
    torchrun = [
        *("-m", "d2plm.launch.elastic", "--standalone", "--local-addr=localhost"),
        *(f"--log-dir={left}", f"--nproc-per-node={processes}"),
    ]
    train = ["-m", "d2plm", "train", f"--config-file={config_file}", *options]
    command = [sys.executable, *(torchrun if processes > 1 else ()), *train]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, left, ignore_errors=True)
        stack.enter_context(handled(lambda *_: signal.raise_signal(signal.SIGTERM), signal.SIGUSR1))
        code = run(command, {**_for_training(processes), **_through_loopback()})
    if code:
        more = "its own message is above"
        if code > SIGNAL_BASE:
            more = "the same command resumes it; SIGKILL usually means that memory ran out"
        raise LaunchError(f"training ended with {described(code)}; {more}", code)


def _through_loopback() -> dict[str, str]:
    """Keep gloo from resolving this machine's name, which may be unknown or point elsewhere."""
    names = (name for _, name in socket.if_nameindex() if name.startswith("lo"))  # lo0 on macOS
    name = os.environ.get(GLOO_INTERFACE) or next(names, None)
    return {} if name is None else {GLOO_INTERFACE: name}


def _for_training(shares: int) -> dict[str, str]:
    """Variables for one of `shares` concurrent training programs."""
    allocator = {name: os.environ.get(name, value) for name, value in ALLOCATOR.items()}
    cores = int(os.environ.get("OMP_NUM_THREADS") or usable_cores())
    return {**allocator, "OMP_NUM_THREADS": str(max(cores // shares, 1))}


@dataclass(frozen=True)
class Job:
    """Commands to run one after another, each after the previous one has succeeded; see `child`.

    Their output goes to the file `log`, which is replaced if it exists.
    """

    name: str
    commands: Sequence[Sequence[str]]
    log: Path


def run_jobs(jobs: Sequence[Job], parallel: int) -> Iterator[Job]:
    """Run `parallel` jobs at a time with equal shares of the cores; yields finished jobs.

    Jobs that are still running when the iteration ends, for any reason, are terminated. Raises
    `LaunchError` if a command fails; its output is in the job's log.
    """
    environment, queue = _for_training(parallel), deque(jobs)
    running: list[tuple[Job, Generator[None, None, None]]] = []
    with ExitStack() as stack:
        while queue or running:
            while queue and len(running) < parallel:
                job = queue.popleft()
                running.append((job, stack.enter_context(closing(_steps(job, environment)))))
            time.sleep(POLL_SECONDS)
            for job, steps in list(running):
                if next(steps, True):
                    running.remove((job, steps))
                    yield job


def _steps(job: Job, environment: Mapping[str, str]) -> Generator[None, None, None]:
    """Run a job's commands; yields while one is running. Closing the generator ends it."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("wb") as log:
        for command in job.commands:
            with (
                child(command, environment, stdout=log, stderr=subprocess.STDOUT) as process,
                waiting(f"{job.name}, which writes to {job.log}"),
            ):
                while process.poll() is None:
                    yield
            if process.returncode:
                raise LaunchError(
                    f"{job.name}: {' '.join(command)} ended with "
                    f"{described(exit_code(process.returncode))} ({last_lines(job.log)}); see its "
                    f"output in {job.log}; the same command continues where it stopped"
                )
