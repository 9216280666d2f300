"""The checks of a machine, on folders and files that say what another machine would."""

import errno
import fcntl
import os
import shutil
import sys
import time
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from d2plm.core.errors import DataError
from d2plm.doctor import machine_checks
from d2plm.doctor.machine_checks import GIB
from d2plm.doctor.verdicts import Verdict, examine, ok
from tests.conftest import MonkeyPatch

Usage = namedtuple("Usage", "total used free")


def disk_of(monkeypatch: MonkeyPatch, free: float, total: float = 100 * GIB) -> None:
    usage = Usage(int(total), int(total - free), int(free))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_this_environment_has_what_d2plm_requires() -> None:
    assert machine_checks.python().status == "ok"
    assert machine_checks.mmseqs2().status == "ok"


def test_a_package_that_does_not_fit_fails_by_name(monkeypatch: MonkeyPatch) -> None:
    wanted = ["numpy>=99", "absent-package>=1", "rich>=1", "extra-package>=1; extra == 'dev'"]
    monkeypatch.setattr(machine_checks, "requires", lambda _: wanted)
    found = machine_checks.python()
    assert found.status == "failed"
    numpy = f"numpy>=99 (installed: {version('numpy')})"
    assert found.found == f"{numpy}, absent-package>=1 (installed: None)"


def test_without_torch_the_check_reports_it(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = machine_checks.torch_and_device("auto")
    assert found.status == "failed" and "cannot be imported" in found.found


@pytest.mark.parametrize(
    ("driver", "build", "wanted", "status"),
    [
        (False, None, "cpu", "ok"),
        (False, None, "cuda", "failed"),
        (False, "13.0", "auto", "ok"),
        (True, None, "cpu", "warning"),
        (True, None, "cuda", "failed"),
        (True, "13.0", "auto", "failed"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_reported(
    driver: bool,
    build: str | None,
    wanted: str,
    status: str,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
) -> None:
    if driver:
        (tmp_path / "version").write_text("580.1\n")
    monkeypatch.setattr(machine_checks, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = machine_checks.torch_and_device(wanted)
    assert found.status == status
    assert ("driver 580.1" in found.found) is driver


def cuda_machine(monkeypatch: MonkeyPatch, ones: Any) -> None:
    for name, answer in (
        *(("is_available", True), ("device_count", 2), ("get_device_name", "H100")),
        ("is_bf16_supported", True),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(torch, "ones", ones)


def test_devices_are_counted_and_described(monkeypatch: MonkeyPatch) -> None:
    square = torch.ones(2, 2)
    cuda_machine(monkeypatch, lambda *_, device: square)
    found = machine_checks.torch_and_device("cuda")
    assert found.status == "ok" and "2 × H100, trains in bf" in found.found


def test_a_device_that_does_not_compute_fails(monkeypatch: MonkeyPatch) -> None:
    def broken(*_: int, device: str) -> torch.Tensor:
        raise RuntimeError("no kernel image is available\nmore")

    cuda_machine(monkeypatch, broken)
    found = machine_checks.torch_and_device("cuda")
    assert found.status == "failed"
    assert found.found.endswith("cuda:0: no kernel image is available")


def test_without_mmseqs2_the_check_fails(monkeypatch: MonkeyPatch) -> None:
    def none() -> Path:
        raise DataError("MMseqs2 not found")

    monkeypatch.setattr(machine_checks, "find_mmseqs", none)
    found = examine({"MMseqs2": machine_checks.mmseqs2}, 10)["MMseqs2"]
    assert found == Verdict("failed", "MMseqs2 not found")


def test_a_missing_compiler_is_a_warning_unless_nothing_is_compiled(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert machine_checks.compiler("cpu", "auto").status == "warning"
    assert machine_checks.compiler("cpu", False).status == "skipped"
    monkeypatch.setenv("CXX", "not-there")
    assert "CXX=not-there" in machine_checks.compiler("cpu", True).found


def test_a_compiler_without_pythons_headers_is_not_enough(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.touch(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert "Python's headers" in machine_checks.compiler("cpu", "auto").found
    (tmp_path / "Python.h").touch()
    assert machine_checks.compiler("cpu", "auto").status == "ok"


def test_more_threads_than_cores_are_warned_of(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("d2plm.core.machine.available_cpus", lambda: 64)
    monkeypatch.setattr("d2plm.core.machine.cgroup_limits", lambda: (2.0, 2**50))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = machine_checks.processor_and_memory()
    assert found.status == "warning"
    assert found.fix == "export OMP_NUM_THREADS=2, or unset it"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert machine_checks.processor_and_memory().status == "ok"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert machine_checks.processor_and_memory().status == "ok"


def test_too_little_memory_is_warned_of(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "cgroup_limits", lambda: (None, GIB))
    found = machine_checks.processor_and_memory()
    assert found.status == "warning" and " 1.0 of " in found.found


@pytest.mark.parametrize(("free", "status"), [(50, "ok"), (5, "warning"), (0.1, "failed")])
def test_a_full_disk_is_reported(
    free: float, status: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    disk_of(monkeypatch, free * GIB)
    assert machine_checks.disk(tmp_path, "work_dir").status is status


def test_a_missing_folder_is_not_made(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    assert str(tmp_path) in machine_checks.disk(folder, "work_dir").found
    assert machine_checks.file_locks(folder).status == "ok"
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    found = machine_checks.disk(tmp_path, "work_dir")
    assert found.status == "failed" and "Permission denied" in found.found
    assert "Permission denied" in machine_checks.file_locks(tmp_path).found


def test_locks_that_do_not_lock_are_warned_of(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", lambda *_: None)
        assert "two processes can hold the same lock" in machine_checks.file_locks(tmp_path).found

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert "No locks available" in machine_checks.file_locks(tmp_path).found


def test_little_shared_memory_is_warned_of(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    disk_of(monkeypatch, free=1, total=64 * 2**20)
    found = machine_checks.shared_memory(tmp_path)
    assert found.status == "warning" and found.found.startswith("64 MiB")
    assert machine_checks.shared_memory(tmp_path / "absent").status == "skipped"


def test_a_check_that_breaks_or_hangs_does_not_keep_the_others_back() -> None:
    def breaks() -> Verdict:
        raise ZeroDivisionError("of https://me:secret@host\nmore")

    def hangs() -> Verdict:
        time.sleep(5)
        return ok("late")

    began = time.monotonic()
    found = examine({"breaks": breaks, "hangs": hangs, "works": lambda: ok("well")}, 0.3)
    assert time.monotonic() - began < 3
    assert list(found) == ["breaks", "hangs", "works"]
    assert found["breaks"].found == "the check crashed: ZeroDivisionError: of https://***@host"
    assert found["hangs"].found == "no answer within 0.3 s"
    assert found["works"] == ok("well")
