"""The registered champion behind a real `d2plm serve`, over HTTP."""

import csv
import gzip
import json
import os
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
from typing import Any

import httpx
import psutil
import pytest

from d2plm.cli import main
from d2plm.commands import generate, score
from d2plm.config import compose
from tests.conftest import Captured, Exports, MonkeyPatch
from tests.integration.conftest import Finished

JSON = "application/json"
PROTEIN = "MKTAYIAKQRQISFVKSHFSRQ"


def a_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


@contextmanager
def serving(
    model: str, log: Path, *words: str, **environment: str
) -> Iterator[tuple[httpx.Client, "subprocess.Popen[bytes]"]]:
    """`d2plm serve` of a model: a client of it, and its process."""
    port = a_free_port()
    command = [sys.executable, "-m", "d2plm", "serve", f"model_dir='{model}'", f"port={port}"]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "device=cpu", "max_residues=2000", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=stream,
            stderr=stream,
        )
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


@pytest.fixture(scope="module")
def server(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server of the champion."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    champion = "models:/d2plm-diffusion@champion"
    with serving(champion, log, MLFLOW_TRACKING_URI=finished.tracking_uri) as (client, _):
        yield client


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ping").status_code == 200
    except httpx.TransportError:
        return False


def rows(server: httpx.Client, inputs: Any, **params: Any) -> list[dict[str, Any]]:
    response = server.post("/invocations", json={"inputs": inputs, "params": params})
    assert response.status_code == 200, response.text
    predictions: list[dict[str, Any]] = response.json()["predictions"]
    return predictions


def test_it_scores_as_the_command_does(
    server: httpx.Client, finished: Finished, tmp_path: Path
) -> None:
    fasta, output = tmp_path / "one.fasta", tmp_path / "scores.csv"
    fasta.write_text(f">one\n{PROTEIN}\n")
    model = f"model_dir='{finished.work_dir / 'model'}'"
    score.run(compose("score", [model, f"input='{fasta}'", f"output='{output}'", "device=cpu"]))
    (expected,) = csv.DictReader(output.open())
    (row,) = rows(server, {"sequence": [PROTEIN]})
    assert {*row} == {"residues", "nats", "nats_low", "nats_high", "perplexity"}
    for name, value in row.items():
        assert float(expected[name]) == pytest.approx(value, abs=1e-4)


def test_it_generates_as_the_command_does(
    server: httpx.Client, finished: Finished, tmp_path: Path
) -> None:
    output = tmp_path / "generated.fasta"
    settings = {"number": 3, "steps": 4, "temperature": 0.8, "top_k": 12, "seed": 3}
    overrides = [f"generation.{name}={value}" for name, value in settings.items()]
    model = f"model_dir='{finished.work_dir / 'model'}'"
    expected = generate.run(
        compose("generate", [model, f"output='{output}'", "device=cpu", *overrides])
    )
    drawn = rows(server, [{"length": None}], task="generate", **settings)
    assert [row["sequence"] for row in drawn] == expected
    headers = [line for line in output.read_text().splitlines() if line.startswith(">")]
    for row, header in zip(drawn, headers, strict=True):
        assert header.endswith(f"length={row['length']} {row['settings']}")


def test_on_sigterm_the_requests_that_have_begun_are_finished(
    exports: Exports, tmp_path: Path
) -> None:
    slow = {"task": "generate", "number": 10, "steps": 1000}
    log = tmp_path / "log"
    with serving(str(exports.masked), log) as (client, process), ThreadPoolExecutor(2) as pool:
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
        (["models:/nosuch"], "models:/NAME@ALIAS"),
        (["{model}", "port=70000"], "port=70000"),
        (["{model}", "port={taken}"], "Address already in use"),
        (["{model}", "host=nosuch.invalid"], "host='nosuch.invalid', port=8080"),
        (["{model}", "timeout=0"], "timeout=0"),
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


# A thousand requests, drawn at random.

Sent = tuple[Any, str | None]  # body, content type
ODD: list[Any] = [
    *(None, True, False, -1, 0, 10**30, -(2.0**70), 0.5, "", "x" * 5000, "MK\0", "МКТ", "\ud800"),
    *([], [[]], {}, {"sequence": "MKT"}, ["MKT", None], [True], "nan", "None"),
]


def protein(rng: random.Random, letters: str = "ACDEFGHIKLMNPQRSTVWYX") -> str:
    return "".join(rng.choices(letters, k=rng.randint(1, 30)))


def in_a_form(rng: random.Random, column: str, values: list[Any]) -> dict[str, Any]:
    records = [{column: value} for value in values]
    return rng.choice(
        [
            {"inputs": {column: values}},
            {"inputs": records},
            {"instances": records},
            {"instances": {column: values}},
            {"dataframe_records": records},
            {"dataframe_split": {"columns": [column], "data": [[value] for value in values]}},
        ]
    )


def valid(rng: random.Random) -> dict[str, Any]:
    task, rows = rng.choice(["score", "generate", "infill"]), range(rng.randint(1, 4))
    params: dict[str, Any] = {"task": task, "seed": rng.randrange(2**40)}
    if task == "score":
        params["masks_per_sequence"] = rng.randint(1, 4)
        return in_a_form(rng, "sequence", [protein(rng) for _ in rows]) | {"params": params}
    params |= {"steps": rng.randint(1, 4), "number": rng.randint(1, 3), "temperature": 0.7}
    if task == "generate":
        lengths = [rng.choice([None, rng.randint(1, 40)]) for _ in rows]
        return in_a_form(rng, "length", lengths) | {"params": params}
    return in_a_form(rng, "sequence", [protein(rng) + "_" for _ in rows]) | {"params": params}


def with_odd_value(rng: random.Random, document: dict[str, Any]) -> None:
    """Replace one value at any depth."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(document)
    node, key = rng.choice(places)
    node[key] = rng.choice(ODD)


def with_other_bytes(rng: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        place, end = sorted(rng.choices(range(len(changed) + 1), k=2))
        odd = rng.choice([b"", b"\0", b"\xff", b"NaN", b"null", b"[", b"}", b'"', b"1e999"])
        changed[place : rng.choice([place, place + 1, end])] = odd
    return bytes(changed)


def hostile(rng: random.Random) -> Sent:
    body = json.dumps(valid(rng)).encode()
    long = rng.randint(2**20, 2**24)
    return rng.choice(
        [
            (body, None),
            (body, rng.choice(["", ";", "text/html", f"{JSON}; charset=latin-1", "a" * 5000])),
            (body.decode().encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"])), JSON),
            (b"[" * rng.randint(1, 10**6), JSON),
            (b'{"inputs":' * rng.randint(1, 10**5), JSON),
            (b"junk " * (long // 5), JSON),
            ((b"[[]," * 2**14 for _ in range(long // 2**16)), JSON),
            (b'{"inputs": [{}%s]}' % (b",{}" * rng.randint(1, 300_000)), JSON),
            (b'{"inputs": {"sequence": [""%s]}}' % (b',""' * rng.randint(1, 300_000)), JSON),
            (b'{"inputs": {"length": [%s]}}' % (b"9" * rng.randint(1, 5000)), JSON),
            (b"PAR1" + rng.randbytes(1000), "application/vnd.apache.parquet"),
            (rng.randbytes(rng.randint(0, 5000)), rng.choice([JSON, "text/csv"])),
            (gzip.compress(body), JSON),
        ]
    )


def drawn(rng: random.Random) -> tuple[Sent, bool]:
    """A request, and whether it must be answered."""
    kind = rng.choice(["valid", "valid", "odd", "odd", "bytes", "bytes", "hostile"])
    document = valid(rng)
    if kind == "hostile":
        return hostile(rng), False
    if kind == "odd":
        with_odd_value(rng, document)
    body = json.dumps(document).encode()
    return (with_other_bytes(rng, body) if kind == "bytes" else body, JSON), kind == "valid"


def require_right_types(body: bytes, predictions: list[Any]) -> None:
    """Of a JSON request that was answered, read once more, with no code of the server."""
    request = json.loads(body, parse_constant=pytest.fail)
    params = request.pop("params", None) or {}
    ((form, data),) = request.items()
    task = params.get("task", "score")
    column = "length" if task == "generate" else "sequence"
    if form == "dataframe_split":
        place = data["columns"].index(column)
        cells = [row[place] for row in data["data"]]
    elif isinstance(data, dict):
        cells = data[column] if isinstance(data[column], list) else [data[column]]
    else:
        cells = [row.get(column) for row in data]
    kinds = (int, float, type(None)) if task == "generate" else (str,)
    assert all(type(cell) in kinds for cell in cells), body
    texts = [cell for cell in cells if isinstance(cell, str)]
    assert all(text.isascii() and "\0" not in text for text in texts), body
    for name, value in params.items():
        right = {"temperature": (int, float, type(None)), "task": (str,)}.get(
            name, (int, type(None))
        )
        assert type(value) in right, body
    assert len(predictions) == len(cells) * (1 if task == "score" else params.get("number", 1))


def memory(process: psutil.Process) -> int:
    """Bytes that it and its children hold."""
    return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])


@pytest.mark.thorough
def test_a_thousand_requests_are_answered_or_rejected(exports: Exports, tmp_path: Path) -> None:
    rng = random.Random(15)
    slowest, most, done = 0.0, 0, threading.Event()

    def send(request: tuple[Sent, bool]) -> None:
        (body, content_type), is_valid = request
        headers = {} if content_type is None else {"Content-Type": content_type}
        response = client.post("/invocations", content=body, headers=headers)
        document = response.json()
        if response.status_code == 200:
            require_right_types(body, document["predictions"])
            return
        assert response.status_code in (400, 413, 415), (body, response.text)
        assert not is_valid, (body, response.text)
        assert set(document) == {"error_code", "message"}
        assert len(document["message"]) < 600 and "Traceback" not in response.text

    def ping() -> None:
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
        deque(pool.map(send, [drawn(rng) for _ in range(100)]), maxlen=0)
        before, pings = memory(process), pool.submit(ping)
        try:
            deque(pool.map(send, (drawn(rng) for _ in range(900))), maxlen=0)
        finally:
            done.set()
        pings.result()
        assert slowest < 5
        assert most - before < 350 * 2**20
