"""Sweeps in a cluster: the compiled loop, its steps, and what is refused at submission."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from d2plm.cli import main as d2plm
from d2plm.config import read
from d2plm.core.files import write_text
from d2plm.launch.job_log import job_log
from d2plm.launch.kfp_server import POD_VARIABLE
from d2plm.tracking.mlflow_run import begin_mlflow_run
from pipelines import record, steps, sweep
from tests.conftest import MonkeyPatch

SWEEP = ["sweep=compare", "experiment=debug", "arms={a: {}, b: {trainer: {max_steps: 2}}}"]
Specification = dict[str, Any]
Configure = Callable[..., Path]


@pytest.fixture(scope="module")
def documents(quick_kfp: None, tmp_path_factory: pytest.TempPathFactory) -> list[Specification]:
    output = tmp_path_factory.mktemp("compiled") / "sweep.yaml"
    words = ["launcher.queue=team", "launcher.priority_class=low", "parallel=3"]
    assert d2plm(["pipeline", "compile", *SWEEP, *words, f"output={output}"]) == 0
    return list(yaml.safe_load_all(output.read_text()))


def test_the_runs_are_a_limited_loop(documents: list[Specification]) -> None:
    components = documents[0]["components"]
    tasks = components["comp-exit-handler-1"]["dag"]["tasks"]
    assert {*tasks} == {"configure", "prepare", "plan", "for-loop-2", "reduce"}
    loop = tasks["for-loop-2"]
    assert loop["iteratorPolicy"] == {"parallelismLimit": 3}
    items = loop["parameterIterator"]
    listed = loop["inputs"]["parameters"][items["items"]["inputParameter"]]
    assert listed["taskOutputParameter"]["producerTask"] == "plan"
    body = components[loop["componentRef"]["name"]]["dag"]["tasks"]
    assert {*body} == {"train", "evaluate"}
    for task in body.values():
        config = task["inputs"]["parameters"]["config"]
        assert config == {"componentInputParameter": items["itemInput"]}
        assert task["retryPolicy"]["maxRetryCount"] == 2 and task["cachingOptions"] == {}
    collected = tasks["reduce"]["inputs"]["parameters"]["perplexities"]["taskOutputParameter"]
    assert collected["producerTask"] == "for-loop-2"
    final = documents[0]["root"]["dag"]["tasks"]["finish"]["inputs"]["parameters"]["status"]
    assert final["taskFinalStatus"]["producerTask"] == "exit-handler-1"


def test_its_form_is_that_of_a_single_run(documents: list[Specification]) -> None:
    specification, platform = documents
    parameters = specification["root"]["inputDefinitions"]["parameters"]
    assert "launcher.queue=team" in parameters["overrides"]["defaultValue"]
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert {pod["pvcMount"][0]["mountPath"] for pod in pods.values()} == {"/workspace"}
    executors = specification["deploymentSpec"]["executors"]
    images = {name: executor["container"]["image"] for name, executor in executors.items()}
    assert [name for name, image in images.items() if "mmseqs2" in image] == ["exec-prepare"]


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: MonkeyPatch) -> Configure:
    """Configures a sweep of two arms with two seeds; every run's settings and files are good."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("d2plm.assembly.dry_run.forecast", lambda config: {})
    monkeypatch.setattr("d2plm.export.exported_model.is_whole_export", lambda folder: True)
    evaluation = SimpleNamespace(digests={"train": "1", "model": "2"})
    monkeypatch.setattr("d2plm.evaluation.result.read_evaluation", lambda folder: evaluation)

    def configure(run_id: str, *words: str) -> Path:
        given = [SWEEP[2].replace(" ", ""), "seeds=[1,2]", *words]
        config = steps.configure(
            *(run_id, "2026-11-30T03:00:00Z", str(tmp_path), "mine"),
            overrides=" ".join(given),
            experiment="debug",
            sweep="compare",
        )
        return Path(config)

    return configure


def names(files: list[str]) -> list[str]:
    return [read("train", Path(file)).tracking.run_name for file in files]


def test_finished_runs_are_not_repeated(configured: Configure) -> None:
    first = sweep.plan(str(configured("run-1", "tracking=none")))
    assert names(first) == ["a, seed 1", "b, seed 1", "a, seed 2", "b, seed 2"]
    one = read("train", Path(first[1]))
    assert one.trainer.max_steps == 2 and one.launcher.claims == {"mine": "/workspace"}
    for file in first:
        record.note(Path(file), "train", "succeeded")
    for file in first[:2]:
        record.note(Path(file), "evaluate", "succeeded")
    again = configured("run-2", "tracking=none", "launcher.gpus=0")
    assert names(sweep.plan(str(again))) == ["a, seed 2", "b, seed 2"]
    for file in first:
        record.note(Path(file), "evaluate", "succeeded")
    assert names(sweep.plan(str(again))) == ["a, seed 1"]  # a loop over nothing is avoided
    changed = configured("run-3", "tracking=none", "optimizer.learning_rate=0.1")
    assert len(sweep.plan(str(changed))) == 4
    fresh = configured("run-4", "tracking=none", "trainer.resume=none")
    assert len(sweep.plan(str(fresh))) == 4
    manifest = Path(one.data.prepared_dir, "manifest.json")
    write_text(manifest, json.dumps({"digests": {"train": "of other data"}}))
    assert len(sweep.plan(str(again))) == 4


def test_each_run_names_its_log(configured: Configure, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv(POD_VARIABLE, "a-pod")
    monkeypatch.setattr("d2plm.launch.client.where_to_train", lambda kind: "local")
    config = configured("run-1", "tracking=none")
    assert "pipeline.job_log" not in read("compare", config).tracking.tags
    for file in map(Path, sweep.plan(str(config))):
        assert read("train", file).tracking.tags["pipeline.job_log"] == str(job_log(file))
        job_log(file).touch()
    assert record.as_markdown(config).count("The log of a training job") == 4


def test_what_the_runs_have_left_is_ended_and_listed(
    configured: Configure, store: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    ended: list[Path] = []
    monkeypatch.setattr(
        "d2plm.assembly.training_job.end_step", lambda config, file: ended.append(file)
    )
    config = configured("run-1", f"tracking.uri={store}")
    files = [Path(file) for file in sweep.plan(str(config))]
    parent = read("train", files[0]).tracking.parent_run_id
    left = read("train", files[2])
    begun = begin_mlflow_run(Path(left.output_dir), uri=left.tracking.uri, parent_run_id=parent)
    begun.set_tags(left.tracking.tags)
    for file, state in zip(files, ("succeeded", "failed", "running"), strict=False):
        record.note(file, "train", state, "its memory was exceeded" if state == "failed" else "")
    summary = type("Summary", (), {"path": str(tmp_path / "summary.md")})()
    steps.finish("run-1", str(tmp_path), "FAILED", summary=summary)
    assert ended == [*sorted(files[1:3]), config]
    client = MlflowClient(left.tracking.uri)
    statuses = [client.get_run(one).info.status for one in (parent, begun.id)]
    assert statuses == ["FAILED", "FAILED"]
    said = client.get_run(parent).data.tags["pipeline.error"]
    assert "train: " in said
    text = (tmp_path / "summary.md").read_text()
    assert text.count("- `a,_seed_2") == 1 and text.count("- `b,_seed_1") == 1
    assert "its memory was exceeded" in text or "killed" in text
