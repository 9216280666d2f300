"""The checks of a machine, on folders and files that say what another machine would."""

import errno
import fcntl
import shutil
import sys
import time
from collections import namedtuple
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from d2plm.doctor import machine_checks
from d2plm.doctor.machine_checks import GIB
from d2plm.doctor.verdicts import examine, ok
from tests.conftest import MonkeyPatch

Usage = namedtuple("Usage", "total used free")


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


@pytest.mark.parametrize(
    ("driver", "build", "wanted", "status"),
    [
        (False, "", "cpu", "ok"),
        (False, "", "cuda", "failed"),
        (False, "13.0", "auto", "ok"),
        (True, "", "cpu", "warning"),
        (True, "13.0", "auto", "failed"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_reported(
    tmp_path: Path, monkeypatch: MonkeyPatch, driver: bool, build: str, wanted: str, status: str
) -> None:
    if driver:
        (tmp_path / "version").write_text("580.1\n")
    monkeypatch.setattr(machine_checks, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", build or None)
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


def test_a_device_is_counted_described_and_made_to_compute(monkeypatch: MonkeyPatch) -> None:
    square = torch.ones(2, 2)
    cuda_machine(monkeypatch, lambda *_, device: square)
    found = machine_checks.torch_and_device("cuda")
    assert found.status == "ok" and "2 × H100, trains in bf" in found.found
    cuda_machine(monkeypatch, Mock(side_effect=RuntimeError("no kernel image is available\nmore")))
    found = machine_checks.torch_and_device("cuda")
    assert found.status == "failed"
    assert found.found.endswith("cuda:0: no kernel image is available")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert machine_checks.torch_and_device("auto").status == "failed"


def test_a_compiler_needs_headers(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert machine_checks.compiler("cpu", "auto").status == "warning"
    assert machine_checks.compiler("cpu", False).status == "skipped"
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    assert "CXX=" in machine_checks.compiler("cpu", True).found
    (tmp_path / "g++").touch(0o755)
    assert "Python's headers" in machine_checks.compiler("cpu", "auto").found
    (tmp_path / "Python.h").touch()
    assert machine_checks.compiler("cpu", "auto").status == "ok"


@pytest.mark.parametrize(
    ("threads", "memory", "said"),
    [("3", 2**50, "OMP_NUM_THREADS=2"), ("2", 2**50, ""), ("", 2**50, ""), ("", GIB, " 1.0 of ")],
)
def test_more_threads_than_cores_and_little_memory_are_warned_of(
    monkeypatch: MonkeyPatch, threads: str, memory: int, said: str
) -> None:
    monkeypatch.setattr("d2plm.core.machine.available_cpus", lambda: 64)
    for module in ("d2plm.core.machine", "d2plm.doctor.machine_checks"):
        monkeypatch.setattr(f"{module}.cgroup_limits", lambda: (2.0, memory))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    found = machine_checks.processor_and_memory()
    assert found.status == ("warning" if said else "ok") and said in f"{found.found} {found.fix}"


@pytest.mark.parametrize(("free", "status"), [(50, "ok"), (5, "warning"), (0.1, "failed")])
def test_a_full_disk(tmp_path: Path, monkeypatch: MonkeyPatch, free: float, status: str) -> None:
    total, left = 100 * GIB, int(free * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total, total - left, left))
    assert machine_checks.disk(tmp_path, "work_dir").status is status


def test_an_unwritable_folder_and_useless_locks(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "mine"
    assert str(tmp_path) in machine_checks.disk(folder, "work_dir").found
    assert machine_checks.file_locks(folder).status == "ok"
    assert not any(tmp_path.iterdir())
    refuse = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    found = machine_checks.disk(tmp_path, "work_dir")
    assert found.status == "failed" and "Permission denied" in found.found
    assert "Permission denied" in machine_checks.file_locks(tmp_path).found
    monkeypatch.undo()
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert "two processes can hold the same lock" in machine_checks.file_locks(tmp_path).found
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks")))
    assert "No locks" in machine_checks.file_locks(tmp_path).found


def test_a_check_that_breaks_or_hangs_does_not_keep_the_others_back() -> None:
    checks: dict[str, Any] = {
        "breaks": Mock(side_effect=ZeroDivisionError("of https://me:secret@host\nmore")),
        "hangs": lambda: time.sleep(5),
        "works": lambda: ok("well"),
    }
    began = time.monotonic()
    found = examine(checks, 0.3)
    assert time.monotonic() - began < 3
    assert list(found) == ["breaks", "hangs", "works"]
    assert found["breaks"].found == "the check crashed: ZeroDivisionError: of https://***@host"
    assert found["hangs"].found == "no answer within 0.3 s"
    assert found["works"] == ok("well")


def test_little_shared_memory_is_warned_of(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 * 2**20, 0, 64 * 2**20))
    assert machine_checks.shared_memory(tmp_path).status == "warning"
    assert machine_checks.shared_memory(tmp_path / "absent").status == "skipped"
