"""MLflow runs: one per folder, nothing logged twice, failures in one line without passwords."""

import json
import signal
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow import MlflowClient

from d2plm.assembly.tracked_run import log_data, log_settings, tracked_run, with_tags
from d2plm.config import compose
from d2plm.core.errors import TrackingError
from d2plm.core.redaction import HIDDEN, redacted, redacted_settings
from d2plm.core.versions import git_revision
from d2plm.tracking import mlflow_run
from d2plm.tracking.mlflow_run import RUN_FILE, MLflowRun, open_client
from d2plm.tracking.runs import Runs, in_sections, tracking_run
from d2plm.training.callbacks.metric_logger import MetricLogger
from tests.commands import python_c
from tests.conftest import Logged, MonkeyPatch
from tests.http_server import free_port
from tests.unit.tracking.conftest import Killed, Refuse, repeat


def begun(output_dir: Path, **settings: str) -> str:
    with tracking_run(output_dir, **settings) as run:  # type: ignore[arg-type]  # by name
        assert run.id is not None
        return run.id


def test_a_rejected_call_is_one_line_that_names_the_store(
    client: MlflowClient, refuse: Refuse, output_dir: Path
) -> None:
    run_id = begun(output_dir)
    refuse("log_batch")
    with pytest.raises(TrackingError) as caught:
        Runs([MLflowRun(client, run_id)]).set_tags({"key": "value"})
    line = str(caught.value)
    assert "\n" not in line and "second line" not in line
    assert all(part in line for part in ("down", client.tracking_uri, run_id))


def test_metrics_that_could_not_be_sent_are_sent_by_the_next_flush(
    client: MlflowClient, output_dir: Path, monkeypatch: MonkeyPatch
) -> None:
    run = Runs([MLflowRun(client, begun(output_dir))])
    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_batch", Mock(side_effect=OSError("down")))
        run.log_metrics({"loss": 1.0}, 1)
        with pytest.raises(TrackingError, match="log metrics"):
            run.flush()
    run.log_metrics({"loss": 2.0}, 2)
    run.flush()
    sent = [point.value for point in client.get_metric_history(str(run.id), "train/loss")]
    assert sent == [1.0, 2.0]


def test_a_run_that_cannot_be_ended_fails_and_leaves_the_first_error_in_sight(
    client: MlflowClient, refuse: Refuse, output_dir: Path, caplog: Logged
) -> None:
    refuse("log_batch")
    with pytest.raises(TrackingError, match="FINISHED"), tracking_run(output_dir) as run:
        run.log_metrics({"loss": 1.0})
    assert client.get_run(str(run.id)).info.status == "FAILED"
    refuse("set_terminated")
    with pytest.raises(ValueError, match="the cause"), tracking_run(output_dir) as run:
        run.log_metrics({"loss": 2.0})
        raise ValueError("the cause")
    assert "cannot set the status FAILED of run" in caplog.text


def test_a_failure_begins_no_run_and_a_given_one_is_missing_only_if_the_store_says_so(
    client: MlflowClient, refuse: Refuse, output_dir: Path, monkeypatch: MonkeyPatch
) -> None:
    first = begun(output_dir)
    monkeypatch.setenv("MLFLOW_RUN_ID", "1" * 32)
    with pytest.raises(TrackingError, match="unset MLFLOW_RUN_ID"):
        begun(output_dir / "given")
    refuse("update_run", "INTERNAL_ERROR")
    with pytest.raises(TrackingError, match="cannot reopen"):
        begun(output_dir / "given")
    assert not (output_dir / "given").exists()
    monkeypatch.delenv("MLFLOW_RUN_ID")
    with pytest.raises(TrackingError, match=first):
        begun(output_dir)
    assert json.loads((output_dir / RUN_FILE).read_text())["run_id"] == first


