"""Running several jobs at a time on this machine, each a sequence of commands with its own log."""

import os
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from d2plm.core.errors import LaunchError
from d2plm.core.lifetime import for_children
from d2plm.core.machine import usable_cores
from d2plm.core.signals import deferred
from d2plm.launch.torchrun import ALLOCATOR, end_process

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """Commands to run one after another.

    Attributes:
        name: name in messages.
        commands: each starts after the previous one has succeeded.
        log: file for their output, replaced if it exists.
    """

    name: str
    commands: Sequence[Sequence[str]]
    log: Path


def run_jobs(jobs: Sequence[Job], parallel: int) -> Iterator[Job]:
    """Run jobs, `parallel` at a time with an equal share of the cores; yields finished jobs.

    Jobs that are still running when the iteration ends, for any reason, are terminated.

    Raises:
        LaunchError: if a command fails; its output is in the job's log.
    """
    threads = str(max(usable_cores() // parallel, 1))
    environment = {**ALLOCATOR, **os.environ, **for_children(), "OMP_NUM_THREADS": threads}
    waiting = deque(jobs)
    running: dict[subprocess.Popen[bytes], tuple[Job, Sequence[Sequence[str]]]] = {}

    def start(job: Job, commands: Sequence[Sequence[str]]) -> None:
        with deferred(), job.log.open("ab") as log:
            process = subprocess.Popen(
                commands[0], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            running[process] = job, commands

    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.popleft()
                job.log.parent.mkdir(parents=True, exist_ok=True)
                job.log.write_bytes(b"")
                start(job, job.commands)
            time.sleep(POLL_SECONDS)
            for process, (job, commands) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                if code != 0:
                    lines = job.log.read_text(errors="replace").strip().splitlines()
                    raise LaunchError(
                        f"{job.name}: {' '.join(commands[0])} ended with exit code {code} "
                        f"({lines[-1] if lines else 'no output'}); see its output in {job.log}; "
                        "the same command continues where it stopped"
                    )
                del running[process]
                if commands[1:]:
                    start(job, commands[1:])
                else:
                    yield job
    finally:
        for process in running:
            end_process(process)
