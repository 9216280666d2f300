"""A sweep: all runs are checked first, tracked below one run, and reduced to files."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from d2plm.assembly.sweep import Sweep, one_run, run_sweep
from d2plm.config import compose
from d2plm.core.errors import ConfigError
from tests.conftest import Captured, MonkeyPatch

Runs = dict[str, Any]


@pytest.fixture
def executed(monkeypatch: MonkeyPatch) -> dict[str, Any]:
    """The runs that would have been started, in place of starting them."""
    found: dict[str, Any] = {}

    def execute(runs: Mapping[str, Any], commands: Any, parallel: int) -> None:
        found.update(runs)

    monkeypatch.setattr("d2plm.assembly.sweep._run_here", execute)
    monkeypatch.setattr("d2plm.assembly.sweep.forecast", lambda config: {"steps": "1"})
    return found


def sweep(tmp_path: Path, *words: str) -> dict[str, Any]:
    base = [f"work_dir={tmp_path}", f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}", *words]
    runs = {
        name: one_run(compose("compare", [*base, f"paradigm={name}"]), name, tmp_path / name)
        for name in ("diffusion", "flow_matching")
    }
    listed = Sweep(
        *(runs["diffusion"], runs, ("train", "evaluate")),
        varied={"paradigm": runs},
        results=tmp_path / "results",
        reduce=lambda: {"best": "diffusion"},
        table=lambda document: f"| {document['best']} |",
        plot=lambda document, file: file.touch(),
    )
    return dict(run_sweep(listed))


def test_runs_have_a_parent(
    executed: Runs, tmp_path: Path, new_mlflow_store: Path, capsys: Captured
) -> None:
    shutil.copy(new_mlflow_store, tmp_path)
    assert sweep(tmp_path) == {"best": "diffusion"}
    assert capsys.readouterr().out == "| diffusion |\n"
    tracking = [run.tracking for run in executed.values()]
    assert [one.run_name for one in tracking] == ["diffusion", "flow_matching"]
    assert {one.experiment for one in tracking} == {"d2plm-diffusion"}
    (parent,) = {one.parent_run_id for one in tracking}
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.get_run(parent).data.params == {"paradigm": "diffusion, flow_matching"}
    files = {file.path for file in client.list_artifacts(parent)}
    assert files == {f"results.{suffix}" for suffix in ("json", "md", "png")}


def test_bad_runs_are_not_started(executed: Runs, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def forecast(config: Any) -> None:
        raise ConfigError("impossible")

    monkeypatch.setattr("d2plm.assembly.sweep.forecast", forecast)
    with pytest.raises(ConfigError, match=r"no run was started\. diffusion and 1 more: impossible"):
        sweep(tmp_path)
    assert not executed and not any(tmp_path.iterdir())


def test_a_dry_run_executes_and_writes_nothing(executed: Runs, tmp_path: Path) -> None:
    forecasts = sweep(tmp_path, "dry_run=true")
    assert forecasts == {"diffusion": {"steps": "1"}, "flow_matching": {"steps": "1"}}
    assert not executed and not any(tmp_path.iterdir())
