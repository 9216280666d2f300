"""The pipeline's steps: the line of settings, and how a run that fails is left."""

import logging
from pathlib import Path

import pytest
from mlflow import MlflowClient

from d2plm.core.errors import DataError, TrackingError
from d2plm.tracking.mlflow_run import VERSION_TAG, begin_mlflow_run, end_left_running
from pipelines import steps


def test_parameters_that_are_empty_or_0_say_nothing_and_the_users_words_are_left_alone() -> None:
    line = (
        "experiment=debug model= trainer.max_steps=0 launcher.nodes=0.0 launcher.gpus=2.0 "
        "'launcher.cpu=\"\"' 'work_dir=\"/a b\"' -- generation.seed=0 optimizer.learning_rate=1.0"
    )
    assert steps.overrides(line) == [
        "experiment=debug",
        "launcher.gpus=2",
        'work_dir="/a b"',
        "generation.seed=0",
        "optimizer.learning_rate=1.0",
    ]


def test_a_line_without_parameters_is_the_users() -> None:
    assert steps.overrides("generation.seed=0 'a=b c'") == ["generation.seed=0", "a=b c"]


def test_proteins_are_kept_and_said_to_be_where_the_report_on_them_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(exported: object, settings: object, output: Path, precision: str) -> None:
        output.write_text(">a\nMKV\n")

    def fail(config: object, exported: object) -> None:
        raise DataError("no MMseqs2; install it")

    monkeypatch.setattr("d2plm.commands.generate.generate", write)
    monkeypatch.setattr("d2plm.commands.report.report_on_proteins", fail)
    # Last: modules that are imported with it replaced would keep the replacement.
    monkeypatch.setattr("d2plm.export.exported_model.load_export", lambda folder, device: None)
    with pytest.raises(
        DataError, match=r"generated\.fasta is written, but not the report .*MMseqs2"
    ):
        steps.generate(f"experiment=debug output_dir={tmp_path}")
    assert (tmp_path / "generated.fasta").read_text() == ">a\nMKV\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of an SQLite store; making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture
def work(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's work folder."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    return tmp_path


def settings(work: Path) -> str:
    return f"experiment=debug work_dir={work} --"


def left_running(work: Path) -> tuple[MlflowClient, str]:
    """A run as a step that is killed leaves it: still running."""
    run = begin_mlflow_run(work / "diffusion")
    return run.client, run.id


@pytest.mark.parametrize(
    ("state", "status"), [("FAILED", "FAILED"), ("CANCELED", "KILLED"), ("SUCCEEDED", "RUNNING")]
)
def test_a_run_that_was_left_running_is_marked_as_the_steps_ended(
    work: Path, state: str, status: str
) -> None:
    client, run_id = left_running(work)
    steps.finish(settings(work), state, "step train: exit code 137")
    run = client.get_run(run_id)
    assert run.info.status == status
    if status != "RUNNING":
        assert run.data.tags["pipeline.state"] == state
        assert run.data.tags["pipeline.error"] == "step train: exit code 137"


@pytest.mark.parametrize("status", ["FINISHED", "KILLED"])
def test_a_run_whose_model_is_registered_or_that_ended_badly_stays_as_it_is(
    work: Path, status: str
) -> None:
    client, run_id = left_running(work)
    if status == "FINISHED":
        client.set_tag(run_id, VERSION_TAG, "1")
    client.set_terminated(run_id, status=status)
    steps.finish(settings(work), "FAILED")
    assert client.get_run(run_id).info.status == status


def test_what_goes_wrong_in_finishing_does_not_stand_before_the_failure(
    work: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps.finish(f"experiment=nonsense work_dir={work} --", "FAILED")
    left_running(work)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/none/mlflow.db")
    steps.finish(settings(work), "FAILED")
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1  # and nothing of settings that every step has refused
    assert "what the steps have left behind: cannot reach the MLflow store" in warnings[0]


def test_without_a_run_the_store_is_not_asked(
    work: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/none/mlflow.db")
    steps.finish(settings(work), "FAILED")
    assert not caplog.records


def test_the_experiment_that_kubeflow_pipelines_sets_is_taken(
    work: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    client = MlflowClient(tracking_uri=store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", client.create_experiment("of KFP"))
    _, run_id = left_running(work)
    experiment = client.get_experiment(client.get_run(run_id).info.experiment_id)
    assert experiment.name == "of KFP"


def test_a_run_that_the_store_does_not_have_is_told(work: Path) -> None:
    left_running(work)
    (work / "diffusion" / "tracking_run.json").write_text('{"run_id": "' + "0" * 32 + '"}')
    with pytest.raises(TrackingError, match="0000"):
        end_left_running(work / "diffusion", "FAILED", tags={})


def test_a_job_that_its_step_has_left_behind_is_deleted(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from d2plm.launch.jobs import TrainingJob, pytorchjob
    from d2plm.launch.launcher import _name
    from tests.cluster import Cluster, Script

    with Cluster(tmp_path / "cluster") as double:
        monkeypatch.setenv("KUBECONFIG", str(double.kube_config))
        monkeypatch.setenv("KFP_POD_NAME", "finish")
        double.script(Script(seconds=60))
        words = f"{settings(work)} tracking=none"
        requested = steps._requested(steps._compose(words))
        name = _name({"name": None}, requested, "run-1")
        from d2plm.launch.cluster import PYTORCHJOB, connect

        connect().create(PYTORCHJOB, pytorchjob(TrainingJob(name, "d2plm-trainer:1", ())))
        steps.finish(words, "SUCCEEDED", "", "run-1")
        steps.finish(words, "FAILED", "", "run-2")
        assert double.job(name) is not None
        steps.finish(words, "FAILED", "", "run-1")
        double.wait_for(lambda: double.job(name) is None)
