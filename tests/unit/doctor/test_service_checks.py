"""MLflow and Kubeflow Pipelines over real HTTP, against servers that answer as a test says."""

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from d2plm.doctor import service_checks
from d2plm.doctor.verdicts import Verdict, examine
from tests.conftest import MonkeyPatch
from tests.http_server import JSON, free_port, listening
from tests.unit.pipelines.conftest import store

Serve = Callable[..., str]
__all__ = ["store"]  # a fixture


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: MonkeyPatch) -> None:
    # Set first, so that what the checks set themselves is taken back.
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "1")
    for name in ("MLFLOW_TRACKING_URI", "KFP_TOKEN", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """(status, content type, content, token that is asked for) → address of such a server."""
    with ExitStack() as servers:

        def start(status: int, kind: str, content: str, token: str | None = None) -> str:
            def answer(request: BaseHTTPRequestHandler, _: bytes) -> tuple[int, str, bytes]:
                refused = token and request.headers.get("Authorization") != f"Bearer {token}"
                return 401 if refused else status, kind, content.encode()

            return f"http://127.0.0.1:{servers.enter_context(listening(answer))}"

        yield start


def mlflow(trackers: list[str], uri: str, timeout_seconds: float) -> Verdict:
    check = partial(service_checks.mlflow, trackers, uri, "proteins", timeout_seconds)
    return examine({"MLflow": check}, 20)["MLflow"]


def kubeflow_pipelines(host: str | None, timeout_seconds: float) -> Verdict:
    check = partial(service_checks.kubeflow_pipelines, host, timeout_seconds)
    return examine({"KFP": check}, 20)["KFP"]


@pytest.fixture
def gone() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_sqlite_store_is_read_and_not_made(tmp_path: Path, gone: str, store: str) -> None:
    file = tmp_path / "runs" / "mlflow.db"
    uri = f"sqlite:///{file}"
    assert mlflow(["mlflow"], uri, 1).status == "ok"
    assert not file.parent.exists()
    file.parent.mkdir()
    shutil.copy(store.removeprefix("sqlite:///"), file)
    assert mlflow(["mlflow"], uri, 1).found == f"{uri} answers"
    file.write_text("not a database" * 100)
    assert mlflow(["mlflow"], uri, 1).status == "failed"
    assert mlflow(["tensorboard"], gone, 1).status == "skipped"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((403, "text/plain", "Invalid Host header - possible DNS rebinding"), "--allowed-hosts"),
        ((401, "text/plain", "You are not authenticated"), "MLFLOW_TRACKING_USERNAME"),
        ("gone", ""),
        ("silent", ""),
    ],
)
def test_an_mlflow_server_that_refuses_or_does_not_answer_fails(
    serve: Serve, request: pytest.FixtureRequest, answer: Any, said: str
) -> None:
    address = request.getfixturevalue(answer) if isinstance(answer, str) else serve(*answer)
    began = time.monotonic()
    found = mlflow(["mlflow"], address, 1)
    assert found.status == "failed" and address in found.found and said in found.found
    assert time.monotonic() - began < 5


def experiment_at(location: str) -> str:
    """The answer of a server to every question about an experiment."""
    return json.dumps({"experiment": {"experiment_id": "1", "artifact_location": location}})


def test_the_environments_server_wins(serve: Serve, gone: str, monkeypatch: MonkeyPatch) -> None:
    address = serve(200, JSON, experiment_at("mlflow-artifacts:/1"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert mlflow(["mlflow"], gone, 5).found == f"{address} answers and stores files"


def test_files_that_stay_on_this_machine_are_reported(serve: Serve, tmp_path: Path) -> None:
    for folder, status in (("/proc/mlflow/1", "failed"), (str(tmp_path), "warning")):
        found = mlflow(["mlflow"], serve(200, JSON, experiment_at(folder)), 5)
        assert found.status == status and folder in found.found
        assert "--serve-artifacts" in found.found
    assert not list(tmp_path.iterdir())


def test_passwords_are_hidden(gone: str) -> None:
    secret = gone.replace("http://", "http://me:secret@")
    assert "secret" not in str(mlflow(["mlflow"], secret, 1))
    assert "secret" not in str(kubeflow_pipelines(secret, 1))


def test_a_pipeline_servers_token_is_used(serve: Serve, monkeypatch: MonkeyPatch) -> None:
    assert kubeflow_pipelines(None, 5).status == "skipped"
    address = serve(200, JSON, "{}", token="mine")  # noqa: S106  # of this test
    refused = kubeflow_pipelines(address, 5)
    assert refused.status == "failed" and "KFP_TOKEN" in refused.found
    monkeypatch.setenv("KFP_TOKEN", "mine")
    assert kubeflow_pipelines(f"{address}/", 5).status == "ok"


@pytest.mark.parametrize("at", ["gone", "silent", "kubeflow.invalid", "http://["])
def test_an_address_where_nothing_answers_fails(gone: str, silent: str, at: str) -> None:
    found = kubeflow_pipelines({"gone": gone, "silent": silent}.get(at, at), 0.5)
    assert found.status == "failed" and "KFP_HOST" in found.found


def test_a_login_page_fails(serve: Serve) -> None:
    for status, kind in ((200, "text/html; charset=utf-8"), (302, "text/plain")):
        assert "login page" in kubeflow_pipelines(serve(status, kind, "<html>"), 5).found
