"""The registered champion behind a real `d2plm serve`, over HTTP."""

import csv
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from d2plm.cli import main
from d2plm.commands import score
from d2plm.config import compose
from tests.conftest import Captured, Exports, MonkeyPatch
from tests.http_server import free_port
from tests.integration.conftest import Finished, start

JSON = "application/json"
PROTEIN = "MKTAYIAKQRQISFVKSHFSRQ"


@contextmanager
def serving(
    model: str, log: Path, *words: str, **environment: str
) -> Iterator[tuple[httpx.Client, "subprocess.Popen[bytes]"]]:
    """`d2plm serve` of a model: a client of it, and its process."""
    port = free_port()
    command = [sys.executable, "-m", "d2plm", "serve", f"model_dir='{model}'", f"port={port}"]
    process = start([*command, "device=cpu", "max_residues=2000", *words], log, **environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + 300
            while not answers(client):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield client, process
    finally:
        process.terminate()
        process.wait(90)


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
    champion = "models:/d2plm-diffusion@champion"
    slow = {"task": "generate", "number": 10, "steps": 1000}
    with (
        serving(champion, log, MLFLOW_TRACKING_URI=finished.tracking_uri) as (client, process),
        ThreadPoolExecutor(2) as pool,
    ):
        response = client.post("/invocations", json={"inputs": {"sequence": [PROTEIN]}})
        assert response.status_code == 200, response.text
        (row,) = response.json()["predictions"]
        assert {*row} == {"residues", "nats", "nats_low", "nats_high", "perplexity"}
        for name, value in row.items():
            assert float(expected[name]) == pytest.approx(value, abs=1e-4)
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


GENERATE = {"task": "generate", "steps": 2}
VALID = [
    {"inputs": {"sequence": ["MKT", "MKV"]}, "params": {"masks_per_sequence": 2, "seed": 3}},
    {"dataframe_split": {"columns": ["length"], "data": [[9], [None]]}, "params": GENERATE},
    {"instances": [{"sequence": "MK_"}], "params": {"task": "infill", "steps": 2}},
]
ODD = [b"", b"\0", b"\xff", b"NaN", b"null", b"[", b"}", b'"', b"1e999", b"[" * 10**6]


def drawn(rng: random.Random) -> tuple[bytes, bool]:
    """A request, and whether it is as it was: some of its bytes may be replaced by odd ones."""
    body = bytearray(json.dumps(rng.choice(VALID)).encode())
    changes = rng.randint(0, 4)
    for _ in range(changes):
        place, end = sorted(rng.choices(range(len(body) + 1), k=2))
        body[place : rng.choice([place, place + 1, end])] = rng.choice(ODD)
    return bytes(body), changes == 0


def memory(process: psutil.Process) -> int:
    """Bytes that it and its children hold."""
    return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])


@pytest.mark.thorough
def test_odd_requests_delay_no_ping_and_take_no_memory(exports: Exports, tmp_path: Path) -> None:
    rng, done = random.Random(15), threading.Event()
    slowest, most = 0.0, 0

    def send(request: tuple[bytes, bool]) -> None:
        body, is_valid = request
        response = client.post("/invocations", content=body, headers={"Content-Type": JSON})
        assert response.status_code in ([200] if is_valid else [200, 400, 413]), body
        if response.status_code != 200:
            assert set(response.json()) == {"error_code", "message"}
            assert len(response.text) < 700 and "Traceback" not in response.text

    def watch() -> None:
        nonlocal slowest, most
        while not done.wait(0.1):
            start = time.monotonic()
            assert answers(client)
            slowest = max(slowest, time.monotonic() - start)
            most = max(most, memory(process))

    with (
        serving(str(exports.masked), tmp_path / "log") as (client, server),
        ThreadPoolExecutor(7) as pool,
    ):
        process = psutil.Process(server.pid)
        deque(pool.map(send, [drawn(rng) for _ in range(50)]), maxlen=0)
        before, watching = memory(process), pool.submit(watch)
        try:
            deque(pool.map(send, (drawn(rng) for _ in range(400))), maxlen=0)
        finally:
            done.set()
        watching.result()
        assert slowest < 5
        assert most - before < 350 * 2**20
