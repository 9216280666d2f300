"""The pipeline's steps: the composed configuration, and the state after a failed run."""

import errno
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from kubernetes.client import ApiException
from mlflow import MlflowClient

from d2plm.assembly.tracked_run import tracked_run
from d2plm.config import compose, read
from d2plm.core.errors import ClusterError, ConfigError, DataError, TrackingError
from d2plm.core.vocabulary import PROTEIN
from d2plm.tracking.mlflow_run import PARENT_TAG, VERSION_TAG, begin_mlflow_run
from pipelines import record, retries, steps
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


def test_parameters_reach_the_configuration(configure: Configure, tmp_path: Path) -> None:
    expected = compose("pipeline", ["experiment=debug"])
    config = read("pipeline", Path(configure()))  # whose parameters are empty or 0
    assert (config.model, config.launcher.cpu) == (expected.model, expected.launcher.cpu)
    assert config.trainer.max_steps == expected.trainer.max_steps
    proteins = tmp_path / "a 'b'" / "c=d,e.fasta"
    proteins.parent.mkdir()
    proteins.write_text(">a\nMKV\n")
    given = {"max_steps": 7.0, "node_cpu": "3", "input": str(proteins), "claim": "mine"}
    config = read("pipeline", Path(configure("generation.seed=0 'name=b c'", **given)))
    assert (config.trainer.max_steps, config.launcher.cpu) == (7, "3")
    assert config.data.input == str(proteins)
    assert config.launcher.claims == {"mine": "/workspace"}
    assert (config.generation.seed, config.name) == (0, "b c")
    assert config.tracking.tags["pipeline.run"] == "run-1"


def test_a_recurring_run_has_the_folder_of_its_time(configure: Configure, tmp_path: Path) -> None:
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


INPUTS = ("data.input", "init_from", "data.tokenizer")


NO_RELATIVES = "model.relatives_dim=null data.max_relatives=null data.alphabet=dna"


@pytest.mark.parametrize(
    ("experiment", "overrides", "key"),
    [
        ("demo", "paradigm.shift=true", "data.max_relatives="),
        ("demo", NO_RELATIVES, "generation.relatives"),
        *(("debug", f"{key}=/nope", f"{key}=/nope") for key in INPUTS),
    ],
)
def test_the_first_step_rejects(
    configure: Configure, experiment: str, overrides: str, key: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        configure(overrides, experiment=experiment)
    assert key in str(refused.value.__cause__)


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("not this"), 2), (ZeroDivisionError("a defect"), 1)]
)
def test_a_step_that_fails_says_why_in_its_last_line_and_keeps_its_traceback_in_a_file(
    tmp_path: Path, capfd: Captured, error: Exception, code: int
) -> None:
    with pytest.raises(SystemExit) as ended:
        steps.run_step("evaluate", tmp_path / "run.yaml", Mock(side_effect=error))
    assert ended.value.code == code
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1].startswith("d2plm: error: ") and str(error) in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert "Traceback" in (tmp_path / "run.log").read_text()
    failure = record.cause(tmp_path / "run.yaml")
    assert failure is not None and str(error) in failure.message


def chained(error: Exception, **links: Exception | None) -> Exception:
    for name, value in links.items():
        setattr(error, f"__{name}__", value)
    return error


AWAY = ConnectionRefusedError("the MLflow server is away")


@pytest.mark.parametrize(
    ("pod", "error", "is_repeated"),
    [
        ("", AWAY, False),
        ("prepare", AWAY, True),
        ("prepare", OSError(errno.ESTALE, "Stale file handle"), True),
        ("prepare", ApiException(status=0, reason="SSLError"), True),  # of TLS
        ("prepare", ConfigError("trainer.max_step=7: unknown key"), False),
        ("prepare", FileNotFoundError("/workspace/nope.fasta"), False),
        ("prepare", socket.gaierror(socket.EAI_NONAME, "no such server"), False),
        # As `raise … from None` leaves it, and as it is after requests that were repeated.
        ("prepare", chained(ConfigError("no"), context=AWAY, cause=None), False),
        ("prepare", chained(ClusterError("no answer"), cause=AWAY), False),
    ],
)
def test_only_temporary_failures_are_tried_again_and_only_in_a_pod(
    tmp_path: Path, monkeypatch: MonkeyPatch, pod: str, error: Exception, is_repeated: bool
) -> None:
    if pod:
        monkeypatch.setenv("KFP_POD_NAME", pod)
    monkeypatch.setattr(retries, "PAUSES", (0, 0))
    once = Mock(side_effect=[chained(TrackingError("cannot"), cause=error), "done"])
    with nullcontext() if is_repeated else pytest.raises(SystemExit):
        assert steps.run_step("prepare", tmp_path / "run.yaml", once) == "done"
    assert once.call_count == 1 + is_repeated


