"""The service over HTTP returns what the library returns, and rejects requests in one line."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from d2plm import __version__, load_model
from d2plm.api import SequenceModel
from d2plm.core.errors import ModelError
from d2plm.core.vocabulary import CANONICAL, RESIDUES
from d2plm.export.exported_model import ExportedModel, load_export
from d2plm.serving.app import application
from d2plm.serving.schedule import HungUp, Progress, Speed, Work
from d2plm.serving.service import Service, parse_request
from tests.conftest import Exports, MonkeyPatch
from tests.unit.serving.conftest import JSON, LIMIT, Ask, asking

PROTEINS = ["MKTAYIAKQR", "GSHMLVAGG"]


def rows_of(answer: tuple[int, Any]) -> list[dict[str, Any]]:
    status, document = answer
    assert status == 200, document
    rows: list[dict[str, Any]] = document["predictions"]
    return rows


def table(column: str, *values: Any, **params: Any) -> dict[str, Any]:
    return {"inputs": {column: values}, "params": params}


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_scores_and_designs_are_those_of_the_library(exports: Exports, kind: str) -> None:
    folder = getattr(exports, kind)
    model, templates = load_model(folder), ["MK__<mask>GG", "_____"]
    masks, settings = {"masks_per_sequence": 3, "seed": 4}, {"number": 2, "steps": 3, "seed": 5}
    drawing = {"task": "generate", **settings}
    with asking(Service(load_export(folder))) as ask:
        rows = rows_of(ask(table("sequence", *PROTEINS, **masks)))
        filled = rows_of(ask(table("sequence", *templates, task="infill", **settings)))
        new = rows_of(ask(table("length", None, None, max_length=20, **drawing)))
        of_length = rows_of(ask(table("length", 9, 11.0, **drawing)))
    for row, score in zip(rows, model.score(PROTEINS, **masks), strict=True):
        assert {*row} == {"residues", "nats", "nats_low", "nats_high", "perplexity"}
        assert all(value == getattr(score, name) for name, value in row.items())
    assert [row["sequence"] for row in filled] == model.infill(templates, **settings)
    assert [row["row"] for row in filled] == [0, 0, 1, 1]
    assert [row["length"] for row in filled] == [7, 7, 5, 5]
    assert filled[0]["settings"].startswith(f"paradigm={model.exported.paradigm.name} sampler=")
    assert "steps=3 " in filled[0]["settings"]
    for found, other in ((new, {"number": 4, "max_length": 20}), (of_length, {"length": [9, 11]})):
        assert [row["sequence"] for row in found] == model.generate(**settings | other)


def test_no_value_is_null_and_models_are_prepared_once(ask: Ask, monkeypatch: MonkeyPatch) -> None:
    (row,) = rows_of(ask(table("sequence", "XX", masks_per_sequence=1)))
    assert row["residues"] == 0
    assert [row[name] for name in ("nats_low", "nats_high", "perplexity")] == [None] * 3
    monkeypatch.setattr(ExportedModel, "denoiser", lambda *_: pytest.fail("prepared again"))
    rows_of(ask(table("length", 3, task="generate", steps=1)))


def test_pings_and_the_version_are_answered(service: Service) -> None:
    with TestClient(application(service, 60)) as client:
        assert client.get("/ping").status_code == client.get("/health").status_code == 200
        assert client.get("/version").json() == __version__
        response = client.get("/invocations")
    assert (response.status_code, {*response.json()}) == (405, {"error_code", "message"})


# Requests of wrong contents: the beginning of the message, which names the field → the body.
GENERATE = {"task": "generate"}
REFUSED: dict[str, dict[str, Any]] = {
    "inputs.0.sequence: ": table("protein", "MKT"),
    "row 1: the sequence holds 'J'": table("sequence", "MKT", "MJT"),
    "row 0: the sequence has 127 residues": table("sequence", "M" * 127),
    "params.masks_per_sequence=9999: ": table("sequence", "MKT", masks_per_sequence=9999),
    "params.seed=True: ": table("sequence", "MKT", seed=True),
    "params.seed=9223372036854775808: ": table("sequence", "MKT", seed=2**63),
    "params.temprature: ": table("sequence", "MKT", temprature=1.0),
    "template of row 0: nothing to fill in": table("sequence", "MKT", task="infill"),
    "row 1: length=127: ": table("length", 5, 127, **GENERATE),
    "inputs.0.length=True: ": table("length", True, **GENERATE),
    "inputs.0.length=1.5: ": table("length", 1.5, **GENERATE),
    "min_length=99: ": table("length", None, min_length=99, **GENERATE),
    "sampler='euler': ": table("length", 5, sampler="euler", **GENERATE),
    "parms: has no place": {"inputs": [{"sequence": "MKT"}], "parms": {}},
    "instances: has no place": {"inputs": [{"sequence": "MKT"}], "instances": []},
    "instances.0='MKT': ": {"instances": ["MKT"]},
    "dataframe_split={'columns': ": {"dataframe_split": {"columns": ["a"], "data": [["M", "K"]]}},
    "inputs={": {"inputs": {"sequence": ["M"], "length": [1, 2]}},
    "the request has or generates at least 1,0": table("sequence", "<mask:999999>", task="infill"),
    "relatives: not supported": table("sequence", "MKT", relatives=["MKS"]),
}


def test_bad_input_is_a_bad_request_of_one_line_that_names_the_field(ask: Ask) -> None:
    for reason, body in REFUSED.items():
        status, document = ask(body)
        assert (status, document["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
        assert document["message"].startswith(reason)
        assert "\n" not in document["message"]
        assert len(document["message"]) < 600


SCORE = b'{"inputs": {"sequence": ["MKT"]}}'
HOSTILE: list[tuple[bytes, str | None, int, str]] = [
    (SCORE, None, 415, "Content-Type"),
    (SCORE + b" " * 2**20, JSON, 413, "1,048,576 bytes"),
    (b"[" * 100_000, JSON, 400, "recursion limit exceeded"),
    (json.dumps("junk " * 100_000).encode(), JSON, 400, "should be an object"),
    (b'{"inputs": {"sequence": ["MKT"]}, "params": {"seed": NaN}}', JSON, 400, "params.seed=nan"),
    (b'{"inputs": {"length": [' + b"9" * 5000 + b"]}}", JSON, 400, "number out of range"),
    (b'{"inputs": {"sequence": ["\xff"]}}', JSON, 400, "unicode"),
    (b'{"inputs": {"length": [1%s]}}' % (b",1" * 65536), JSON, 400, "inputs"),
    (b'{"inputs": [{"sequence": "M"}, {"sequence": "M", "sequence": "K"}]}', JSON, 400, "twice"),
]


def test_a_hostile_request_is_rejected_in_a_short_answer(ask: Ask) -> None:
    for body, content_type, status, reason in HOSTILE:
        found, document = ask(body, content_type)
        assert (found, set(document)) == (status, {"error_code", "message"}), reason
        assert reason in document["message"]
        assert len(document["message"]) < 600
        assert "junk junk junk junk" not in document["message"]


def test_too_much_is_rejected_before_the_work(exports: Exports, monkeypatch: MonkeyPatch) -> None:
    service = Service(load_export(exports.masked), max_residues=100)
    monkeypatch.setattr(service, "denoiser", lambda *_: pytest.fail("it has begun"))
    with asking(service) as ask:
        for body in (
            table("sequence", "M" * 60, "M" * 41),
            table("sequence", "M_" * 17, task="infill", number=3),
            table("length", 60, 41, task="generate"),
            table("length", None, task="generate", number=10**30),
        ):
            status, document = ask(body)
            assert status == 400
            assert "residues; this server accepts 100 per request" in document["message"]


# Form → the body of a request with these cells of a column `sequence`.
FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "inputs": lambda cells: {"sequence": cells},
    "instances": lambda cells: [{"sequence": cell} for cell in cells],
    "dataframe_records": lambda cells: [{"sequence": cell} for cell in cells],
    "dataframe_split": lambda cells: {"columns": ["sequence"], "data": [[one] for one in cells]},
}
PROTEIN = st.text(RESIDUES + RESIDUES.lower(), min_size=1, max_size=5)
# Texts that hold something else than residues, also where a conversion would drop or replace it.
NO_PROTEIN = st.sampled_from(["", " ", "MK1", "MKT\0", "\0", "МКТ", "MK\u200b", "Ｍ", "M\xa0"])
NO_TEXT = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    *(st.lists(PROTEIN, max_size=2), st.dictionaries(PROTEIN, PROTEIN, max_size=2)),
)


@given(
    form=st.sampled_from([*FORMS]),
    cells=st.lists(PROTEIN | NO_PROTEIN | NO_TEXT, min_size=1, max_size=3),
)
def test_only_residues_are_scored_in_any_form(ask: Ask, form: str, cells: list[Any]) -> None:
    status, document = ask({form: FORMS[form](cells), "params": {"masks_per_sequence": 1}})
    good = [isinstance(x, str) and x != "" and {*x.upper()} <= {*RESIDUES} for x in cells]
    assert status == (200 if all(good) else 400), document
    if status == 200:
        residues = [row["residues"] for row in document["predictions"]]
        assert residues == [sum(letter in CANONICAL for letter in cell.upper()) for cell in cells]
    else:
        rows = [row for row, fits in enumerate(good) if not fits]
        places = [f"row {row}: " for row in rows] + [f".{row}.sequence=" for row in rows]
        assert any(place in document["message"] for place in places)


def test_a_defect_shows_nothing(ask: Ask, service: Service, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(service, "work", Mock(side_effect=RuntimeError(f"in {__file__}")))
    status, document = ask(SCORE)
    assert (status, document["error_code"]) == (500, "INTERNAL_ERROR")
    assert "the server's log" in document["message"]
    assert "/" not in document["message"]
    work = Work("score", 0.0, Mock(side_effect=ModelError("it has diverged")))
    monkeypatch.setattr(service, "work", lambda _: work)
    assert ask(SCORE) == (500, {"error_code": "INTERNAL_ERROR", "message": "it has diverged"})


def test_work_that_would_be_late_is_refused(service: Service, monkeypatch: MonkeyPatch) -> None:
    # As if it computed a pass in a second, and a thousand tokens in another.
    monkeypatch.setattr(service, "speed", Speed(1.0, 0.001))
    with TestClient(application(service, 60)) as client:
        for body in (
            table("sequence", "M" * 100, masks_per_sequence=600),
            table("length", 98, task="generate", steps=100, number=6),
            table("sequence", "M" * 28 + "_" * 70, task="infill", number=9),
        ):
            response = client.post("/invocations", json=body)
            assert response.status_code == 429
            assert response.json()["error_code"] == "RESOURCE_EXHAUSTED"
            assert 1 <= int(response.headers["Retry-After"]) <= 60
            assert "would not be finished within 60 seconds" in response.json()["message"]
    with asking(service, 6000) as ask:
        assert ask(table("sequence", "MKT", masks_per_sequence=1))[0] == 200


def test_the_measurement_covers_all_kinds_of_work(exports: Exports) -> None:
    service = Service(load_export(exports.masked))

    def seconds(column: str, *values: Any, **params: Any) -> float:
        body = json.dumps(table(column, *values, **params)).encode()
        return service.work(parse_request(body)).seconds

    assert seconds("sequence", "MKT") == 0
    assert all(rate > 0 for rate in service.measure().values())
    small = seconds("sequence", "MKT")
    assert 0 < small < seconds("sequence", *["M" * LIMIT] * 400)
    assert seconds("length", LIMIT, task="generate") > small


class Blocked:
    """A service whose work of 'MKT' goes through passes until it is released or stopped."""

    def __init__(self, service: Service, monkeypatch: MonkeyPatch) -> None:
        self.entered, self.released, self.stopped = (threading.Event() for _ in range(3))
        self.runs = 0
        work = service.work

        def blocked(request: Any) -> Work:
            own = work(request)
            if request.rows[0].sequence != "MKT":
                return own
            return Work("score", 5.0, lambda progress: self.run(progress, own))

        monkeypatch.setattr(service, "work", blocked)

    def run(self, progress: Progress, own: Work) -> Any:
        self.runs += 1
        self.entered.set()
        try:
            while not self.released.wait(0.01):
                progress(0.0)
        except HungUp:
            self.stopped.set()
            raise
        return own.run(progress)


def test_a_short_request_does_not_wait(service: Service, monkeypatch: MonkeyPatch) -> None:
    blocked = Blocked(service, monkeypatch)
    with asking(service) as ask, ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, SCORE)
        assert blocked.entered.wait(30)
        assert ask(table("sequence", "MKTA"))[0] == 200
        assert not long.done()
        blocked.released.set()
        assert long.result(30)[0] == 200


async def post(app: Any, gone: threading.Event, body: bytes = SCORE) -> int:
    """Status of a request whose client hangs up when the event is set; b"": no body is sent."""
    sent, first = list[Any](), iter([{"type": "http.request", "body": body}] * bool(body))

    async def receive() -> Any:
        if message := next(first, None):
            return message
        while not gone.is_set():
            await asyncio.sleep(0.005)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", JSON.encode())]
    scope = {"type": "http", "method": "POST", "path": "/invocations", "headers": headers}
    await asyncio.wait_for(app(scope | {"query_string": b""}, receive, send), 20)
    return int(sent[0]["status"])


def test_hanging_up_ends_work_also_in_the_queue(service: Service, monkeypatch: MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        blocked = Blocked(service, patched)
        assert asyncio.run(post(application(service, 60), blocked.entered)) == 400  # nobody reads
        assert blocked.stopped.wait(10)
    assert asyncio.run(post(application(service, 0.05), threading.Event(), b"")) == 408
    blocked, app = Blocked(service, monkeypatch), application(service, 60)

    async def two() -> tuple[int, int]:
        first = asyncio.create_task(post(app, threading.Event()))
        await asyncio.to_thread(blocked.entered.wait, 20)
        second = await post(app, blocked.entered)
        blocked.released.set()
        return await first, second

    assert asyncio.run(two()) == (200, 400)
    assert blocked.runs == 1


def test_many_requests_at_a_time_have_the_answers_of_each_alone(ask: Ask) -> None:
    bodies = [table("sequence", "MKTAYIAKQR"[: 3 + i], masks_per_sequence=2) for i in range(6)]
    alone = [rows_of(ask(body)) for body in bodies]
    with ThreadPoolExecutor(6) as pool:
        assert [rows_of(answer) for answer in pool.map(ask, bodies)] == alone


FAMILY = ["MKTAYIAKQRLL", "MKSAYLAKQRL", "MRTAFIAKHRLLGG", "MKTGYIAQRL", "MHTAYIARQRLV"]
RELATED = ["MKTAYIAKQRLI", "GSHMLVAGG"]


@pytest.fixture(scope="module")
def library(exports: Exports) -> SequenceModel:
    return load_model(exports.related)


@pytest.fixture(scope="module")
def ask_related(exports: Exports) -> Iterator[Ask]:
    """(columns, **params) → (status, document)."""
    with asking(Service(load_export(exports.related), 65536)) as ask:
        yield lambda columns, **params: ask({"inputs": columns, "params": params})


def column_of(answer: tuple[int, Any], column: str) -> list[Any]:
    return [row[column] for row in rows_of(answer)]


def test_scores_given_relatives_are_the_library_s(ask_related: Ask, library: SequenceModel) -> None:
    given = column_of(ask_related({"sequence": RELATED}, relatives=FAMILY, max_relatives=2), "nats")
    expected = library.score(RELATED, relatives=FAMILY, max_relatives=2)
    assert given == pytest.approx([one.nats for one in expected], rel=1e-6)
    alone = column_of(ask_related({"sequence": RELATED}), "nats")
    assert alone == pytest.approx([one.nats for one in library.score(RELATED)], rel=1e-6)
    assert all(one != pytest.approx(other) for one, other in zip(given, alone, strict=True))
    assert column_of(ask_related({"sequence": RELATED}, relatives=[]), "nats") == alone
    long, one = FAMILY[0] * 200, {"masks_per_sequence": 1}  # is cut
    found = column_of(ask_related({"sequence": RELATED}, relatives=[long], **one), "nats")
    expected = library.score(RELATED, relatives=[long[:2048]], **one)
    assert found == pytest.approx([one.nats for one in expected], rel=1e-6)


def test_designs_of_relatives_are_the_library_s(ask_related: Ask, library: SequenceModel) -> None:
    settings = {"steps": 4, "seed": 3, "relatives": FAMILY}
    answer = ask_related({"length": [None]}, task="generate", number=6, **settings)
    found = column_of(answer, "sequence")
    assert found == library.generate(6, **settings)
    assert {len(text) for text in found} <= {len(text) for text in FAMILY}
    assert all(text.endswith("relatives=5") for text in column_of(answer, "settings"))
    template = "MKT____KQR__"
    answer = ask_related({"sequence": [template]}, task="infill", number=3, **settings)
    filled = column_of(answer, "sequence")
    assert filled == library.infill(template, 3, **settings)
    assert filled != library.infill(template, 3, steps=4, seed=3)


BAD_RELATIVES: dict[str, dict[str, Any]] = {
    "params.relatives='MKT': ": {"relatives": "MKT"},
    "relative 1: the sequence holds 'J'": {"relatives": ["MKT", "MJT"]},
    "there are no relatives": {"relatives": ["XX"]},
    "params.relatives=['', '', ": {"relatives": [""] * 250_000},
    "params.max_relatives=17: ": {"relatives": FAMILY, "max_relatives": 17},
    "relatives: the request has": {"relatives": ["M" * 40_000] * 2},
    "max_relatives=3: ": {"max_relatives": 3},
    "relatives: ": {"relatives": ["GGMKTGG", "MKT", "KT"]},  # all give it away
}


def test_bad_relatives_are_rejected(ask_related: Ask) -> None:
    for reason, params in BAD_RELATIVES.items():
        status, document = ask_related({"sequence": ["MKT"]}, **params)
        assert (status, document["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
        assert reason in document["message"]
        assert len(document["message"]) < 600