REDACTED = {
    "http://ada:s3cret@host:5000/x": "http://***@host:5000/x",
    "https://token@host": "https://***@host",
    "hf://datasets/name@main/file": "hf://datasets/name@main/file",
    "sk-learn and MKTAYIAKQRQISFVKSHFSRQ": "sk-learn and MKTAYIAKQRQISFVKSHFSRQ",
    "to http://a:b@h/ and http://c:d@i/": "to http://***@h/ and http://***@i/",
    "postgresql+psycopg://ada:pa/ss@host/db": "postgresql+psycopg://***@host/db",
    "http://host:5000/a@b": "http://host:5000/a@b",
    "'+traking.tags.api_token=s' PGPASSWORD=a": "'+traking.tags.api_token=***' PGPASSWORD=***",
    "apiToken=b": "apiToken=***",
    "'+a.password=s3:cr;et': a.password=… sets": "'+a.password=***': a.password=… sets",
    "a.password='s3cret' a.password=null may": "a.password='***' a.password=null may",
    "a token: hf_AbCdEfGhIjKlMnOpQrStUv, kept": "a token: ***, kept",
    '{"token": "x", "lr": "1"}': '{"token": "***", "lr": "1"}',
    "{'WANDB_API_KEY': 'x y'}": "{'WANDB_API_KEY': '***'}",
    "Authorization: Bearer abc": "Authorization: Bearer ***",
}


def test_secrets_in_texts_and_configurations_are_not_shown() -> None:
    assert {text: redacted(text) for text in REDACTED} == REDACTED
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


