"""Tracking runs: one run per folder; failures are one line, without passwords."""

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest
from mlflow import MlflowClient

from d2plm.core.errors import DataError, TrackingError
from d2plm.core.redaction import redacted
from d2plm.tracking import mlflow_run
from d2plm.tracking.mlflow_run import KEY_TAG, RUN_FILE, MLflowRun, open_client, written_here
from d2plm.tracking.runs import Run, Runs, tracking_run
from tests.conftest import Logged, MonkeyPatch
from tests.http_server import free_port
from tests.unit.tracking.conftest import Refuse, repeat


def begun(output_dir: Path, **settings: str) -> str:
    with tracking_run(output_dir, **settings) as run:  # type: ignore[arg-type]  # by name
        assert run.id is not None
        return run.id


def log_a_file(run: Run, folder: Path) -> None:
    (folder / "artifact.txt").write_text("content")
    run.log_file(folder / "artifact.txt")


def flush_a_metric(run: Run, _folder: Path) -> None:
    run.log_metrics({"loss": 1.0}, 1)
    run.flush()


CALLS: list[tuple[str, Callable[[Run, Path], None]]] = [
    ("log_batch", flush_a_metric),
    ("log_batch", lambda run, _: run.log_params({"fresh": 1})),
    ("get_run", lambda run, _: run.log_params({"fresh": 1})),
    ("log_inputs", lambda run, at: run.log_dataset("d", "0" * 40, "train", at, {})),
    ("log_artifact", log_a_file),
    ("log_batch", lambda run, _: run.set_tags({"key": "value"})),
]


