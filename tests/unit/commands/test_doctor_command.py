"""What `d2plm doctor` prints, and how it exits."""

import json
from pathlib import Path

import pytest

from d2plm.cli import main
from tests.cluster import Cluster
from tests.conftest import Captured, MonkeyPatch


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A machine that knows of no cluster and no server."""
    for name in ("KUBECONFIG", "KFP_HOST", "MLFLOW_TRACKING_URI", "D2PLM_IMAGE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOME", str(tmp_path))
    absent = str(tmp_path / ".kube" / "config")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", absent)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_cluster_the_machine_alone_is_checked(machine: Path, capsys: Captured) -> None:
    assert main(["doctor", "tracking=none"]) == 0
    *lines, _, _ = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "warning", "skipped"}
    assert main(["doctor", "tracking=none", "cluster=true"]) == 1
    assert not any(machine.iterdir())


def test_json_is_a_list_and_a_failure_exits_with_1(machine: Path, capsys: Captured) -> None:
    (machine / "config").write_text("")
    words = ["doctor", "--json", "tracking.uri=http://127.0.0.1:9", "timeout_seconds=1"]
    assert main(words) == 1
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert all(list(row) == ["check", "status", "found", "fix"] for row in rows)
    assert {row["status"] for row in rows} <= {"ok", "warning", "failed", "skipped"}
    assert [row["check"] for row in rows if row["status"] == "failed"] == ["MLflow"]
    assert captured.err.strip().startswith("d2plm: error: 1 of ")


def test_a_cluster_is_checked(machine: Path, monkeypatch: MonkeyPatch, capsys: Captured) -> None:
    with Cluster(machine / "cluster") as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kube_config))
        for word in ("cluster=false", "launcher=local"):
            assert main(["doctor", "tracking=none", word]) == 0
        assert not cluster.api.requests
        capsys.readouterr()
        assert main(["doctor", "--json", "launcher=pytorchjob", "tracking=none"]) == 0
    rows = {row["check"]: row["status"] for row in json.loads(capsys.readouterr().out)}
    assert rows["API server"] == rows["permissions"] == rows["job"] == "ok"
    assert rows["GPUs"] == rows["claim d2plm-workspace"] == "skipped"  # unseen by the launcher
