"""TrainJobStatus: what Kubeflow Trainer is sent, and servers that take nothing."""

import gzip
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import certifi
import jsonschema  # type: ignore[import-untyped]  # it has no stubs
import pytest
import yaml

from d2plm.settings.callbacks import MetricsSettings
from d2plm.training.callbacks import trainjob_status
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.metric_logger import MetricLogger
from d2plm.training.callbacks.trainjob_status import VARIABLES, TrainJobStatus
from d2plm.training.trainer import Trainer
from tests.cluster.schema import closed
from tests.conftest import Logged, MonkeyPatch
from tests.http_server import listening
from tests.unit.training.conftest import Build

Received = list[tuple[str, str | None, Any]]  # path, authorization, body


@contextmanager
def trainer_server(
    folder: Path, answer: int = 200, may_answer: threading.Event | None = None
) -> Iterator[tuple[dict[str, str], Received]]:
    """(Trainer's variables, requests) of a server that answers so, once it may."""
    from tests.kfp_server import certified  # which imports kfp

    received: Received = []

    def take(request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str, bytes] | None:
        authorization = request.headers["Authorization"]
        received.append((request.path, authorization, json.loads(body)))
        if may_answer is not None:
            may_answer.wait()
        return answer, "text/plain", b""

    context, certificate = certified(folder)
    (folder / "token").write_text("opensesame\n")
    with listening(take, context) as port:
        values = (f"https://localhost:{port}/apis/v1/status", str(certificate))
        yield dict(zip(VARIABLES, (*values, str(folder / "token")), strict=True)), received


class Pause(Callback):
    """Makes a step take a while."""

    def on_step_begin(self, trainer: Trainer) -> None:
        time.sleep(0.03)


def callback(variables: dict[str, str]) -> TrainJobStatus:
    made = TrainJobStatus.of(variables)
    assert made is not None
    return made


def test_progress_is_sent_at_intervals(
    build: Build, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(trainjob_status, "SECONDS", 0.05)
    logger = MetricLogger(settings=MetricsSettings(every=1))
    with trainer_server(tmp_path) as (variables, received):
        build(Pause(), logger, callback(variables), max_steps=10).train()
    paths, tokens, bodies = zip(*received, strict=True)
    assert {*paths} == {"/apis/v1/status"} and {*tokens} == {"Bearer opensesame"}
    statuses = [body["trainerStatus"] for body in bodies]
    progress = [status["progressPercentage"] for status in statuses]
    assert len(progress) >= 3 and progress == sorted(progress)
    assert (progress[0], progress[-1]) == (0, 100)
    assert "estimatedRemainingSeconds" not in statuses[0]  # nothing to estimate it from
    assert statuses[-1]["estimatedRemainingSeconds"] == 0
    assert {"loss", "tokens_per_second"} <= {one["name"] for one in statuses[-1]["metrics"]}
    if folder := os.environ.get("D2PLM_CRD_DIR"):
        file = Path(folder, "trainer.kubeflow.org_trainjobs.yaml.gz")
        (version,) = yaml.safe_load(gzip.decompress(file.read_bytes()))["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
        for status in statuses:
            jsonschema.validate(status, closed(schema["trainerStatus"]))


def test_a_server_that_does_not_answer_delays_no_step(build: Build, tmp_path: Path) -> None:
    class Answer(Callback):
        def on_train_end(self, trainer: Trainer) -> None:
            assert len(got) <= 1
            may_answer.set()

    may_answer = threading.Event()
    with trainer_server(tmp_path, may_answer=may_answer) as (variables, got):
        build(callback(variables), Answer()).train()
    assert len(got) == 2


@pytest.mark.parametrize("fault", ["refuses", "500", "no token", "another certificate"])
def test_a_server_that_takes_nothing_is_said_once(
    build: Build, tmp_path: Path, monkeypatch: MonkeyPatch, caplog: Logged, fault: str
) -> None:
    monkeypatch.setattr(trainjob_status, "SECONDS", 0.02)
    with trainer_server(tmp_path, 500 if fault == "500" else 200) as (variables, got):
        if fault == "refuses":
            variables[VARIABLES[0]] = "https://localhost:9"
        elif fault == "no token":
            variables[VARIABLES[2]] = "/nowhere"
        elif fault == "another certificate":
            variables[VARIABLES[1]] = certifi.where()
        trainer = build(Pause(), callback(variables), max_steps=6)
        trainer.train()
    assert trainer.step == 6
    assert bool(got) == (fault == "500")
    assert len([line for line in caplog.messages if "status has no progress" in line]) == 1
    assert "opensesame" not in caplog.text


def test_without_the_feature_nothing_is_sent() -> None:
    assert TrainJobStatus.of({VARIABLES[0]: "https://localhost", VARIABLES[1]: ""}) is None
