"""The cores and the memory that this process may use, whatever the machine has.

A container sees all cores of its node; a program that starts as many threads as there are spends
its share of them on waiting.
"""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
_UNLIMITED = 2**60  # version 1 of cgroups writes a huge number for none


def usable_cores() -> int:
    """CPUs that this process may use at once: by its affinity and its control groups' quota."""
    quota, _ = cgroup_limits()
    return available_cpus() if quota is None else max(min(available_cpus(), int(quota)), 1)


def limit_threads() -> None:
    """Have torch, once it is imported, start no more threads than a quota leaves cores.

    It looks at the affinity alone. What the user has set stays.
    """
    if usable_cores() < available_cpus():
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def available_cpus() -> int:
    """CPUs that this process may use, where the system tells; else those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_limits(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> tuple[float | None, int | None]:
    """(cores, bytes) that the control groups of this process leave it; None: no limit.

    Args:
        root: where the groups are mounted.
        own: file that names this process's.
    """
    cores: list[float] = []
    memory: list[int] = []
    for folder in _own_groups(root, own):
        quota, _, period = first_text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cores.append(int(quota) / int(period))
        limit = first_text(folder / "memory.max")
        if limit.isdigit():
            memory.append(int(limit))
    quota = first_text(root / "cpu/cpu.cfs_quota_us")  # version 1 of cgroups
    if quota.isdigit():  # -1 is none
        cores.append(int(quota) / int(first_text(root / "cpu/cpu.cfs_period_us") or 100_000))
    limit = first_text(root / "memory/memory.limit_in_bytes")
    if limit.isdigit() and int(limit) < _UNLIMITED:
        memory.append(int(limit))
    return min(cores, default=None), min(memory, default=None)


def _own_groups(root: Path, own: Path) -> Iterator[Path]:
    """This process's group and those above it, in each of which a limit may stand."""
    lines = own.read_text().splitlines() if own.exists() else []
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    folder = root / path.strip("/")
    yield folder
    while folder != root and root in folder.parents:
        folder = folder.parent
        yield folder


def first_text(file: Path) -> str:
    """A file's first line, or nothing where there is none to read."""
    try:
        return file.read_text().partition("\n")[0].strip()
    except OSError:
        return ""
