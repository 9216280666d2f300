"""Training on this machine: torchrun in a child process that ends with this one."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from d2plm.core.errors import LaunchError
from d2plm.core.lifetime import for_children
from d2plm.core.machine import usable_cores
from d2plm.core.signals import deferred
from d2plm.launch.elastic import GRACE_SECONDS

# Makes glibc keep large blocks. Otherwise it returns them to the kernel at once, and a training
# step on CPU spends its time on page faults.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
SIGNAL_BASE = 128  # a shell reports death by signal n as 128 + n


def train_locally(config_file: Path, processes: int = 1) -> None:
    """Run `d2plm train` under torchrun with the composed configuration in `config_file`.

    Raises:
        LaunchError: if training fails; its own message has been printed.
    """
    command = [
        *(sys.executable, "-m", "d2plm.launch.elastic"),
        *("--standalone", f"--nproc-per-node={processes}"),
        *("-m", "d2plm", "train", f"--config-file={config_file}"),
    ]
    cores = int(os.environ.get("OMP_NUM_THREADS") or usable_cores())
    settings = {**ALLOCATOR, **os.environ, **for_children()}
    settings["OMP_NUM_THREADS"] = str(max(cores // processes, 1))
    child: subprocess.Popen[bytes] | None = None
    try:
        with deferred():
            child = subprocess.Popen(command, env=settings)
        code = child.wait()
    except BaseException:
        if child is not None:
            end_process(child)
        raise
    if code > SIGNAL_BASE:
        name = signal.Signals(code - SIGNAL_BASE).name
        raise LaunchError(
            f"training was ended by {name} (exit code {code}); the same command resumes it, and "
            "SIGKILL usually means that memory ran out",
            code,
        )
    if code != 0:
        raise LaunchError(f"training ended with exit code {code}; its own message is above", code)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, and kill it if it does not end in time."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    process.kill()
    process.wait()
