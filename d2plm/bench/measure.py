"""Measuring a piece of work in a process of its own.

A fresh process has no memory of what was measured before: its peak is the work's own. CPU seconds
are given beside wall seconds, as they mean something on a machine that others use, too.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from d2plm.core.errors import BenchError, D2PLMError


@dataclass(frozen=True)
class Measured:
    """What a piece of work took.

    Attributes:
        result: what it returned.
        wall_seconds: time on the clock.
        cpu_seconds: time on this process's CPUs, children left out.
        peak_bytes: most memory that this process held at once.
        children_peak_bytes: the same of the largest of its children.
    """

    result: Any
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int
    children_peak_bytes: int


def in_new_process(module: str, work: str, **arguments: Any) -> Measured:
    """Run `work` of `module` (whose `__main__` part calls `serve`) with arguments of JSON.

    Raises:
        BenchError: if it fails; what it wrote has gone to standard error.
    """
    command = [sys.executable, "-m", module, work, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{work} of {module} failed (exit code {done.returncode}), see above")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def serve(works: dict[str, Callable[..., Any]]) -> None:
    """The other side of `in_new_process`: do the work that the command line names."""
    work, arguments = works[sys.argv[1]], json.loads(sys.argv[2])
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        result = work(**arguments)
    except D2PLMError as error:
        raise SystemExit(f"d2plm: error: {error}") from None
    measured = Measured(
        result=result,
        wall_seconds=time.perf_counter() - wall,
        cpu_seconds=time.process_time() - cpu,
        peak_bytes=peak_bytes(),
        children_peak_bytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    )
    print(json.dumps(asdict(measured)))


def peak_bytes() -> int:
    """Most memory that this process held at once."""
    # ru_maxrss would count what the parent held when it started this process.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
