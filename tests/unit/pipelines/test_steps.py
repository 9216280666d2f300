"""The pipeline's steps: the composed configuration, and the state after a failed run."""

import errno
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from kfp import dsl
from kubernetes.client import ApiException
from mlflow import MlflowClient

from d2plm.assembly.tracked_run import tracked_run
from d2plm.config import compose, read
from d2plm.core.errors import ClusterError, ConfigError, DataError, TrackingError
from d2plm.core.vocabulary import PROTEIN
from d2plm.tracking.mlflow_run import PARENT_TAG, VERSION_TAG, begin_mlflow_run, end_left_running
from pipelines import components, record, retries, steps
from tests.conftest import Captured, Logged, MonkeyPatch

Configure = Callable[..., str]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """Composes a run's configuration in `tmp_path`, from the parameters' defaults and these."""

    def composed(overrides: str = "", **parameters: str | float) -> str:
        defaults = {"model": "", "max_steps": 0, "node_cpu": "", "experiment": "debug"}
        defaults |= {
            "run_id": "run-1",
            "time": "2026-11-30T03:00:00Z",
            "work_dir": str(tmp_path),
            "claim": "d2plm-workspace",
        }
        return steps.configure(overrides=overrides, **(defaults | parameters))

    return composed


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def hidden(error: Exception, context: Exception) -> Exception:
    """`error` as `raise error from None` leaves it, in the handling of `context`."""
    error.__context__, error.__cause__ = context, None
    return error


def test_parameters_that_are_empty_or_0_leave_the_settings_to_the_configuration(
    configure: Configure,
) -> None:
    expected = compose("pipeline", ["experiment=debug"])
    config = read("pipeline", Path(configure()))
    assert config.model == expected.model
    assert config.trainer.max_steps == expected.trainer.max_steps
    assert config.launcher.cpu == expected.launcher.cpu


def test_parameters_and_further_settings_reach_the_configuration_whatever_characters_they_have(
    configure: Configure, tmp_path: Path
) -> None:
    proteins = tmp_path / "a 'b'" / "c=d,e.fasta"
    proteins.parent.mkdir()
    proteins.write_text(">a\nMKV\n")
    given = {"max_steps": 7.0, "node_cpu": "3", "input": str(proteins), "claim": "mine"}
    config = read("pipeline", Path(configure("generation.seed=0 'name=b c'", **given)))
    assert config.trainer.max_steps == 7
    assert config.launcher.cpu == "3"
    assert config.data.input == str(proteins)
    assert config.launcher.claims == {"mine": "/workspace"}
    assert (config.generation.seed, config.name) == (0, "b c")
    assert config.tracking.tags["pipeline.run"] == "run-1"


def test_each_recurring_run_has_the_folder_of_its_time(
    configure: Configure, tmp_path: Path
) -> None:
    for day in ("2026-11-30", "2026-12-07"):
        template = str(tmp_path / "weekly-%Y-%m-%d")
        file = configure(work_dir=template, time=f"{day}T03:00:00Z")
        assert read("pipeline", Path(file)).output_dir == str(tmp_path / f"weekly-{day}/diffusion")
        assert steps.config_file("run-1", steps.dated(template, f"{day}T03:00:00Z")) == Path(file)


