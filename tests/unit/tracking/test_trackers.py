"""Several trackers: each is read back from what it wrote, alone and beside the others."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from mlflow import MlflowClient

from d2plm.assembly.tracked_run import tracking_arguments
from d2plm.commands import train
from d2plm.config import compose
from d2plm.core.errors import ConfigError, DataError, TrackingError
from d2plm.data.store import SequenceStore
from d2plm.tracking.mlflow_run import RUN_FILE
from d2plm.tracking.runs import TRACKERS, tracking_run
from d2plm.tracking.tracker_run import Run
from d2plm.tracking.wandb_run import WANDB_RUN_FILE
from tests.commands import python_c
from tests.conftest import MonkeyPatch
from tests.unit.tracking.read_back import tensorboard_events, wandb_sessions

PARAMETERS = {"lr": 0.1, "layers": [1, 2], "uri": "http://ada:s3cret@host", "off": None, "on": True}
DESCRIPTION, SHOWN = "# of http://ada:s3cret@host", "# of http://***@host"


@pytest.fixture(autouse=True)
def surroundings(client: MlflowClient, monkeypatch: MonkeyPatch) -> None:
    """A store of the tests' own, no network, and nothing that a shell may have set."""
    for name in ("WANDB_API_KEY", "WANDB_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")


def tell(run: Run, steps: range, folder: Path) -> None:
    run.log_params(PARAMETERS)
    run.log_dataset("proteins:train", "0" * 40, "train", folder, {"num_rows": 5})
    run.set_tags({"data.digest": "0" * 64})
    run.describe("too early to tell")
    run.describe(DESCRIPTION)
    for step in steps:
        run.log_metrics({"loss": 1 / step}, step)
        run.log_metrics({"evaluation_loss": 2.0 * step}, step)
    run.log_metrics({"perplexity": 9.5})
    file = folder / "a [1] file.txt"
    file.write_text("content")
    run.log_file(file, "data")
    file.write_text("changed later")


def begin(folder: Path, **settings: Any) -> None:
    with tracking_run(folder, **settings):
        pass


def history(client: MlflowClient, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]


def test_each_tracker_is_complete(client: MlflowClient, output_dir: Path, tmp_path: Path) -> None:
    steps = range(1, 6)
    losses = [(step, 1 / step) for step in steps]
    with tracking_run(output_dir, trackers=TRACKERS, run_name="mine") as run:
        tell(run, steps, tmp_path)
    kept = json.loads((output_dir / RUN_FILE).read_text())["run_id"]
    logged = client.get_run(kept)
    assert (run.id, logged.info.run_name) == (kept, "mine")
    assert logged.data.params["uri"] == "http://***@host"
    assert logged.data.tags["data.digest"] == "0" * 64
    assert logged.data.tags["mlflow.note.content"] == SHOWN
    assert history(client, kept, "train/loss") == losses
    assert history(client, kept, "perplexity") == [(0, 9.5)]
    assert [a.path for a in client.list_artifacts(kept, "data")] == ["data/a [1] file.txt"]

    events = tensorboard_events(output_dir)
    assert events.scalars == {
        "train/loss": [(step, pytest.approx(1 / step, rel=1e-6)) for step in steps],  # single
        "train/evaluation_loss": [(step, 2.0 * step) for step in steps],
        "perplexity": [(0, 9.5)],
    }
    told = {"lr": 0.1, "layers": "[1, 2]", "uri": "http://***@host", "off": "None", "on": True}
    assert events.parameters == told
    assert events.texts["tags/data.digest"] == "0" * 64
    assert events.texts["description"] == SHOWN
    assert json.loads(events.texts["data/train/proteins:train"])["num_rows"] == 5

    (session,) = wandb_sessions(output_dir)
    kept = json.loads((output_dir / WANDB_RUN_FILE).read_text())["run_id"]
    shown = session.run.run_id, session.run.display_name, session.run.project, session.run.notes
    assert shown == (kept, "mine", "d2plm", SHOWN)
    assert session.exit_code == 0
    assert session.scalars == {
        "train/loss": losses,
        "train/evaluation_loss": [(step, 2.0 * step) for step in steps],
    }
    assert session.summary["perplexity"] == 9.5
    assert (session.config["uri"], session.config["lr"]) == ("http://***@host", 0.1)
    assert session.config["tags/data.digest"] == "0" * 64
    assert session.config["data/train/proteins:train"]["num_rows"] == 5
    assert "data/a [1] file.txt" in session.files
    (copy,) = output_dir.glob("wandb/offline-run-*/files/data/*.txt")
    assert copy.read_text() == "content"


