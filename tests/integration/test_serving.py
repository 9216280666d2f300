"""The registered champion behind a real `mlflow models serve`, over HTTP."""

import csv
import gzip
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import mlflow
import psutil
import pytest

from d2plm.commands import generate, score
from d2plm.config import compose
from d2plm.tracking.registry import MODEL_CODE, _signature
from tests.conftest import Exports
from tests.integration.conftest import Finished

pytestmark = pytest.mark.slow

JSON = "application/json"
PROTEIN = "MKTAYIAKQRQISFVKSHFSRQ"


@contextmanager
def serving(model: str, log: Path, **environment: str) -> Iterator[tuple[httpx.Client, int]]:
    """`mlflow models serve` of a model: a client of it, and the id of its process group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--env-manager=local"]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, f"--model-uri={model}", "--host=127.0.0.1", f"--port={port}"],
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "MLFLOW_DISABLE_TELEMETRY": "true",
                "OMP_NUM_THREADS": "1",
                "D2PLM_SERVING_MAX_RESIDUES": "2000",
                **environment,
            },
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + 300
            while not answers(client):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield client, process.pid
    finally:
        os.killpg(process.pid, signal.SIGTERM)
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


def test_a_client_of_the_first_versions_is_still_served(server: httpx.Client) -> None:
    table = {"columns": ["sequence"], "data": [[PROTEIN], ["GSHMLVAGG"]]}
    body = {"dataframe_split": table, "params": {"masks_per_sequence": 3, "seed": 1}}
    predictions = server.post("/invocations", json=body).json()["predictions"]
    assert [row["residues"] for row in predictions] == [22, 9]
    assert all({"nats", "perplexity"} <= {*row} for row in predictions)


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


def test_it_fills_in_what_is_masked_and_keeps_the_rest(server: httpx.Client) -> None:
    first, second, third = rows(
        server, [{"sequence": "MK__<mask>GG"}, {"sequence": "____"}], task="infill", steps=2
    ) + rows(server, [{"sequence": "MK__<mask>GG"}], task="infill", steps=2)
    assert first["sequence"][:2] + first["sequence"][5:] == "MKGG"
    assert (first["length"], second["length"]) == (7, 4)
    assert (first["row"], second["row"]) == (0, 1)
    assert third == first


def table(*values: Any, column: str = "sequence", **params: Any) -> bytes:
    records = [{column: value} for value in values]
    return json.dumps({"dataframe_records": records, "params": params}).encode()


GENERATE: dict[str, Any] = {"column": "length", "task": "generate"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (table("MJT"), "row 0: the sequence holds 'J', which is not a residue letter"),
        (table("MKT", None), "row 1: null is not a string"),
        (table(5), "row 0: 5 is not a string"),
        (table(""), "row 0: the sequence is empty"),
        (table("M" * 127), "row 0: the sequence has 127 residues, but the model supports"),
        (table(*["M" * 126] * 16), "at least 2,016 residues; this server accepts 2,000"),
        (table(), "no rows with the column 'sequence'"),
        (table("MKT", column="protein"), "no rows with the column 'sequence'"),
        (table("MKT", task="fold"), "task='fold': must be one of score, generate, infill"),
        (table("MKT", task="generate"), "task='generate' reads the column 'length'"),
        (table("MKT", task="infill"), "row 0: nothing to fill in"),
        (table("MK?_", task="infill"), "illegal letter '?' at position 3"),
        (table("MKT", steps=5), "steps=5: must be omitted with task='score'"),
        (table("MKT", masks_per_sequence=0), "masks_per_sequence=0: must be an integer ≥ 1"),
        (table(127, **GENERATE), "row 0: length=127: must be an integer from 1 to 126"),
        (table(None, number=10**9, **GENERATE), "at least 1,000,000,000 residues; this server"),
        (table(9, sampler="guess", **GENERATE), "sampler='guess': must be one of ancestral"),
        (table(9, sampler="euler", **GENERATE), "it follows the velocity of a flow"),
        (table(9, temperature=0, **GENERATE), "temperature=0.0: must be a number > 0"),
        (table(9, steps=10**6, **GENERATE), "steps=1000000: must be an integer ≥ 1 and ≤ "),
        (table(9, steps="5", **GENERATE), "steps='5': must be an integer"),
        (table(9, steps=5.5, **GENERATE), "steps=5.5: must be an integer"),
        (table(9, temprature=2, **GENERATE), "no such setting (did you mean 'temperature'?)"),
        (table("nine", **GENERATE), "row 0: length='nine': must be a number or null"),
        (b'{"dataframe_records": [{"sequence": "MKT"}], "params": 5}', "must be an object"),
        (b'{"dataframe_records": {"sequence": "MKT"}}', "must be a list of rows"),
        (b'{"dataframe_records": [', "cannot be read"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "a JSON object with one of inputs"),
        (b"", "cannot be read"),
        (b'{"rows": []}', "a JSON object with one of inputs"),
    ],
)
def test_a_malformed_request_is_rejected_with_the_reason(
    server: httpx.Client, body: bytes, reason: str
) -> None:
    response = server.post("/invocations", content=body, headers={"Content-Type": JSON})
    assert response.status_code == 400
    assert reason in response.json()["message"]
    assert "Traceback" not in response.text
    assert str(Path(__file__).parents[2]) not in response.text


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}])
def test_another_content_type_or_none_is_rejected(
    server: httpx.Client, headers: dict[str, str]
) -> None:
    response = server.post("/invocations", content=table(PROTEIN), headers=headers)
    assert response.status_code == 415
    assert "must be application/json or text/csv" in response.json()["message"]


@pytest.mark.parametrize("value", [None, True])
def test_a_value_that_is_not_a_text_is_not_scored_as_one(server: httpx.Client, value: Any) -> None:
    for body in (
        {"inputs": {"sequence": [value]}},
        {"instances": [{"sequence": PROTEIN}, {"sequence": value}]},
    ):
        response = server.post("/invocations", json=body)
        assert response.status_code == 400
        assert "is not a string" in response.json()["message"]


def test_a_long_body_is_rejected_unread(server: httpx.Client) -> None:
    chunks = (b" " * 2**20 for _ in range(20))
    response = server.post("/invocations", content=chunks, headers={"Content-Type": JSON})
    assert response.status_code == 413
    assert "longer than 1,048,576 bytes" in response.json()["message"]


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
            (b"sequence\n" + protein(rng, 'MK,\0 "\r?').encode(), "text/csv"),
            ("sequence,sequence\nMKT,МКТ\n".encode(), "text/csv"),
            (b"a," * rng.randint(1, 400_000), "text/csv"),
        ]
    )


def drawn(rng: random.Random) -> tuple[Sent, bool]:
    """A request, and whether it must be answered."""
    kind = rng.choice(["valid", "csv", "odd", "odd", "bytes", "bytes", "hostile"])
    document = valid(rng)
    if kind == "hostile":
        return hostile(rng), False
    if kind == "csv":
        lines = ["sequence", protein(rng), protein(rng)]
        return ("\r\n".join(lines).encode(), "text/csv"), True
    if kind == "odd":
        with_odd_value(rng, document)
    body = json.dumps(document).encode()
    return (with_other_bytes(rng, body) if kind == "bytes" else body, JSON), kind == "valid"


def require_right_types(body: bytes, predictions: list[Any]) -> None:
    """Of a JSON request that was answered, read once more, with no code of the server."""
    request = json.loads(body.decode("utf-8-sig"), parse_constant=pytest.fail)
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
        right = {"temperature": (int, float), "task": (str,)}.get(name, (int, type(None)))
        assert type(value) in right, body
    assert len(predictions) == len(cells) * (1 if task == "score" else params.get("number", 1))


class Watched:
    """Asks a server for `/ping`, and its processes for their memory, ten times a second.

    Attributes:
        slowest: seconds that an answer took.
        most: bytes that the processes held together.
    """

    def __init__(self, client: httpx.Client, group: int) -> None:
        self.client, self.group = client, psutil.Process(group)
        self.slowest, self.most, self.asked = 0.0, 0, 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def memory(self) -> int:
        processes = [self.group, *self.group.children(recursive=True)]
        return sum(process.memory_info().rss for process in processes)

    def watch(self) -> None:
        while not self.done.wait(0.1):
            start = time.monotonic()
            ok = answers(self.client)
            self.slowest = max(self.slowest, time.monotonic() - start if ok else math.inf)
            self.most = max(self.most, self.memory())
            self.asked += 1

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def __str__(self) -> str:
        return f"{self.asked} pings, slowest {self.slowest:.2f} s; {self.most / 2**20:.0f} MiB"


@pytest.mark.thorough
def test_a_thousand_requests_are_answered_or_rejected(exports: Exports, tmp_path: Path) -> None:
    model = tmp_path / "model"
    mlflow.pyfunc.save_model(
        model,
        python_model=str(MODEL_CODE),
        artifacts={"export": str(exports.masked)},
        signature=_signature(),
        pip_requirements=["d2plm"],
    )
    rng = random.Random(15)
    codes: Counter[int] = Counter()
    with serving(str(model), tmp_path / "log") as (client, group), ThreadPoolExecutor(6) as pool:
        watched = Watched(client, group)

        def send(request: tuple[Sent, bool]) -> None:
            (body, content_type), is_valid = request
            headers = {} if content_type is None else {"Content-Type": content_type}
            response = client.post("/invocations", content=body, headers=headers)
            codes[response.status_code] += 1
            document = response.json()
            if response.status_code == 200:
                if content_type != "text/csv":
                    require_right_types(body, document["predictions"])
                return
            assert response.status_code in (400, 413, 415), (body, response.text)
            assert not is_valid, (body, response.text)
            assert set(document) == {"error_code", "message"}
            assert len(document["message"]) < 600 and "Traceback" not in response.text

        deque(pool.map(send, [drawn(rng) for _ in range(100)]), maxlen=0)
        before = watched.memory()
        with watched:
            deque(pool.map(send, (drawn(rng) for _ in range(900))), maxlen=0)
        print(f"codes {dict(codes)}; {watched} (before: {before / 2**20:.0f} MiB)")
        assert watched.slowest < 5
        assert watched.most - before < 300 * 2**20