def test_a_starting_server_is_waited_for_a_while(monkeypatch: MonkeyPatch, caplog: Logged) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(mlflow_run, "START_SECONDS", 0.5)
    monkeypatch.setattr("mlflow.MlflowClient", Mock())
    now, pauses = [0.0], list[float]()

    def pass_time(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += 0.2

    with monkeypatch.context() as patched:
        patched.setattr(mlflow_run.time, "monotonic", lambda: now[0])
        patched.setattr(mlflow_run.time, "sleep", pass_time)
        with pytest.raises(TrackingError, match="refuses connections"):
            open_client(None)
    assert len(pauses) > 1
    assert [record.name for record in caplog.records] == ["d2plm.tracking.mlflow_run"]
    answer = Mock()
    start = partial(monkeypatch.setattr, "requests.head", answer)
    monkeypatch.setattr(mlflow_run.time, "sleep", lambda _: start())
    open_client(None)
    assert answer.call_count == 1


def test_after_a_slow_failure_batches_wait(monkeypatch: MonkeyPatch) -> None:
    now, attempts = [0.0], []

    def fail_slowly(*_: object, **__: object) -> None:
        attempts.append(now[0])
        now[0] += 100
        raise TimeoutError

    monkeypatch.setattr(mlflow_run, "BATCH", 1)
    monkeypatch.setattr(mlflow_run.time, "monotonic", lambda: now[0])
    run = MLflowRun(Mock(log_batch=fail_slowly), "run")
    for step in range(1, 12):
        with suppress(TimeoutError):
            run.log_metrics({"loss": 1.0}, step)
        now[0] += 100
    assert attempts == [0.0, 1000.0]


def test_what_was_deleted_is_named(client: MlflowClient, output_dir: Path, caplog: Logged) -> None:
    first = begun(output_dir)
    client.delete_run(first)
    assert begun(output_dir) != first
    assert f"mlflow runs restore --run-id {first}" in caplog.text
    experiment = client.create_experiment("deleted")
    client.delete_experiment(experiment)
    with pytest.raises(TrackingError, match=f"experiments restore --experiment-id {experiment}"):
        begun(output_dir / "x", experiment="deleted")


def runs_of(client: MlflowClient, experiment: str) -> list[str]:
    known = client.get_experiment_by_name(experiment)
    assert known is not None
    return [found.info.run_id for found in client.search_runs([known.experiment_id])]


def test_a_run_is_created_once_if_its_request_is_repeated_and_the_search_lags(
    client: MlflowClient, output_dir: Path, monkeypatch: MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        repeat(patched, "tracking", "create_run")
        run_id = begun(output_dir, experiment="repeated")
    assert runs_of(client, "repeated") == [run_id]
    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "search_runs", lambda *_: [])
        lagging = begun(output_dir / "other")
    assert client.get_run(lagging).info.status == "FINISHED"
    assert begun(output_dir / "other") == lagging


def test_a_run_whose_creator_was_killed_is_found_again(
    client: MlflowClient, output_dir: Path, monkeypatch: MonkeyPatch
) -> None:
    create = MlflowClient.create_run

    def then_die(*arguments: Any, **named: Any) -> None:
        create(*arguments, **named)
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(MlflowClient, "create_run", then_die)
        begun(output_dir, experiment="killed")
    run_id = begun(output_dir, experiment="killed")
    assert runs_of(client, "killed") == [run_id]
    assert json.loads((output_dir / RUN_FILE).read_text())["run_id"] == run_id


def prepared(folder: Path, name: str = "mine.fasta") -> Path:
    """A folder with the account of prepared data alone."""
    folder.mkdir(parents=True)
    digests = {split: f"{name}-{split}".ljust(64, "0") for split in ("train", "validation", "test")}
    each = {"sequences": 7, "residues": 300, "clusters": 5}
    counts = {f"{split}_{what}": number for split in digests for what, number in each.items()}
    manifest = {"input": name, "counts": counts, "digests": digests, "leaking_pairs_after": 2}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def data_of(client: MlflowClient, run_id: str) -> dict[str, Any]:
    """The run's data sets by what it uses them for."""
    inputs = client.get_run(run_id).inputs.dataset_inputs
    return {f"{one.tags[0].value} {one.dataset.name}": one.dataset for one in inputs}


def test_only_changed_figures_are_sent_again(client: MlflowClient, output_dir: Path) -> None:
    for perplexity in (9.5, 9.5, 9.25):
        with tracking_run(output_dir) as run:
            run.log_metrics({"evaluation/perplexity": perplexity, "versus/uniform": 20.0})
    for name, expected in {"evaluation/perplexity": [9.5, 9.25], "versus/uniform": [20.0]}.items():
        points = client.get_metric_history(str(run.id), name)
        assert [point.value for point in points] == expected


def test_parameters_and_tags_are_cut_and_redacted(client: MlflowClient, output_dir: Path) -> None:
    with tracking_run(output_dir) as run:
        run.log_params({f"p{number}": number for number in range(300)} | {"long": "x" * 7000})
        run.log_params({"key." + 300 * "k": 1, "arms.a+b=c": 2, "environment.HF_TOKEN": "s3cret"})
        run.set_tags({"long": "y" * 9000, "a<b": "1", "exact": "z" * 8000, "api_token": "s3cret"})
    logged = client.get_run(str(run.id)).data
    assert len(logged.params) == 304
    assert (logged.params["long"], logged.params["arms.a_b_c"]) == ("x" * 5999 + "…", "2")
    assert (logged.tags["long"], logged.tags["exact"]) == ("y" * 7999 + "…", "z" * 8000)
    assert logged.tags["a_b"] == "1"
    assert logged.params["environment.HF_TOKEN"] == logged.tags["api_token"] == HIDDEN


def test_a_run_says_what_it_is(client: MlflowClient, tmp_path: Path) -> None:
    config = compose("train", ["experiment=debug", f"work_dir={tmp_path}"])
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


def test_each_split_is_an_input(client: MlflowClient, output_dir: Path, tmp_path: Path) -> None:
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
            with mlflow_run.system_metrics(run.mlflow, 0.01):
                assert len({*threading.enumerate()} - before) == 1
                told = "system/cpu_utilization_percentage"
                seen = len(client.get_metric_history(run.mlflow.id, told))
                while len(client.get_metric_history(run.mlflow.id, told)) < seen + 2:
                    threading.Event().wait(0.02)
            assert {*threading.enumerate()} <= before
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


FIRST_USE = """
import sys
from pathlib import Path
from d2plm.tracking.mlflow_run import begin_mlflow_run
begin_mlflow_run(Path(sys.argv[2]), uri=sys.argv[1])
"""
# Killed when MLflow has made its tables and not yet migrated them.
KILLED = """
import os, signal
from alembic import command
command.upgrade = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_two_first_uses_at_once_after_one_that_was_killed_both_succeed(tmp_path: Path) -> None:
    def ended(name: str, script: str = FIRST_USE) -> int:
        words = f"sqlite:///{tmp_path / 'mlflow.db'}", str(tmp_path / name)
        return python_c(script, *words, seconds=120).returncode

    assert ended("killed", KILLED + FIRST_USE) == -signal.SIGKILL
    assert not (tmp_path / "mlflow.db").exists()
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(ended, ("one", "two"))] == [0, 0]
    assert {file.name for file in tmp_path.iterdir()} == {"mlflow.db", "one", "two"}
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    known = [one.experiment_id for one in client.search_experiments()]
    assert len(client.search_runs(known)) == 2


def test_a_damaged_database_is_one_line_with_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE mcp_servers (id INTEGER)")  # as an interrupted first use
    with pytest.raises(TrackingError, match="away if it is damaged") as raised:
        open_client(f"sqlite:///{file}")
    assert "\n" not in str(raised.value)
