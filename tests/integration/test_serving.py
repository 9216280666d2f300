"""The registered champion behind a real `d2plm serve`, over HTTP."""

import csv
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from d2plm.cli import main
from d2plm.commands import score
from d2plm.config import compose
from tests.conftest import Captured, Exports, MonkeyPatch
from tests.http_server import free_port
from tests.integration.conftest import Finished, start
from tests.runs import wait_for

PROTEIN = "MKTAYIAKQRQISFVKSHFSRQ"


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ping").status_code == 200
    except httpx.TransportError:
        return False


def test_it_scores_as_the_command_and_on_sigterm_finishes_begun_requests(
    finished: Finished, tmp_path: Path
) -> None:
    fasta, output, log = tmp_path / "one.fasta", tmp_path / "scores.csv", tmp_path / "log"
    fasta.write_text(f">one\n{PROTEIN}\n")
    model = f"model_dir='{finished.work_dir / 'model'}'"
    score.run(compose("score", [model, f"input='{fasta}'", f"output='{output}'", "device=cpu"]))
    (expected,) = csv.DictReader(output.open())
    port = free_port()
    words = ("model_dir=models:/d2plm-diffusion@champion", f"port={port}", "max_residues=2000")
    command = [sys.executable, "-m", "d2plm", "serve", *words, "device=cpu"]
    process = start(command, log, MLFLOW_TRACKING_URI=finished.tracking_uri)
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        try:
            wait_for(lambda: process.poll() is not None or answers(client))
            response = client.post("/invocations", json={"inputs": {"sequence": [PROTEIN]}})
            assert response.status_code == 200, response.text
            (row,) = response.json()["predictions"]
            assert {*row} == {"residues", "nats", "nats_low", "nats_high", "perplexity"}
            for name, value in row.items():
                assert float(expected[name]) == pytest.approx(value, abs=1e-4)
            slow = {"task": "generate", "number": 10, "steps": 1000}
            body = {"inputs": [{"length": 100}], "params": slow}
            first = pool.submit(client.post, "/invocations", json=body)
            time.sleep(0.5)
            second = pool.submit(client.post, "/invocations", json={"inputs": {"sequence": "MKT"}})
            time.sleep(0.5)
            assert not first.done()
            process.terminate()
            assert first.result().status_code == second.result().status_code == 200
            assert process.wait(30) == 128 + signal.SIGTERM
            assert "Traceback" not in log.read_text()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["runs/nosuch"], "runs/nosuch"),
        (["models:/nosuch@champion"], "mlflow.db"),
        (["{model}", "port=70000"], "port=70000"),
        (["{model}", "port={taken}"], "Address already in use"),
        (["{model}", "host=nosuch.invalid"], "host='nosuch.invalid', port=8080"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_a_line(
    exports: Exports,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: Captured,
    words: list[str],
    reason: str,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"model": str(exports.masked), "taken": taken.getsockname()[1]}
        assert main(["serve", *(word.format(**known) for word in words)]) in (1, 2)
    error = capsys.readouterr().err
    assert reason in error and error.count("d2plm: error: ") == 1 and "Traceback" not in error