def script(*words: str, body: str) -> "CompletedProcess[str]":
    imports = "import os, signal, sys; from pathlib import Path\n"
    imports += "from d2plm.tracking.runs import tracking_run\n"
    # Without the address of this process's W&B service, which a child would use.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    kept["WANDB_MODE"] = "offline"
    return python_c(imports + body, *words, environment=kept, seconds=120)


def test_a_killed_run_continues_in_the_same_runs(client: MlflowClient, output_dir: Path) -> None:
    killed = script(
        str(output_dir),
        body="""
with tracking_run(Path(sys.argv[1]), trackers=["mlflow", "tensorboard", "wandb"]) as run:
    run.log_metrics({"figure": 1.0})
    for step in range(1, 7):
        run.log_metrics({"loss": float(step)}, step)
        if step == 4:
            run.flush()  # a checkpoint
    os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    files = RUN_FILE, WANDB_RUN_FILE
    first = {file: json.loads((output_dir / file).read_text())["run_id"] for file in files}
    for seen in (6, 8):  # a resumed run may be killed before it has come as far as the first
        time.sleep(1)  # TensorBoard reads event files by name, which has the second and a number
        with tracking_run(output_dir, trackers=TRACKERS) as run:
            for step in range(5, seen + 1):
                run.log_metrics({"loss": -float(step)}, step)
        signed = [(s, float(s if s < 5 else -s)) for s in range(1, seen + 1)]
        assert tensorboard_events(output_dir).scalars == {
            "figure": [(0, 1.0)],
            "train/loss": signed,
        }
    assert first == {f: json.loads((output_dir / f).read_text())["run_id"] for f in files}
    assert [step for step, _ in history(client, first[RUN_FILE], "train/loss")][:4] == [1, 2, 3, 4]
    assert history(client, first[RUN_FILE], "train/loss")[-1] == (8, -8.0)
    # Of the session that was killed, W&B's own process has written whole blocks alone.
    sessions = [
        session
        for session in wandb_sessions(output_dir, killed=1)
        if session.scalars.get("train/loss", [(0, 0.0)])[0][0] == 5
    ]
    assert {session.run.run_id for session in sessions} == {first[WANDB_RUN_FILE]}
    steps = [[step for step, _ in session.scalars["train/loss"]] for session in sessions]
    assert steps == [[5, 6], [5, 6, 7, 8]]


def test_a_wandb_run_says_nothing_and_keeps_no_secret(tmp_path: Path) -> None:
    result = script(
        str(tmp_path / "run"),
        "tracking.uri=http://ada:s3cret@host",
        body="""
with tracking_run(Path(sys.argv[1]), trackers=["wandb"]) as run:
    run.log_params({"uri": sys.argv[2]})
    run.log_dataset(sys.argv[2], "0" * 40, "train", Path("store"), {})
    run.set_tags({"uri": sys.argv[2]})
    run.log_metrics({"loss": 1.0}, 1)
""",
    )
    assert result.returncode == 0
    assert result.stdout + result.stderr == ""
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert any(file.suffix == ".wandb" for file in files)
    assert [file for file in files if b"s3cret" in file.read_bytes()] == []


def test_an_exception_marks_the_wandb_run_failed_and_stays_in_sight(output_dir: Path) -> None:
    with (
        pytest.raises(ValueError, match="the cause"),
        tracking_run(output_dir, trackers=["tensorboard", "wandb"]) as run,
    ):
        run.log_metrics({"loss": 1.0}, 1)
        raise ValueError("the cause")
    assert not (output_dir / RUN_FILE).exists(), "MLflow was not chosen"
    assert [session.exit_code for session in wandb_sessions(output_dir)] == [1]
    assert tensorboard_events(output_dir).scalars == {"train/loss": [(1, 1.0)]}


def test_other_ranks_are_silent(output_dir: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with tracking_run(output_dir, trackers=TRACKERS) as run:
        assert (run.id, [*run.runs]) == (None, [])
        tell(run, range(1, 3), tmp_path)
    assert not output_dir.exists()


@pytest.mark.parametrize("trackers", [["mlflow", "wanb"], "mlflow", None, ["wandb", "wandb"]])
def test_trackers_are_a_list(trackers: Any, output_dir: Path, monkeypatch: MonkeyPatch) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ConfigError, match="trackers="):
            begin(output_dir, trackers=trackers)
    assert not output_dir.exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(name: str, output_dir: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard.writer", raising=False)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TrackingError, match=rf"install d2plm\[{name}\]"):
        begin(output_dir, trackers=[name])


@pytest.mark.parametrize("tracker", TRACKERS)
def test_damaged_and_unwritable_files(tracker: str, client: MlflowClient, output_dir: Path) -> None:
    file = output_dir / (RUN_FILE if tracker == "mlflow" else WANDB_RUN_FILE)
    output_dir.mkdir()
    for content in ("{", "[]", "{}"):
        file.write_text(content)
        if tracker != "tensorboard":  # which has no ids
            with pytest.raises(TrackingError, match=file.name):
                begin(output_dir, trackers=[tracker])
    with pytest.raises(DataError if tracker != "tensorboard" else TrackingError, match=file.name):
        begin(file / "run", trackers=[tracker], experiment="unwritable")
    assert client.get_experiment_by_name("unwritable") is None


def test_runs_are_shown_under_their_parent(client: MlflowClient, tmp_path: Path) -> None:
    with tracking_run(tmp_path / "sweep", experiment="sweeps") as parent:
        config = compose("train", [f"tracking.parent_run_id='{parent.id}'"])
        arguments = {**tracking_arguments(config), "experiment": "sweeps"}
        begin(tmp_path / "run", **{**arguments, "parent_run_id": None})
        begin(tmp_path / "run", **{**arguments, "trackers": ["mlflow", "wandb"]})
    assert [one.run.run_group for one in wandb_sessions(tmp_path / "run")] == [parent.id]
    found = client.search_runs(
        [client.get_experiment_by_name("sweeps").experiment_id],
        f"tags.mlflow.parentRunId = '{parent.id}'",
    )
    own = json.loads((tmp_path / "run" / RUN_FILE).read_text())["run_id"]
    assert [run.info.run_id for run in found] == [own]
    with pytest.raises(TrackingError, match=r"parent_run_id=0+ "):
        begin(tmp_path / "orphan", experiment="orphans", parent_run_id="0" * 32)
    assert client.get_experiment_by_name("orphans") is None


def test_a_training_that_loses_mlflow_keeps_its_metrics_and_continues(
    tiny_store: SequenceStore, client: MlflowClient, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    words = ["experiment=debug", f"work_dir={tmp_path}", "callbacks.metrics.every=1"]
    words += ["trainer.precision=fp32", "data.token_budget=512", "callbacks.evaluation=null"]
    words += ["callbacks.checkpoint.every=2", "trainer.max_steps=6", "trainer.compile=false"]
    config = compose("train", words)
    stores = {"train": tiny_store, "validation": tiny_store}
    monkeypatch.setattr(train, "training_stores", lambda config: stores)
    output_dir, whole = Path(config.output_dir), MlflowClient.log_batch

    def dies_at_step_4(self: MlflowClient, run_id: str, metrics: Any = (), **rest: Any) -> None:
        if any(metric.step >= 4 for metric in metrics):
            raise OSError("the server is gone")
        whole(self, run_id, metrics=metrics, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", dies_at_step_4)
    with pytest.raises(TrackingError, match="the server is gone"):
        train.run(config)
    # Training has reached its end, and then reports what could not be sent.
    assert (Path(config.model_dir) / "model.safetensors").is_file()
    monkeypatch.setattr(MlflowClient, "log_batch", whole)
    train.run(config)
    file = output_dir / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    losses = [(row["step"], row["loss"]) for row in found if "loss" in row]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    run_id = json.loads((output_dir / RUN_FILE).read_text())["run_id"]
    # What was pending when the server went is in the file, and in the artifact made of it, alone.
    assert history(client, run_id, "train/loss") == losses[:2]
    artifact = client.download_artifacts(run_id, "training/metrics.jsonl")
    assert Path(artifact).read_bytes() == file.read_bytes()
