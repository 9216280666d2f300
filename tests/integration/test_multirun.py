"""d2plm train --multirun: the runs, their table, and one MLflow run over theirs."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.commands import d2plm
from tests.integration.conftest import Prepared

pytestmark = pytest.mark.thorough  # trains several models


def test_a_sweep_trains_every_combination_under_one_run(prepared: Prepared, tmp_path: Path) -> None:
    work_dir = tmp_path / "a sweep"
    words = [
        *("train", "--multirun", "experiment=debug", f"work_dir='{work_dir}'", "parallel=2"),
        *(f"data.prepared_dir='{prepared.work_dir / 'data'}'", "trainer.max_steps=2"),
        *("trainer.seed=1,2", "callbacks.evaluation.sequences=4"),
    ]
    result = d2plm(*words)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = work_dir / "multirun" / "trainer.seed"
    results = json.loads((folder / "sweep.json").read_text())
    assert {row["name"] for row in results["runs"]} == {"trainer.seed=1", "trainer.seed=2"}
    best, other = (row["validation_nelbo"] for row in results["runs"])
    assert best < other
    assert results["best"] == results["runs"][0]["name"]
    assert (folder / "sweep.md").read_text() in result.stdout
    for seed in (1, 2):
        assert (folder / f"trainer.seed={seed}" / "model" / "model.safetensors").is_file()
        assert f"seed: {seed}\n" in (folder / f"trainer.seed={seed}" / "config.yaml").read_text()

    client = MlflowClient(tracking_uri=f"sqlite:///{work_dir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("d2plm-diffusion")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert {run.info.run_name for run in children} == {"trainer.seed=1", "trainer.seed=2"}
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert parent.data.params == {"trainer.seed": "1, 2"}
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {
        "sweep.json",
        "sweep.md",
    }
    assert all("validation/nelbo" in run.data.metrics for run in children)
