"""The registered champion behind a real `mlflow models serve`, over HTTP."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from d2plm.commands import generate, score
from d2plm.config import compose
from tests.integration.conftest import Finished

pytestmark = pytest.mark.slow

JSON = "application/json"
PROTEIN = "MKTAYIAKQRQISFVKSHFSRQ"


@pytest.fixture(scope="module")
def server(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "server.log"
    command = [sys.executable, "-m", "mlflow", "models", "serve", "--env-manager=local"]
    model = "--model-uri=models:/d2plm-diffusion@champion"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, model, "--host=127.0.0.1", f"--port={port}"],
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "MLFLOW_TRACKING_URI": finished.tracking_uri,
                "MLFLOW_DISABLE_TELEMETRY": "true",
                "OMP_NUM_THREADS": "1",
                "D2PLM_SERVING_MAX_RESIDUES": "2000",
            },
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + 180
            while not answers(client):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield client
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


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
        (table("MJT"), "row 0: the sequence holds 'J', which is no residue letter"),
        (table("MKT", None), "row 1: null is not a text"),
        (table(5), "row 0: 5 is not a text"),
        (table(""), "row 0: the sequence is empty"),
        (table("M" * 127), "row 0: the sequence has 127 residues; the model takes 126"),
        (table(*["M" * 126] * 16), "2,016 residues or more; this server takes 2,000 at a time"),
        (table(), "no rows with the column 'sequence'"),
        (table("MKT", column="protein"), "no rows with the column 'sequence'"),
        (table("MKT", task="fold"), "task='fold': must be one of score, generate, infill"),
        (table("MKT", task="generate"), "task='generate' reads the column 'length'"),
        (table("MKT", task="infill"), "row 0: nothing to fill in"),
        (table("MK?_", task="infill"), "illegal letter '?' at position 3"),
        (table("MKT", steps=5), "steps=5: must be left out with task='score'"),
        (table("MKT", masks_per_sequence=0), "masks_per_sequence=0: must be an integer ≥ 1"),
        (table(127, **GENERATE), "row 0: length=127: must be an integer from 1 to 126"),
        (table(None, number=10**9, **GENERATE), "1,000,000,000 residues or more; this server"),
        (table(9, sampler="guess", **GENERATE), "sampler='guess': must be one of ancestral"),
        (table(9, sampler="euler", **GENERATE), "it follows the velocity of a flow"),
        (table(9, temperature=0, **GENERATE), "temperature=0.0: must be a number > 0"),
        (table(9, steps=10**6, **GENERATE), "steps=1000000: must be an integer ≥ 1 and ≤ "),
        # What follows, MLflow refuses by itself.
        (table(9, steps="5", **GENERATE), "Can not safely convert `<class 'str'>`"),
        (table(9, steps=5.5, **GENERATE), "Can not safely convert `<class 'float'>`"),
        (table("nine", **GENERATE), "could not convert string to float: 'nine'"),
        (b'{"dataframe_records": [{"sequence": "MKT"}], "params": 5}', "must be a dictionary"),
        (b'{"dataframe_records": {"sequence": "MKT"}}', "must be a list of records"),
        (b'{"dataframe_records": [', "valid JSON"),
        (b"[]", "must be a JSON dictionary"),
        (b"", "valid JSON"),
        (b'{"rows": []}', "exactly one of the input fields"),
    ],
)
def test_a_malformed_request_is_refused_with_the_reason(
    server: httpx.Client, body: bytes, reason: str
) -> None:
    response = server.post("/invocations", content=body, headers={"Content-Type": JSON})
    assert response.status_code == 400
    assert reason in response.json()["message"]
    assert "Traceback" not in response.text
    assert str(Path(__file__).parents[2]) not in response.text


def test_another_content_type_is_refused(server: httpx.Client) -> None:
    response = server.post("/invocations", content="x", headers={"Content-Type": "text/plain"})
    assert response.status_code == 415
    assert "only supports" in response.text