def test_the_demos_family_is_found_in_the_image_where_pods_run_in_another_folder(
    configure: Configure, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    family = "examples/data/family_abc_importers.fasta.gz"
    (tmp_path / "image" / family).parent.mkdir(parents=True)
    (tmp_path / "image" / family).touch()
    monkeypatch.setattr(steps, "IMAGE", tmp_path / "image")
    monkeypatch.chdir(tmp_path)
    config = read("pipeline", Path(configure(experiment="demo")))
    assert config.generation.relatives == str(tmp_path / "image" / family)


@pytest.mark.parametrize("overrides", ["paradigm=flow_matching_uniform", "paradigm.shift=true"])
def test_relatives_for_what_takes_none_are_rejected_before_the_first_step(
    configure: Configure, overrides: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        configure(experiment="demo", overrides=overrides)
    assert "data.max_relatives=null" in str(refused.value.__cause__)
    alone = "model.relatives_dim=null data.max_relatives=null"
    configure(experiment="demo", overrides=f"{overrides} {alone}")
    with pytest.raises(SystemExit) as refused:
        configure(experiment="demo", overrides=f"{alone} data.alphabet=dna")
    assert "generation.relatives" in str(refused.value.__cause__)


@pytest.mark.parametrize("key", ["data.input", "init_from", "data.tokenizer"])
def test_inputs_that_do_not_exist_are_refused_by_the_first_step(
    configure: Configure, capfd: Captured, key: str
) -> None:
    with pytest.raises(SystemExit):
        configure(f"{key}=/workspace/nope")
    assert f"error: {key}=/workspace/nope: no such file" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("not this"), 2), (ZeroDivisionError("a defect"), 1)]
)
def test_a_step_that_fails_says_why_in_its_last_line_and_keeps_its_traceback_in_a_file(
    tmp_path: Path, capfd: Captured, error: Exception, code: int
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        steps.run_step("evaluate", tmp_path / "run.yaml", fail)
    assert ended.value.code == code
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("d2plm: error: ") and str(error) in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert "in fail" in (tmp_path / "run.log").read_text()
    failure = record.cause(tmp_path / "run.yaml")
    assert failure is not None and str(error) in failure.message


@pytest.mark.parametrize("in_cluster", [True, False])
@pytest.mark.parametrize(
    ("error", "is_temporary"),
    [
        (ConnectionRefusedError("the MLflow server is away"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (ConfigError("trainer.max_step=7: unknown key"), False),
        (FileNotFoundError("/workspace/nope.fasta"), False),
        (socket.gaierror(socket.EAI_NONAME, "no such server"), False),
        (ApiException(status=0, reason="SSLError"), True),  # of TLS
        (hidden(ConfigError("no"), ConnectionRefusedError("handled")), False),
        (caused(ClusterError("no answer"), ConnectionRefusedError("repeated")), False),
    ],
)
def test_only_temporary_failures_are_tried_again_and_only_in_a_pod(
    tmp_path: Path, monkeypatch: MonkeyPatch, error: Exception, is_temporary: bool, in_cluster: bool
) -> None:
    if in_cluster:
        monkeypatch.setenv("KFP_POD_NAME", "prepare")
    monkeypatch.setattr(retries, "PAUSES", (0, 0))
    attempts = []

    def fail_once() -> str:
        attempts.append(1)
        if len(attempts) == 1:
            raise TrackingError("cannot do it") from error
        return "done"

    if is_temporary and in_cluster:
        assert steps.run_step("prepare", tmp_path / "run.yaml", fail_once) == "done"
    else:
        with pytest.raises(SystemExit):
            steps.run_step("prepare", tmp_path / "run.yaml", fail_once)
        assert len(attempts) == 1


def test_a_copy_for_the_ui_that_fails_does_not_fail_or_repeat_the_step(
    configure: Configure, monkeypatch: MonkeyPatch, caplog: Logged
) -> None:
    monkeypatch.setenv("KFP_POD_NAME", "prepare")
    done = []

    def away(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    @steps.step
    def prepare(config: str) -> str:
        done.append(config)
        return "digest"

    monkeypatch.setattr("pipelines.artifacts.fill", away)
    config = configure()
    assert prepare(config, dataset=None) == "digest"
    assert len(done) == 1
    assert record.entries(Path(config))["prepare"].state == "succeeded"
    assert "artifacts in the UI are incomplete" in caplog.text


def test_a_run_that_was_cancelled_before_it_wrote_makes_no_folder(tmp_path: Path) -> None:
    work_dir = tmp_path / "work"
    steps.finish("run-1", str(work_dir), "RUNNING")
    assert not work_dir.exists()


def test_proteins_are_kept_and_said_to_be_where_the_report_on_them_fails(
    tmp_path: Path, monkeypatch: MonkeyPatch, configure: Configure
) -> None:
    def write(exported: object, settings: object, output: Path, precision: str) -> None:
        output.write_text(">a\nMKV\n")

    def fail(config: object, exported: object) -> None:
        raise DataError("no MMseqs2; install it")

    monkeypatch.setattr("d2plm.assembly.generation.generate", write)
    monkeypatch.setattr("d2plm.commands.report.report_on_proteins", fail)
    # Last: modules that are imported with it replaced would keep the replacement.
    exported = SimpleNamespace(vocabulary=PROTEIN)
    monkeypatch.setattr("d2plm.tracking.locations.open_export", lambda folder, device: exported)
    config = configure(f"output_dir={tmp_path}")
    with pytest.raises(SystemExit) as failed:
        steps.generate(config)
    said = str(failed.value.__cause__)
    assert f"wrote {tmp_path / 'generated.fasta'}, but not the report on it: no MMseqs2" in said
    assert (tmp_path / "generated.fasta").read_text() == ">a\nMKV\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of an SQLite store; making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture
def work(tmp_path: Path, store: str, monkeypatch: MonkeyPatch, configure: Configure) -> Path:
    """The work folder of a run whose steps have started."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    configure()
    return tmp_path


def left_running(work: Path) -> tuple[MlflowClient, str]:
    """A run as a step that is killed leaves it: still running."""
    run = begin_mlflow_run(work / "diffusion")
    run.set_tags({"pipeline.run": "run-1"})
    return run.client, run.id


@pytest.mark.parametrize(
    ("state", "status", "said"),
    [
        ("FAILED", "FAILED", "train: exit code 137"),
        ("SUCCEEDED", "FAILED", "train: exit code 137"),  # the record decides
        ("RUNNING", "KILLED", "the run was cancelled"),
    ],
)
def test_a_run_that_was_left_running_is_marked_as_the_steps_ended(
    work: Path, state: str, status: str, said: str
) -> None:
    client, run_id = left_running(work)
    record.note(steps.config_file("run-1", str(work)), "train", "failed", "exit code 137")
    steps.finish("run-1", str(work), state)
    run = client.get_run(run_id)
    assert run.info.status == status
    assert run.data.tags["pipeline.state"] == {"KILLED": "CANCELLED"}.get(status, status)
    assert run.data.tags["pipeline.error"] == said


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("FAILED", "failed:**\n\n```\n/workspace/nope.fasta: no such file\n```\n"),
        ("RUNNING", "cancelled:**\n\n```\nthe run was cancelled\n```\n"),
    ],
)
def test_the_exit_handler_says_what_failed_whether_or_not_there_is_a_configuration(
    tmp_path: Path, state: str, said: str
) -> None:
    file = steps.config_file("run-1", str(tmp_path))
    record.note(file, "configure", "succeeded")
    record.note(file, "prepare", "failed", "/workspace/nope.fasta: no such file")
    summary = dsl.Markdown(uri=str(tmp_path / "summary.md"))
    components.finish.python_func(
        run_id="run-1",
        time="2026-11-30T03:00:00Z",
        work_dir=str(tmp_path),
        modules="",
        status=dsl.PipelineTaskFinalStatus(state, "", "steps", None, None),
        summary=summary,
    )
    ended = said.partition(":")[0]
    listed = f"- `configure`: succeeded\n- `prepare`: {ended}\n\n"
    assert Path(summary.path).read_text() == f"{listed}**`prepare` {said}"
    assert record.entries(file)["prepare"].state == ended


@pytest.mark.parametrize("state", ["COMPLETE", "SUCCEEDED", "RUNNING"])
def test_after_steps_that_succeeded_nothing_is_ended_whatever_the_server_calls_it(
    work: Path, state: str
) -> None:
    client, run_id = left_running(work)
    file = steps.config_file("run-1", str(work))
    for name in steps.STEPS:
        record.note(file, name, "succeeded")
    with file.with_suffix(".jsonl").open("a") as lines:
        lines.write('{"step": "gen')  # of a process that was killed
    steps.finish("run-1", str(work), state)
    assert client.get_run(run_id).info.status == "RUNNING"


@pytest.mark.parametrize("status", ["FINISHED", "KILLED"])
def test_a_run_whose_model_is_registered_or_that_ended_badly_stays_as_it_is(
    work: Path, status: str
) -> None:
    client, run_id = left_running(work)
    if status == "FINISHED":
        client.set_tag(run_id, VERSION_TAG, "1")
    client.set_terminated(run_id, status=status)
    steps.finish("run-1", str(work), "FAILED")
    assert client.get_run(run_id).info.status == status


def test_a_run_of_another_pipeline_in_the_same_folder_is_left_alone(work: Path) -> None:
    client, run_id = left_running(work)
    client.set_tag(run_id, "pipeline.run", "run-9")
    steps.finish("run-1", str(work), "FAILED")
    assert client.get_run(run_id).info.status == "RUNNING"
    client.set_tag(run_id, "pipeline.run", "run-1")
    steps.finish("run-1", str(work), "FAILED")
    assert client.get_run(run_id).info.status == "FAILED"


@pytest.mark.parametrize("status", ["FINISHED", "RUNNING"])
def test_a_training_of_no_pipeline_in_the_same_folder_is_left_alone(
    work: Path, status: str
) -> None:
    client, run_id = left_running(work)
    client.delete_tag(run_id, "pipeline.run")
    client.set_terminated(run_id, status=status)
    steps.finish("run-1", str(work), "FAILED")
    found = client.get_run(run_id)
    assert found.info.status == status and "pipeline.state" not in found.data.tags


def test_what_goes_wrong_in_finishing_does_not_stand_before_the_failure(
    work: Path, monkeypatch: MonkeyPatch, caplog: Logged
) -> None:
    steps.finish("run-2", str(work), "FAILED")  # whose first step has failed
    left_running(work)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/none/mlflow.db")
    steps.finish("run-1", str(work), "FAILED")
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "what the steps have left running: cannot reach the MLflow store" in warnings[0]


def test_without_a_run_the_store_is_not_asked(
    work: Path, monkeypatch: MonkeyPatch, caplog: Logged
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/none/mlflow.db")
    steps.finish("run-1", str(work), "FAILED")
    assert not caplog.records


def test_the_experiment_that_kubeflow_pipelines_sets_is_taken(
    work: Path, monkeypatch: MonkeyPatch, store: str
) -> None:
    client = MlflowClient(tracking_uri=store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", client.create_experiment("of KFP"))
    _, run_id = left_running(work)
    experiment = client.get_experiment(client.get_run(run_id).info.experiment_id)
    assert experiment.name == "of KFP"


def test_the_steps_share_one_run_beside_those_that_kfps_plugin_makes_for_each(
    tmp_path: Path, store: str, monkeypatch: MonkeyPatch, configure: Configure
) -> None:
    client = MlflowClient(tracking_uri=store)
    experiment = client.create_experiment("of the plugin")
    parent = client.create_run(experiment).info.run_id

    def begin_step() -> str:
        nested = client.create_run(experiment, tags={PARENT_TAG: parent}).info.run_id
        for name, value in (("RUN_ID", nested), ("EXPERIMENT_ID", experiment)):
            monkeypatch.setenv(f"MLFLOW_{name}", value)
        return nested

    @steps.step
    def track(file: str) -> str | None:
        with tracked_run(read("pipeline", Path(file)), "prepare") as tracked:
            return tracked.id

    monkeypatch.setenv("KFP_POD_NAME", "step")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    begin_step()
    config = configure()
    nested = [begin_step(), begin_step()]
    begun = []
    for run_id in nested:
        monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
        begun.append(track(config))
    assert begun[0] is not None and begun[0] == begun[1] not in nested
    own = client.get_run(begun[0])
    assert own.data.tags[PARENT_TAG] == parent
    for run_id in nested:
        tags = client.get_run(run_id).data.tags
        assert tags["mlflow.note.content"] == f"The results of this step are in the run {begun[0]}."


def test_a_run_that_the_store_does_not_have_is_reported(work: Path) -> None:
    left_running(work)
    (work / "diffusion" / "tracking_run.json").write_text('{"run_id": "' + "0" * 32 + '"}')
    with pytest.raises(TrackingError, match="0000"):
        end_left_running(work / "diffusion", "FAILED", tags={})


def test_a_job_that_its_step_has_left_behind_is_deleted(
    work: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    from d2plm.assembly.training_job import job_name
    from d2plm.launch.client import PYTORCHJOB, connect
    from d2plm.launch.job_spec import TrainingJob, pytorchjob
    from tests.cluster import Cluster, Script

    file = steps.config_file("run-1", str(work))
    assert file.is_file()
    with Cluster(tmp_path / "cluster") as double:
        monkeypatch.setenv("KUBECONFIG", str(double.kube_config))
        monkeypatch.setenv("KFP_POD_NAME", "finish")
        double.script(Script(seconds=60))
        name = job_name(compose("pipeline", []), file)
        connect().create(PYTORCHJOB, pytorchjob(TrainingJob(name, "d2plm-trainer:1", ())))
        steps.finish("run-2", str(work), "FAILED")
        assert double.job(name) is not None
        steps.finish("run-1", str(work), "FAILED")
        double.wait_for(lambda: double.job(name) is None)
