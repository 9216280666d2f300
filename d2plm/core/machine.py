"""The cores and memory that this process may use, and a description of the machine for reports.

A container sees all cores of its node; a program that starts a thread for each of them spends most
of its quota on waiting.
"""

import getpass
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

DESCRIBED = ("d2plm", "torch", "transformers", "accelerate", "pytorch-lightning")

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
_UNLIMITED = 2**60  # version 1 of cgroups writes a huge number for no limit


def usable_cores() -> int:
    """CPUs that this process may use, given its affinity and the quota of its cgroups."""
    quota, _ = cgroup_limits()
    return available_cpus() if quota is None else max(min(available_cpus(), int(quota)), 1)


def user_name() -> str | None:
    """The user's name; None for a user id without a name, as in containers."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


def use_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if the locale has another encoding.

    Otherwise file names and contents from other processes or machines would be misread or rejected.
    The mode is the default of Python 3.15.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # of the processes that this one starts
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606


def configure_home() -> None:
    """Set HOME for a user without one, such as an id without a name: MLflow's import would fail."""
    if os.path.expanduser("~") == "~":
        from tempfile import gettempdir  # not in the 0.2 s of --help

        os.environ["HOME"] = gettempdir()


def configure_threads() -> None:
    """Limit torch's threads to the quota of cores, and the time that they wait without sleeping.

    Call this before importing torch. The user's settings are kept. A waiting thread that occupies
    the core needed by another one delays it at every parallel region: with other work on one of two
    cores, steps took up to 40 times as long as on one thread (docs/performance.md).
    """
    if usable_cores() < available_cpus():  # torch considers only the affinity
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    if "OMP_WAIT_POLICY" not in os.environ:  # libgomp's default is 300 times as large
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def available_cpus() -> int:
    """CPUs in the affinity of this process, or all CPUs on systems without affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_limits(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> tuple[float | None, int | None]:
    """(cores, bytes) that the cgroups of this process allow; None: no limit.

    `root` is their mount point, and `own` a file that names the cgroup of this process.
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
    if quota.isdigit():  # -1: no limit
        cores.append(int(quota) / int(first_text(root / "cpu/cpu.cfs_period_us") or 100_000))
    limit = first_text(root / "memory/memory.limit_in_bytes")
    if limit.isdigit() and int(limit) < _UNLIMITED:
        memory.append(int(limit))
    return min(cores, default=None), min(memory, default=None)


def _own_groups(root: Path, own: Path) -> list[Path]:
    """The cgroup of this process and its parents, each of which may have a limit."""
    lines = own.read_text().splitlines() if own.exists() else []
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    folder = root / path.strip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def first_text(file: Path) -> str:
    """The first line of a file; empty if it cannot be read."""
    try:
        return file.read_text().partition("\n")[0].strip()
    except OSError:
        return ""


def machine() -> dict[str, Any]:
    """Processor, cores, device and versions, on which measurements depend."""
    import torch

    from d2plm.core.versions import installed

    cuda = torch.cuda.is_available()
    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = re.findall(r"model name\s*: (.*)", described)
    return {
        "platform": platform.platform(),
        "processor": names[0] if names else platform.processor(),
        "usable_cores": usable_cores(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {name: found for name in DESCRIBED if (found := installed(name))},
    }