def test_a_copy_for_the_ui_that_fails_does_not_fail_or_repeat_the_step(
    configure: Configure, monkeypatch: MonkeyPatch, caplog: Logged
) -> None:
    monkeypatch.setenv("KFP_POD_NAME", "prepare")
    away = Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    monkeypatch.setattr("pipelines.artifacts.fill", away)
    done = []

    @steps.step
    def prepare(config: str) -> str:
        done.append(config)
        return "digest"

    config = configure()
    assert prepare(config, dataset=None) == "digest"
    assert len(done) == 1
    assert record.entries(Path(config))["prepare"].state == "succeeded"
    assert "artifacts in the UI are incomplete" in caplog.text


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
def test_a_run_is_marked_as_the_steps_ended(work: Path, state: str, status: str, said: str) -> None:
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
def test_the_exit_handler_says_what_failed(tmp_path: Path, state: str, said: str) -> None:
    from kfp import dsl

    from pipelines import components

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


@pytest.mark.parametrize(
    ("state", "before", "tags", "succeeded"),
    [
        *((state, "RUNNING", {}, True) for state in ("COMPLETE", "SUCCEEDED", "RUNNING")),
        ("FAILED", "FINISHED", {VERSION_TAG: "1"}, False),  # it is registered
        ("FAILED", "KILLED", {}, False),
        ("FAILED", "RUNNING", {"pipeline.run": "run-9"}, False),  # it is another pipeline's
        ("FAILED", "RUNNING", {"pipeline.run": ""}, False),
    ],
)
def test_a_run_that_succeeded_has_ended_or_is_of_another_pipeline_is_left_alone(
    work: Path, state: str, before: str, tags: dict[str, str], succeeded: bool
) -> None:
    client, run_id = left_running(work)
    file = steps.config_file("run-1", str(work))
    for name, value in tags.items():
        client.set_tag(run_id, name, value)
    if tags.get("pipeline.run") == "":
        client.delete_tag(run_id, "pipeline.run")
    if before != "RUNNING":
        client.set_terminated(run_id, status=before)
    if succeeded:
        for name in steps.STEPS:
            record.note(file, name, "succeeded")
        with file.with_suffix(".jsonl").open("a") as lines:
            lines.write('{"step": "gen')  # of a process that was killed
    steps.finish("run-1", str(work), state)
    run = client.get_run(run_id)
    assert run.info.status == before and "pipeline.error" not in run.data.tags


def test_what_goes_wrong_in_finishing_does_not_stand_before_the_failure(
    work: Path, monkeypatch: MonkeyPatch, caplog: Logged
) -> None:
    steps.finish("run-2", str(work / "none"), "RUNNING")  # cancelled before it wrote
    assert not (work / "none").exists()
    steps.finish("run-2", str(work), "FAILED")  # whose first step has failed
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/none/mlflow.db")
    steps.finish("run-1", str(work), "FAILED")  # which has no run: the store is not asked
    assert not caplog.records
    (work / "diffusion").mkdir()
    (work / "diffusion" / "tracking_run.json").write_text('{"run_id": "' + "0" * 32 + '"}')
    steps.finish("run-1", str(work), "FAILED")
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "cannot reach the MLflow store" in warning


def test_the_steps_share_one_run_beside_those_that_kfps_plugin_makes_for_each(
    tmp_path: Path, store: str, monkeypatch: MonkeyPatch, configure: Configure
) -> None:
    client = MlflowClient(tracking_uri=store)
    experiment = client.create_experiment("of the plugin")
    parent = client.create_run(experiment).info.run_id
    configuring, *nested = (
        client.create_run(experiment, tags={PARENT_TAG: parent}).info.run_id for _ in range(3)
    )

    @steps.step
    def track(file: str) -> str | None:
        with tracked_run(read("pipeline", Path(file)), "prepare") as tracked:
            return tracked.id

    monkeypatch.setenv("KFP_POD_NAME", "step")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
    monkeypatch.setenv("MLFLOW_RUN_ID", configuring)
    config = configure()
    begun = []
    for run_id in nested:
        monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
        begun.append(track(config))
    assert begun[0] is not None and begun[0] == begun[1] not in nested
    own = client.get_run(begun[0])
    assert (own.info.experiment_id, own.data.tags[PARENT_TAG]) == (experiment, parent)
    for run_id in nested:
        assert begun[0] in client.get_run(run_id).data.tags["mlflow.note.content"]


def test_proteins_are_kept_where_the_report_on_them_fails(
    tmp_path: Path, monkeypatch: MonkeyPatch, configure: Configure
) -> None:
    write = Mock(side_effect=lambda exported, settings, output, _: output.write_text(">a\nMKV\n"))
    monkeypatch.setattr("d2plm.assembly.generation.generate", write)
    fail = Mock(side_effect=DataError("no MMseqs2; install it"))
    monkeypatch.setattr("d2plm.commands.report.report_on_proteins", fail)
    # Last: modules that are imported with it replaced would keep the replacement.
    exported = SimpleNamespace(vocabulary=PROTEIN)
    monkeypatch.setattr("d2plm.tracking.locations.open_export", lambda folder, device: exported)
    config = configure(f"output_dir={tmp_path}")
    with pytest.raises(SystemExit) as failed:
        steps.generate(config)
    assert str(tmp_path / "generated.fasta") in str(failed.value.__cause__)
    assert (tmp_path / "generated.fasta").read_text() == ">a\nMKV\n"
