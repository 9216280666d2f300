"""Starting training on this machine with torchrun and ending as it ends; several runs at once."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from d2plm.core.errors import LaunchError
from d2plm.core.machine import usable_cores
from d2plm.core.signals import deferred
from d2plm.launch.elastic import GRACE_SECONDS

# glibc gives large blocks back to the kernel at once, and a CPU's training step then spends its
# time on page faults. Keep them.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
POLL_SECONDS = 0.2
SIGNAL_BASE = 128  # a shell's code for a death by signal n is 128 + n


def train_locally(config_file: Path, processes: int = 1) -> None:
    """Run `d2plm train` under torchrun with a composed configuration.

    The configuration is composed once, here, and not in every worker.

    Raises:
        LaunchError: if training fails; its own message has been printed.
    """
    command = [
        *(sys.executable, "-m", "d2plm.launch.elastic"),
        *("--standalone", f"--nproc-per-node={processes}"),
        *("-m", "d2plm", "train", f"--config-file={config_file}"),
    ]
    cores = int(os.environ.get("OMP_NUM_THREADS") or usable_cores())
    settings = {**ALLOCATOR, **os.environ, "OMP_NUM_THREADS": str(max(cores // processes, 1))}
    child: subprocess.Popen[bytes] | None = None
    try:
        with deferred():
            child = subprocess.Popen(command, env=settings)
        code = child.wait()
    except BaseException:
        if child is not None:
            _end(child)
        raise
    if code > SIGNAL_BASE:
        name = signal.Signals(code - SIGNAL_BASE).name
        raise LaunchError(
            f"training was ended by {name} (exit code {code}); the same command resumes it, and "
            "SIGKILL usually means that memory ran out",
            code,
        )
    if code != 0:
        raise LaunchError(
            f"training ended with exit code {code}; its own message stands above", code
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and end it where it does not."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    process.kill()
    process.wait()


@dataclass(frozen=True)
class Job:
    """Commands to run one after another.

    Attributes:
        name: in messages.
        commands: the next one starts when the last one has succeeded.
        log: file that their output goes to; an older one is replaced.
    """

    name: str
    commands: Sequence[Sequence[str]]
    log: Path


def run_jobs(jobs: Sequence[Job], parallel: int) -> Iterator[Job]:
    """Run jobs, `parallel` at a time, each on its share of the cores; gives each that is done.

    What is still running when this ends, for whatever reason, is ended.

    Raises:
        LaunchError: if a command fails; its output is in the job's log.
    """
    threads = str(max(usable_cores() // parallel, 1))
    environment = {**ALLOCATOR, **os.environ, "OMP_NUM_THREADS": threads}
    waiting = deque(jobs)
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                with deferred():
                    running.append(_Running(waiting.popleft(), environment))
            time.sleep(POLL_SECONDS)
            for one in list(running):
                if one.is_done():
                    running.remove(one)
                    yield one.job
    finally:
        for one in running:
            one.end()


class _Running:
    """A job that has been started."""

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        self.job, self._environment = job, environment
        self._commands = deque(job.commands)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self._output: IO[bytes] = open(job.log, "wb")  # noqa: SIM115  # closed where the job ends
        self._start_next()

    def is_done(self) -> bool:
        """Whether all commands have succeeded; starts the next one where one has."""
        code = self._process.poll()
        if code is None:
            return False
        if code != 0:
            lines = self.job.log.read_text(errors="replace").strip().splitlines()
            raise LaunchError(
                f"{self.job.name}: {' '.join(self._command)} ended with exit code {code} "
                f"({lines[-1] if lines else 'no output'}); all of its output is in {self.job.log}, "
                "and the same command goes on where it stopped"
            )
        if self._commands:
            with deferred():
                self._start_next()
            return False
        self._output.close()
        return True

    def end(self) -> None:
        """Stop it: a training saves its step first."""
        _end(self._process)
        self._output.close()

    def _start_next(self) -> None:
        self._command = self._commands.popleft()
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._output, stderr=subprocess.STDOUT
        )
