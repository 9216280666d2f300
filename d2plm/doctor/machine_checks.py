"""Checks of this machine: software, processor, memory and disks.

They change nothing except for temporary files. Thresholds are based on the demo.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement

from d2plm import __version__
from d2plm.core.errors import first_line
from d2plm.core.machine import available_cpus, cgroup_limits, first_text, usable_cores
from d2plm.core.versions import installed
from d2plm.data.homology import find_mmseqs, mmseqs_version
from d2plm.doctor.verdicts import Verdict, failed, ok, skipped, warning

GIB = 2**30
LITTLE_DISK = 10 * GIB  # checkpoints of a 150 M model take 2.4 GB each, and several are kept
NO_DISK = GIB // 2
LITTLE_SHARED_MEMORY = GIB // 4  # containers have 64 MiB by default
LITTLE_MEMORY = 4 * GIB  # the demo needs 3.1 GB at its peak

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # only read
NVIDIA_DRIVER = Path("/sys/module/nvidia/version")


def python() -> Verdict:
    """Whether the required packages have supported versions."""
    found = f"{platform.python_version()} at {sys.executable}, d2plm {__version__}"
    try:
        required = [Requirement(line) for line in requires("d2plm") or ()]
    except PackageNotFoundError:
        return warning(f"{found}, which is not installed", "make setup, or pip install -e .")
    needed = [one for one in required if not one.marker or one.marker.evaluate({"extra": ""})]
    unmet = [
        f"{one} (installed: {version})"
        for one in needed
        if (version := installed(one.name)) is None
        or not one.specifier.contains(version, prereleases=True)
    ]
    if unmet:
        return failed(", ".join(unmet), "pip install -r requirements.lock, or make setup")
    return ok(f"{found}, {len(needed)} required packages in supported versions")


def torch_and_device(wanted: str) -> Verdict:
    """Whether PyTorch can be imported and each device works; `wanted` is `trainer.device`."""
    try:
        import torch

        from d2plm.core.precision import resolve_precision
    except (ImportError, OSError) as error:  # OSError: a CUDA library is missing
        fix = "make setup, or pip install 'torch>=2.11,<2.14'; not needed to prepare data"
        return failed(f"cannot be imported ({first_line(error)})", fix)
    driver, cuda, devices = first_text(NVIDIA_DRIVER), torch.version.cuda, range(0)
    found = f"{torch.__version__}, CUDA {cuda or 'not built in'}, driver {driver or 'not loaded'}"
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
    elif driver or wanted == "cuda":
        return (failed if cuda or wanted == "cuda" else warning)(
            f"{found}, no device",
            "install torch built for CUDA and a driver not older than it; in a container, assign "
            "the GPU to it (--gpus all; resources.limits of a pod); or set trainer=cpu",
        )
    for index in devices:
        try:
            torch.ones(16, 16, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:  # torch has no kernels for it, or it is broken or in use
            fix = "check nvidia-smi; free the device, or install torch built for it"
            return failed(f"{found}, cuda:{index}: {first_line(error)}", fix)
    names = Counter(map(torch.cuda.get_device_name, devices)) or {"CPU": 1}
    precision = resolve_precision("auto", torch.device("cuda" if devices else "cpu"))
    found = ", ".join([found, *(f"{number} × {name}" for name, number in names.items())])
    return ok(f"{found}, trains in {str(precision).removeprefix('torch.')}")


def mmseqs2() -> Verdict:
    """The version of MMseqs2, which finds homologs; raises `DataError` if there is none."""
    binary = find_mmseqs()
    return ok(f"{mmseqs_version(binary)} at {binary}")


def compiler(wanted: str, setting: bool | str) -> Verdict:
    """Whether torch.compile finds a compiler and headers, by `trainer.device`, `.compile`."""
    variable, names = ("CC", ["gcc", "clang"]) if wanted == "cuda" else ("CXX", ["g++", "clang++"])
    named = os.environ.get(variable)
    found = next(filter(None, map(shutil.which, [named] if named else names)), None)
    if found and Path(sysconfig.get_path("include"), "Python.h").exists():
        return ok(f"{found}, for torch.compile")
    missing = "Python's headers" if found else f"{variable}={named}" if named else names[0]
    if setting is False:
        return skipped(f"no {missing}, which trainer.compile=false does not need")
    return warning(f"no {missing}: training is not compiled", "apt-get install g++ python3-dev")


def processor_and_memory() -> Verdict:
    """Cores and memory of the machine, and the container's limits on them."""
    cores, memory = available_cpus(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = min(cgroup_limits()[1] or memory, memory)
    found = f"{usable_cores()} of {cores} cores, {limit / GIB:.1f} of {memory / GIB:.1f} GiB memory"
    if limit < LITTLE_MEMORY:
        fix = "increase the container's memory, or lower data.token_budget"
        return warning(f"{found}: even the demo needs 3.1 GB", fix)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > usable_cores():
        fix = f"export OMP_NUM_THREADS={usable_cores()}, or unset it"
        return warning(f"{found}: OMP_NUM_THREADS requests {threads} threads", fix)
    return ok(found)


def disk(folder: Path, key: str) -> Verdict:
    """Whether the folder of `key`, or its nearest existing parent, is writable and has space."""
    place = existing(folder)
    fix = f"free space, change its permissions (pods: fsGroup), or choose another {key}"
    try:
        with tempfile.TemporaryFile(dir=place):
            usage = shutil.disk_usage(place)
    except OSError as error:
        return failed(f"{place} cannot be written ({error.strerror})", fix)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free at {place}"
    if usage.free < NO_DISK:
        return failed(found, fix)
    if usage.free < LITTLE_DISK:
        return warning(f"{found}: little for checkpoints", f"{fix}, or trainer.save_total_limit=1")
    return ok(found)


def file_locks(folder: Path) -> Verdict:
    """Whether a second process is denied a lock; some network file systems only pretend to lock."""
    place = existing(folder)
    fix = "run one preparation at a time in it, and store MLflow's SQLite elsewhere (tracking.uri)"
    try:
        with tempfile.TemporaryDirectory(dir=place) as temporary:
            file = Path(temporary) / "lock"
            with FileLock(file, blocking=False, fallback_to_soft=False):
                second = ["flock", "--nonblock", str(file), "true"]
                is_held = subprocess.run(second, capture_output=True).returncode == 1
    except (OSError, NotImplementedError) as error:
        return warning(f"cannot be tried at {place} ({first_line(error)})", fix)
    if not is_held:
        return warning(f"two processes can hold the same lock at {place}", fix)
    return ok(f"work at {place}")


def shared_memory(folder: Path = SHARED_MEMORY) -> Verdict:
    """Whether NCCL and the data loader's workers have enough shared memory."""
    if not folder.is_dir():
        return skipped(f"this system has no {folder}")
    size = shutil.disk_usage(folder).total
    found = f"{size / 2**20:,.0f} MiB at {folder}"
    if size < LITTLE_SHARED_MEMORY:
        fix = "docker run --shm-size=1g; in a pod, launcher.shared_memory=1Gi"
        return warning(f"{found}: several GPUs or loader workers need more", fix)
    return ok(found)


def existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