def test_a_rejected_call_is_one_line_that_names_the_store(
    client: MlflowClient, output_dir: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    run_id = begun(output_dir)
    for method, call in CALLS:
        with monkeypatch.context() as patched:
            patched.setattr(
                MlflowClient, method, Mock(side_effect=OSError("Deadlock\nsecond line"))
            )
            with pytest.raises(TrackingError) as caught:
                call(Runs([MLflowRun(client, run_id)]), tmp_path)
        line = str(caught.value)
        assert "\n" not in line and "second line" not in line
        assert all(part in line for part in ("Deadlock", client.tracking_uri, run_id))


def test_metrics_that_could_not_be_sent_are_sent_by_the_next_flush(
    client: MlflowClient, output_dir: Path, monkeypatch: MonkeyPatch
) -> None:
    run = Runs([MLflowRun(client, begun(output_dir))])
    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_batch", Mock(side_effect=OSError("down")))
        with pytest.raises(TrackingError, match="log metrics"):
            flush_a_metric(run, output_dir)
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


def test_a_failure_begins_no_run(client: MlflowClient, refuse: Refuse, output_dir: Path) -> None:
    first = begun(output_dir)
    refuse("update_run")
    with pytest.raises(TrackingError, match=first):
        begun(output_dir)
    assert json.loads((output_dir / RUN_FILE).read_text())["run_id"] == first


def test_a_given_run_is_missing_only_if_the_store_says_so(
    client: MlflowClient, refuse: Refuse, output_dir: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "1" * 32)
    with pytest.raises(TrackingError, match="unset MLFLOW_RUN_ID"):
        begun(output_dir)
    refuse("update_run", "INTERNAL_ERROR")
    with pytest.raises(TrackingError, match="cannot reopen"):
        begun(output_dir)
    assert not output_dir.exists()


def test_a_damaged_run_file_and_an_unwritable_folder_are_named(
    client: MlflowClient, output_dir: Path
) -> None:
    output_dir.mkdir()
    for content in ("{", "[]", "{}"):
        (output_dir / RUN_FILE).write_text(content)
        with pytest.raises(TrackingError, match=RUN_FILE):
            begun(output_dir)
    inside = output_dir / RUN_FILE / "run"
    with pytest.raises(DataError, match=f"{inside / RUN_FILE}: cannot be written"):
        begun(inside, experiment="unwritable")
    assert client.get_experiment_by_name("unwritable") is None


@pytest.mark.parametrize(
    "text, shown",
    [
        ("http://ada:s3cret@host:5000/x", "http://***@host:5000/x"),
        ("https://token@host", "https://***@host"),
        ("hf://datasets/name@main/file", "hf://datasets/name@main/file"),
        ("sk-learn and MKTAYIAKQRQISFVKSHFSRQ", "sk-learn and MKTAYIAKQRQISFVKSHFSRQ"),
        ("to http://a:b@h/ and http://c:d@i/", "to http://***@h/ and http://***@i/"),
        ("postgresql+psycopg://ada:pa/ss@host/db", "postgresql+psycopg://***@host/db"),
        ("http://host:5000/a@b", "http://host:5000/a@b"),
        (
            "'+traking.tags.api_token=s3cret' PGPASSWORD=a apiToken=b",
            "'+traking.tags.api_token=***' PGPASSWORD=*** apiToken=***",
        ),
        ("'+a.password=s3:cr;et': a.password=… sets", "'+a.password=***': a.password=… sets"),
        ("a.password='s3cret' a.password=null may", "a.password='***' a.password=null may"),
        ("a token: hf_AbCdEfGhIjKlMnOpQrStUv, kept", "a token: ***, kept"),
        ('{"token": "x", "lr": "1"}', '{"token": "***", "lr": "1"}'),
        ("{'WANDB_API_KEY': 'x y'}", "{'WANDB_API_KEY': '***'}"),
        ("Authorization: Bearer abc", "Authorization: Bearer ***"),
    ],
)
def test_user_and_password_of_an_address_are_not_shown(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_no_password_of_a_store_is_shown(client: MlflowClient, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ada:s3cret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingError) as caught:
        open_client(None)
    assert "http://***@127.0.0.1:9" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_server_that_never_answers_is_reported_soon(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_run, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are accepted by the system
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(TrackingError, match=r"0\.3 seconds"):
            open_client(None)


def test_a_starting_server_is_waited_for_and_an_absent_one_reported(
    monkeypatch: MonkeyPatch, caplog: Logged
) -> None:
    port, servers = free_port(), list[HTTPServer]()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(mlflow_run, "START_SECONDS", 0.5)
    monkeypatch.setattr("mlflow.MlflowClient", lambda **_: Mock())
    now, pauses = [0.0], list[float]()

    def pass_time(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += 0.2

    def start(_seconds: float) -> None:
        servers.append(HTTPServer(("127.0.0.1", port), BaseHTTPRequestHandler))
        Thread(target=servers[0].handle_request).start()

    with monkeypatch.context() as patched:
        patched.setattr(mlflow_run.time, "monotonic", lambda: now[0])
        patched.setattr(mlflow_run.time, "sleep", pass_time)
        with pytest.raises(TrackingError, match="refuses connections"):
            open_client(None)
    assert len(pauses) > 1
    assert [record.name for record in caplog.records] == ["d2plm.tracking.mlflow_run"]
    monkeypatch.setattr(mlflow_run.time, "sleep", start)
    open_client(None)
    assert len(servers) == 1
    servers[0].server_close()


def test_after_a_slow_failure_batches_wait(output_dir: Path, monkeypatch: MonkeyPatch) -> None:
    now, attempts = [0.0], []

    class Frozen:
        def log_batch(self, *_: object, **__: object) -> None:
            attempts.append(now[0])
            now[0] += 100
            raise TimeoutError

    monkeypatch.setattr(mlflow_run, "BATCH", 1)
    monkeypatch.setattr(mlflow_run.time, "monotonic", lambda: now[0])
    run = MLflowRun(Frozen(), "run")  # type: ignore[arg-type]  # all that is called
    for step in range(1, 12):
        with suppress(TimeoutError):
            run.log_metrics({"loss": 1.0}, step)
        now[0] += 100
    assert attempts == [0.0, 1000.0]


def test_a_deleted_run_is_replaced_and_a_deleted_experiment_names_its_restoring(
    client: MlflowClient, output_dir: Path, caplog: Logged
) -> None:
    first = begun(output_dir)
    client.delete_run(first)
    second = begun(output_dir)
    assert second != first
    assert f"mlflow runs restore --run-id {first}" in caplog.text
    experiment = client.create_experiment("deleted")
    client.delete_experiment(experiment)
    restoring = f"mlflow experiments restore --experiment-id {experiment}"
    with pytest.raises(TrackingError, match=restoring):
        begun(output_dir / "x", experiment="deleted")


def test_a_server_whose_files_are_folders_of_its_own_machine_is_reported(tmp_path: Path) -> None:
    server = Mock(tracking_uri="http://host")
    with pytest.raises(TrackingError, match="/proc/mlflow/1"):
        written_here(server, "/proc/mlflow/1")
    assert written_here(server, "mlflow-artifacts:/1") is None
    assert written_here(Mock(tracking_uri="sqlite:///a.db"), "/proc/mlflow/1") is None
    assert str(tmp_path / "1") in str(written_here(server, (tmp_path / "1").as_uri()))


def test_parameters_are_kept_and_cuts_are_marked(client: MlflowClient, output_dir: Path) -> None:
    with tracking_run(output_dir) as run:
        run.log_params({f"p{number}": number for number in range(300)} | {"long": "x" * 7000})
        run.set_tags({"long": "y" * 9000, "a<b": "1", "exact": "z" * 8000})
    logged = client.get_run(str(run.id)).data
    assert len(logged.params) == 301
    assert logged.params["long"] == "x" * 5999 + "…"
    assert logged.tags["long"] == "y" * 7999 + "…"
    assert logged.tags["exact"] == "z" * 8000 and logged.tags["a_b"] == "1"


def test_a_run_is_created_once_if_its_request_is_repeated_and_the_search_lags(
    client: MlflowClient, output_dir: Path, monkeypatch: MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        repeat(patched, "tracking", "create_run")
        run_id = begun(output_dir)
    run = client.get_run(run_id)
    same = f"tags.`{KEY_TAG}` = '{run.data.tags[KEY_TAG]}'"
    (found,) = client.search_runs([run.info.experiment_id], same)
    assert found.info.run_id == run_id
    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "search_runs", lambda *_: [])
        lagging = begun(output_dir / "other")
    assert client.get_run(lagging).info.status == "FINISHED"
    assert begun(output_dir / "other") == lagging
