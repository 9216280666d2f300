"""d2plm train --multirun: a process for each run, their table, and one MLflow run over theirs."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from d2plm.cli import main
from tests.integration.conftest import Prepared

pytestmark = pytest.mark.thorough  # trains two models


def test_a_sweep_trains_every_combination_under_one_run(prepared: Prepared, tmp_path: Path) -> None:
    words = [
        *("train", "--multirun", "experiment=debug", f"work_dir='{tmp_path}'", "parallel=2"),
        *(f"data.prepared_dir='{prepared.work_dir / 'data'}'", "trainer.max_steps=2"),
        *("trainer.seed=1,2", "callbacks.evaluation.sequences=4"),
    ]
    assert main(words) == 0
    folder, names = tmp_path / "multirun" / "trainer.seed", {"trainer.seed=1", "trainer.seed=2"}
    rows = json.loads((folder / "sweep.json").read_text())["runs"]
    assert {row["name"] for row in rows} == names
    assert rows[0]["validation_nelbo"] < rows[1]["validation_nelbo"]
    for name in names:
        assert (folder / name / "model" / "model.safetensors").is_file()
        assert f"seed: {name[-1]}\n" in (folder / name / "config.yaml").read_text()
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert {run.info.run_name for run in children} == names
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert all("validation/nelbo" in run.data.metrics for run in children)
    assert {run.info.status for run in runs} == {"FINISHED"}
