"""An MLflow run: nothing is logged twice, data are linked, system metrics stop at the end."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from d2plm.assembly.tracked_run import log_data, log_settings, tracked_run, with_tags
from d2plm.config import compose
from d2plm.core.redaction import HIDDEN, redacted_settings
from d2plm.core.versions import git_revision
from d2plm.settings.commands import TrainSettings
from d2plm.tracking.mlflow_run import system_metrics
from d2plm.tracking.runs import in_sections, tracking_run
from d2plm.training.callbacks.metric_logger import MetricLogger
from tests.conftest import MonkeyPatch

COUNTS = {
    f"{split}_{what}": number
    for split in ("train", "validation", "test")
    for what, number in (("sequences", 7), ("residues", 300), ("clusters", 5))
}


@pytest.fixture
def config(tmp_path: Path) -> TrainSettings:
    return compose("train", ["experiment=debug", f"work_dir={tmp_path}"])


def prepared(folder: Path, name: str = "mine.fasta") -> Path:
    """A folder with the account of prepared data alone."""
    folder.mkdir(parents=True)
    digests = {split: f"{name}-{split}".ljust(64, "0") for split in ("train", "validation", "test")}
    manifest = {"input": name, "counts": COUNTS, "digests": digests, "leaking_pairs_after": 2}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def data_of(client: MlflowClient, run_id: str) -> dict[str, Any]:
    """The run's data sets by what it uses them for."""
    inputs = client.get_run(run_id).inputs.dataset_inputs
    return {f"{one.tags[0].value} {one.dataset.name}": one.dataset for one in inputs}


def test_only_changed_figures_are_sent_again_any_key_is_taken_and_secrets_are_hidden(
    client: MlflowClient, output_dir: Path
) -> None:
    for perplexity in (9.5, 9.5, 9.25):
        with tracking_run(output_dir) as run:
            run.log_metrics({"evaluation/perplexity": perplexity, "versus/uniform": 20.0})
    for name, expected in {"evaluation/perplexity": [9.5, 9.25], "versus/uniform": [20.0]}.items():
        points = client.get_metric_history(str(run.id), name)
        assert [point.value for point in points] == expected
    with tracking_run(output_dir) as run:
        run.log_params({"key." + 300 * "k": 1, "arms.a+b=c": 2, "environment.HF_TOKEN": "s3cret"})
        run.set_tags({"api_token": "s3cret", "owner": "ada"})
    logged = client.get_run(str(run.id)).data
    assert (logged.tags["api_token"], logged.tags["owner"]) == (HIDDEN, "ada")
    assert (logged.params["arms.a_b_c"], logged.params["environment.HF_TOKEN"]) == ("2", HIDDEN)
    assert len(logged.params) == 3


def test_a_run_says_what_it_is_hides_secrets_and_is_finished(
    client: MlflowClient, config: TrainSettings, tmp_path: Path
) -> None:
    secret = replace(config, init_from="s3://key:s3cret@bucket/model")
    with tracked_run(with_tags(config, project="antibodies"), "train") as run:
        assert client.get_run(str(run.id)).info.status == "RUNNING"
        log_settings(run, secret, parameters=12)
    found = client.get_run(str(run.id))
    assert found.info.status == "FINISHED"
    assert found.info.run_name.startswith("debug diffusion ")
    tags, params = found.data.tags, found.data.params
    assert (tags["paradigm"], tags["project"]) == ("diffusion", "antibodies")
    assert tags["mlflow.source.name"] == "d2plm train"
    assert tags.get("mlflow.source.git.commit") == git_revision()
    assert (params["init_from"], params["parameters"]) == ("s3://***@bucket/model", "12")
    file = Path(client.download_artifacts(str(run.id), "config/config.yaml", str(tmp_path)))
    assert "init_from: s3://***@bucket/model" in file.read_text()


def test_each_split_is_an_input_and_of_a_mixture_its_members_are_trained_on(
    client: MlflowClient, output_dir: Path, tmp_path: Path
) -> None:
    folder = prepared(tmp_path / "data")
    for _ in ("prepared", "trained"):
        with tracking_run(output_dir) as run:
            log_data(run, folder, {})
    data = data_of(client, str(run.id))
    assert {*data} == {f"{one} mine.fasta:{one}" for one in ("train", "validation", "test")}
    training = data["train mine.fasta:train"]
    assert training.digest == "mine.fasta-train".ljust(36, "0")
    assert json.loads(training.source)["uri"] == str(folder / "train_lmdb")
    assert json.loads(training.profile) == {"num_rows": 7, "num_elements": 300, "clusters": 5}
    tags = client.get_run(str(run.id)).data.tags
    assert tags["data.test_digest"] == "mine.fasta-test0"
    assert tags["data.leaking_pairs_after"] == "2"
    members = {name: prepared(tmp_path / name, f"{name}.fasta") for name in ("a", "b")}
    with tracking_run(output_dir / "mixture") as run:
        log_data(run, folder, members)
    assert {*data_of(client, str(run.id))} == {
        *("train a.fasta:train", "train b.fasta:train"),
        *("validation mine.fasta:validation", "test mine.fasta:test"),
    }
    assert client.get_run(str(run.id)).data.tags["data"] == "a + b"


def test_threads_end(client: MlflowClient, output_dir: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", raising=False)
    before = {*threading.enumerate()}
    for _ in ("begun", "resumed"):
        with tracking_run(output_dir) as run:
            assert run.mlflow is not None
            with system_metrics(run.mlflow, 0.01):
                assert len({*threading.enumerate()} - before) == 1
                told = "system/cpu_utilization_percentage"
                seen = len(client.get_metric_history(run.mlflow.id, told))
                while len(client.get_metric_history(run.mlflow.id, told)) < seen + 2:
                    threading.Event().wait(0.02)
            assert {*threading.enumerate()} == before
    steps = [point.step for point in client.get_metric_history(str(run.id), told)]
    assert steps == [*range(len(steps))]


def test_every_metric_of_training_is_in_the_document_under_its_group() -> None:
    text = (Path(__file__).parents[3] / "docs" / "tracking.md").read_text()
    documented = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    described = " ".join(type(metric).__doc__ or "" for metric in MetricLogger().metrics)
    plain = {word for word in described.split("`")[1::2] if word.isidentifier()}
    assert {"loss", "grad_norm", "tokens_per_second", "mfu", "peak_memory_gib"} <= plain
    assert {*in_sections(dict.fromkeys(plain, 0.0))} <= documented
    assert {"validation/nelbo", "validation/perplexity", "evaluation/perplexity"} <= documented


def test_secrets_of_a_configuration_are_not_shown() -> None:
    settings = {
        "environment": {"HF_TOKEN": "s3cret", "MODE": "fast", "EMPTY_TOKEN": ""},
        "data": {"token_budget": 4096, "experts_per_token": 2, "input": ["s3://key:s3cret@b/x"]},
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "off": None,
    }
    assert redacted_settings(settings) == {
        "environment": {"HF_TOKEN": "***", "MODE": "fast", "EMPTY_TOKEN": ""},
        "data": {"token_budget": 4096, "experts_per_token": 2, "input": ["s3://***@b/x"]},
        "AWS_SECRET_ACCESS_KEY": "***",
        "off": None,
    }
