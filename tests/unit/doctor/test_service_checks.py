"""MLflow and Kubeflow Pipelines over real HTTP, against servers that answer as a test says."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from d2plm.doctor import service_checks
from d2plm.doctor.verdicts import Verdict, examine
from d2plm.tracking.sqlite_store import create_store
from tests.http_server import JSON, listening

HTML = "text/html; charset=utf-8"
Serve = Callable[..., str]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """The verdict as the doctor prints it."""
    check = partial(service_checks.mlflow, trackers, uri, "proteins", timeout_seconds)
    return examine({"MLflow": check}, 20)["MLflow"]


def kubeflow_pipelines(host: str | None, timeout_seconds: float) -> Verdict:
    """The verdict as the doctor prints it."""
    check = partial(service_checks.kubeflow_pipelines, host, timeout_seconds)
    return examine({"KFP": check}, 20)["KFP"]


@pytest.fixture
def gone() -> str:
    with socket.create_server(("127.0.0.1", 0)) as freed:
        return f"http://127.0.0.1:{freed.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_missing_sqlite_store_is_not_made(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "mlflow.db"
    assert mlflow(["mlflow"], f"sqlite:///{file}", 1).status == "ok"
    assert not file.parent.exists()


def test_a_sqlite_store_answers_and_a_damaged_one_fails(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    create_store(file)
    assert mlflow(["mlflow"], f"sqlite:///{file}", 1).found == f"sqlite:///{file} answers"
    file.write_text("not a database" * 100)
    found = mlflow(["mlflow"], f"sqlite:///{file}", 1)
    assert found.status == "failed" and "move" in found.found


def test_without_mlflow_among_the_trackers_its_store_is_not_asked(gone: str) -> None:
    assert mlflow(["tensorboard"], gone, 1).status == "skipped"


def experiment_at(location: str) -> str:
    """The answer of a server to every question about an experiment."""
    return json.dumps({"experiment": {"experiment_id": "1", "artifact_location": location}})


def test_the_environments_mlflow_server_wins_and_stores_an_empty_file(
    serve: Serve, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve(200, JSON, experiment_at("mlflow-artifacts:/1"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert mlflow(["mlflow"], gone, 5).found == f"{address} answers and stores files"


def test_an_mlflow_server_whose_files_stay_on_this_machine_is_reported(
    serve: Serve, tmp_path: Path
) -> None:
    for folder, status in (("/proc/mlflow/1", "failed"), (str(tmp_path), "warning")):
        found = mlflow(["mlflow"], serve(200, JSON, experiment_at(folder)), 5)
        assert found.status == status and folder in found.found
        assert "--serve-artifacts" in found.found
    assert not list(tmp_path.iterdir())


def test_an_mlflow_server_that_does_not_know_its_host_says_what_to_allow(serve: Serve) -> None:
    address = serve(403, "text/plain", "Invalid Host header - possible DNS rebinding attack")
    found = mlflow(["mlflow"], address, 5)
    assert found.status == "failed"
    assert "--allowed-hosts" in found.found


def test_an_mlflow_server_that_wants_a_password_reports_it(serve: Serve) -> None:
    found = mlflow(["mlflow"], serve(401, "text/plain", "You are not authenticated"), 5)
    assert found.status == "failed" and "MLFLOW_TRACKING_USERNAME" in found.found


@pytest.mark.parametrize("server", ["gone", "silent"])
def test_an_mlflow_server_that_is_gone_or_silent_is_given_up(
    server: str, request: pytest.FixtureRequest
) -> None:
    address, began = request.getfixturevalue(server), time.monotonic()
    found = mlflow(["mlflow"], address, 1)
    assert found.status == "failed" and address in found.found
    assert time.monotonic() - began < 5


def test_passwords_are_hidden(gone: str) -> None:
    secret = gone.replace("http://", "http://me:secret@")
    assert "secret" not in str(mlflow(["mlflow"], secret, 1))
    assert "secret" not in str(kubeflow_pipelines(secret, 1))


def test_a_pipeline_server_answers(serve: Serve) -> None:
    assert kubeflow_pipelines(serve(200, JSON, "{}") + "/", 5).status == "ok"


def test_without_kfp_host_the_pipeline_server_is_skipped() -> None:
    assert kubeflow_pipelines(None, 5).status == "skipped"


def test_a_pipeline_servers_token_is_used(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    address = serve(200, JSON, "{}", token="mine")  # noqa: S106  # of this test
    refused = kubeflow_pipelines(address, 5)
    assert refused.status == "failed" and "KFP_TOKEN" in refused.found
    monkeypatch.setenv("KFP_TOKEN", "mine")
    assert kubeflow_pipelines(address, 5).status == "ok"


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (200, HTML, "login page"),
        (302, "text/plain", "login page"),
        (403, JSON, "403; request permission"),
        (503, JSON, "503; check the log"),
    ],
)
def test_what_is_not_the_pipeline_api_is_distinguished(
    serve: Serve, status: int, kind: str, message: str
) -> None:
    found = kubeflow_pipelines(serve(status, kind, "<html>"), 5)
    assert found.status == "failed" and message in found.found


def test_a_pipeline_server_that_is_gone_or_silent_or_no_address_fails(
    gone: str, silent: str
) -> None:
    for address in (gone, silent, "kubeflow.invalid", "http://["):
        found = kubeflow_pipelines(address, 0.3)
        assert found.status == "failed" and "KFP_HOST" in found.found
