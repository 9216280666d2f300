"""Starting training on this machine with torchrun, and ending as it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from d2plm.errors import LaunchError

GRACE_SECONDS = 60
# glibc gives large blocks back to the kernel at once, and a CPU's training step then spends its
# time on page faults. Keep them.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
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
    threads = max((os.cpu_count() or 1) // processes, 1)
    settings = {**ALLOCATOR, "OMP_NUM_THREADS": str(threads), **os.environ}
    with subprocess.Popen(command, env=settings) as child:
        try:
            code = child.wait()
        except BaseException:
            child.terminate()
            try:
                child.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    if code > SIGNAL_BASE:
        name = signal.Signals(code - SIGNAL_BASE).name
        raise LaunchError(
            f"training was ended by {name} (exit code {code}); the same command resumes it, and "
            "SIGKILL usually means that memory ran out"
        )
    if code != 0:
        raise LaunchError(f"training ended with exit code {code}; its own message stands above")
