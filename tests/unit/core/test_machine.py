"""The cores that a process may use: affinity and the quotas of control groups."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest

from d2plm.cli import main
from d2plm.core import machine
from tests.conftest import MonkeyPatch

# Of version 1 of control groups.
QUOTA, PERIOD = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"
MEMORY = "memory/memory.limit_in_bytes"


def groups(tmp_path: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, content in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    own = tmp_path / "own"
    own.write_text("0::/pods/mine\n")
    return tmp_path / "cgroup", own


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({"cpu.max": "max 100000\n", "memory.max": "max\n"}, (None, None)),
        ({"pods/mine/cpu.max": "150000 100000\n"}, (1.5, None)),
        ({"pods/memory.max": "4096\n", "pods/mine/memory.max": "8192\n"}, (None, 4096)),
        ({"cpu.max": "50000 100000\n", "memory.max": "1024\n"}, (0.5, 1024)),  # own namespace
        ({QUOTA: "200000\n", PERIOD: "100000\n", MEMORY: "2048\n"}, (2.0, 2048)),
        ({QUOTA: "-1\n", MEMORY: f"{2**63 - 4096}\n"}, (None, None)),
    ],
)
def test_the_tightest_limit_of_the_control_groups_counts(
    files: dict[str, str], limits: tuple[float | None, int | None], tmp_path: Path
) -> None:
    assert machine.cgroup_limits(*groups(tmp_path, files)) == limits


@pytest.mark.parametrize(
    ("quota", "cores", "given", "set_to"),
    [(None, 8, None, None), (2.5, 2, None, "2"), (0.5, 1, "5", "5"), (64.0, 8, None, None)],
)
def test_a_quota_limits_cores_and_threads_but_never_against_the_user(
    quota: float | None, cores: int, given: str | None, set_to: str | None, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_cpus", lambda: 8)
    monkeypatch.setattr(machine, "cgroup_limits", lambda: (quota, None))
    assert machine.usable_cores() == cores
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    machine.configure_threads()
    assert os.environ.get("OMP_NUM_THREADS") == set_to


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_waiting_threads_sleep_unless_told_not_to(given: dict[str, str], spins: str | None) -> None:
    with patch.dict(os.environ, given):
        for name in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} - set(given):
            os.environ.pop(name, None)
        machine.configure_threads()
        assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_a_user_without_a_home_gets_a_temporary_one(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    machine.configure_home()
    assert Path.home() != Path(tempfile.gettempdir())
    monkeypatch.delenv("HOME")
    with pytest.raises(RuntimeError, match="home"):
        Path.home()
    machine.configure_home()
    assert Path.home() == Path(tempfile.gettempdir())


def test_utf_8_in_a_locale_of_another_encoding(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "prötéins.fasta").write_text(">ä\nMKTAYIAKQR\n", encoding="utf-8")
    off = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    monkeypatch.chdir(tmp_path)
    assert main(["ingest", "input='prötéins.fasta'", "output='störe'"]) == 0
    call = [sys.executable, "-m", "d2plm", "data", "head", "store='störe'"]
    done = subprocess.run(call, cwd=tmp_path, env=os.environ | off, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "ä" in done.stdout.decode("utf-8")
