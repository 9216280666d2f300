"""The served model returns what the library returns, and rejects requests in one line."""

import csv
import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import scoring_server

from d2plm.core.errors import ConfigError, DataError, ModelError
from d2plm.core.vocabulary import CANONICAL, RESIDUES, decode, encode
from d2plm.evaluation.likelihood import score_sequences
from d2plm.export.exported_model import ExportedModel, load_export, save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from d2plm.tracking import request_guard
from d2plm.tracking.registry import MODEL_CODE, _signature
from d2plm.tracking.serving import SETTINGS, Service

pytestmark = pytest.mark.usefixtures("mlflow_s_own_server_afterwards")

PROTEINS = ["MKTAYIAKQR", "GSHMLVAGG"]
LIMIT = 126  # residues
PARADIGMS: dict[str, Callable[[], Paradigm]] = {
    "diffusion": AbsorbingDiffusion,
    "flow": MaskFlowMatching,
    "uniform": UniformFlowMatching,
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, tiny_dit: Callable[..., Any]) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    lengths = LengthHistogram.of(np.array([10, 12, 12, 40]), LIMIT)
    for name, paradigm in PARADIGMS.items():
        save_export(folder / name, tiny_dit(), paradigm(), lengths, {})
    return folder


@pytest.fixture
def export(exports: Path) -> Path:
    return exports / "diffusion"


@pytest.fixture
def load(exports: Path) -> Callable[..., Any]:
    """(paradigm) → the model that MLflow would serve."""
    from d2plm.tracking.served_model import ServedModel

    def of(paradigm: str = "diffusion") -> ServedModel:
        model = ServedModel()
        model.load_context(SimpleNamespace(artifacts={"export": str(exports / paradigm)}))
        return model

    return of


def table(column: str, *values: Any) -> pandas.DataFrame:
    return pandas.DataFrame({column: pandas.Series(values, dtype=object)})


def test_a_score_is_what_the_library_gives(load: Callable[..., Any], export: Path) -> None:
    scores = load().predict(None, table("sequence", *PROTEINS))
    exported = load_export(export)
    expected = score_sequences(
        exported.denoiser(),
        exported.paradigm,
        [encode(protein) for protein in PROTEINS],
        max_length=exported.max_length,
    )
    np.testing.assert_allclose(scores["nats"], expected.nats, rtol=1e-6)
    np.testing.assert_array_equal(scores["residues"], [10, 9])
    np.testing.assert_allclose(np.log(scores["perplexity"]) * scores["residues"], scores["nats"])
    assert (scores["nats_low"] < scores["nats"]).all()
    assert (scores["nats"] < scores["nats_high"]).all()


def test_what_has_no_value_is_null_as_json_has_no_nan(load: Callable[..., Any]) -> None:
    scores = load().predict(None, table("sequence", "XX"), {"masks_per_sequence": 1})
    (row,) = scores.to_dict("records")
    assert row["residues"] == 0
    assert [row[name] for name in ("nats_low", "nats_high", "perplexity")] == [None] * 3


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_designs_are_what_the_library_gives(
    load: Callable[..., Any], exports: Path, paradigm: str
) -> None:
    templates = ["MK__<mask>GG", "_____"]
    settings = {"task": "infill", "number": 2, "steps": 3, "seed": 5}
    designs = load(paradigm).predict(None, table("sequence", *templates), settings)
    exported = load_export(exports / paradigm)
    expected = sample(
        exported.denoiser(),
        exported.paradigm,
        [parse_template(template, "t") for template in templates for _ in range(2)],
        Sampling(steps=3, seed=5),
        max_length=exported.max_length,
    )
    assert designs["sequence"].tolist() == [decode(row) for row in expected]
    assert designs["row"].tolist() == [0, 0, 1, 1]
    assert designs["length"].tolist() == [7, 7, 5, 5]
    assert designs["settings"][0].startswith(f"paradigm={exported.paradigm.name} sampler=")
    assert "steps=3 " in designs["settings"][0]


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_generated_proteins_have_the_length_of_the_row_or_of_a_training_protein(
    load: Callable[..., Any], paradigm: str
) -> None:
    settings = {"task": "generate", "number": 20, "steps": 2, "max_length": 20}
    designs = load(paradigm).predict(None, table("length", 33.0, float("nan")), settings)
    lengths = designs["sequence"].str.len()
    assert lengths.tolist() == designs["length"].tolist()
    assert set(lengths[designs["row"] == 0]) == {33}
    assert set(lengths[designs["row"] == 1]) == {10, 12}


def test_the_seed_decides_everything(load: Callable[..., Any]) -> None:
    model, wanted = load(), table("length", None, None, None)
    first, again, other = (
        model.predict(None, wanted, {"task": "generate", "steps": 2, "seed": seed})
        for seed in (1, 1, 2)
    )
    assert first.equals(again)
    assert first["sequence"].tolist() != other["sequence"].tolist()


def test_the_model_is_prepared_once_for_all_requests(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load()
    monkeypatch.setattr(ExportedModel, "denoiser", lambda *_: pytest.fail("prepared again"))
    model.predict(None, table("sequence", *PROTEINS), {"masks_per_sequence": 1})
    model.predict(None, table("length", 3), {"task": "generate", "steps": 1})


@pytest.mark.parametrize(
    "rows, settings, reason",
    [
        (table("sequence"), {}, "no rows with the column 'sequence'"),
        (table("protein", "MKT"), {}, "no rows with the column 'sequence', which task='score'"),
        (table("sequence", "MKT"), {"task": "generate"}, "reads the column 'length', not 'seq"),
        (table("length", 5), {"task": "infill"}, "reads the column 'sequence', not 'length'"),
        (table("sequence", "MKT", "MJT"), {}, "row 1: the sequence holds 'J'"),
        (table("sequence", "MKT", ""), {}, "row 1: the sequence is empty"),
        (table("sequence", "MKT", None), {}, "row 1: null is not a string"),
        (
            table("sequence", "M" * 127),
            {},
            "row 0: the sequence has 127 residues, but the model supports",
        ),
        (table("sequence", "MKT"), {"masks_per_sequence": 0}, "masks_per_sequence=0: must be an"),
        (table("sequence", "MKT"), {"masks_per_sequence": 9999}, "must be an integer ≥ 1 and ≤"),
        (table("sequence", "MKT"), {"seed": -1}, "seed=-1: must be an integer ≥ 0"),
        (table("sequence", "MKT"), {"task": "fold"}, "must be one of score, generate, infill"),
        (table("sequence", "MKT"), {"temprature": 1.0}, r"no such setting \(did you mean 'temp"),
        (table("sequence", "MKT"), {"temperature": 0.5}, "temperature=0.5: must be omitted with"),
        (table("sequence", "MKT"), {"task": "infill"}, "row 0: nothing to fill in"),
        (table("sequence", "M?_"), {"task": "infill"}, "illegal letter '?' at position 2"),
        (table("sequence", "_" * 127), {"task": "infill"}, "row 0: the sequence has 127 residues"),
        (table("length", 5, 127), {"task": "generate"}, "row 1: length=127: must be an integer"),
        (table("length", 1.5), {"task": "generate"}, "row 0: length=1.5: must be an integer"),
        (
            table("length", 5),
            {"task": "generate", "min_length": 4},
            "min_length=4: must be omitted",
        ),
        (table("length", None), {"task": "generate", "min_length": 99}, "min_length=99: must be a"),
        (table("length", 5), {"task": "generate", "number": 0}, "number=0: must be an integer"),
        (table("length", 5), {"task": "generate", "steps": 0}, "steps=0: must be an integer"),
        (table("length", 5), {"task": "generate", "sampler": "guess"}, "sampler='guess': must be"),
        (table("length", 5), {"task": "generate", "sampler": "euler"}, "velocity of a flow"),
        (table("length", 5), {"task": "generate", "temperature": float("nan")}, "must be a number"),
    ],
)
def test_bad_input_is_a_bad_request_of_one_line(
    load: Callable[..., Any], rows: pandas.DataFrame, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(MlflowException, match=reason.replace("'?'", r"'\?'")) as caught:
        load().predict(None, rows, settings)
    assert caught.value.get_http_status_code() == 400
    # What the server sends, after it has put the table before the message.
    caught.value.message = f"Failed to predict data '{rows}'. \nError: {caught.value.message}"
    message = json.loads(caught.value.serialize_as_json())["message"]
    assert "\n" not in message
    assert "Failed" not in message
    assert "generation." not in message


@pytest.mark.parametrize(
    "rows, settings",
    [
        (table("sequence", "M" * 60, "M" * 41), {}),
        (table("sequence", "M_" * 17), {"task": "infill", "number": 3}),
        (table("length", 60, 41), {"task": "generate"}),
        (table("length", None), {"task": "generate", "number": 101}),
        (table("length", None), {"task": "generate", "number": 10**30}),
    ],
)
def test_a_request_for_too_much_is_rejected_before_the_work(
    export: Path, rows: pandas.DataFrame, settings: dict[str, Any], monkeypatch: Any
) -> None:
    service = Service(load_export(export), max_residues=100)
    monkeypatch.setattr(service, "denoiser", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(DataError, match=r"this server accepts 100 per request"):
        service.answer(rows, settings)


def test_the_limit_is_set_by_the_environment(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("D2PLM_SERVING_MAX_RESIDUES", "9")
    with pytest.raises(MlflowException, match="this server accepts 9 per request"):
        load().predict(None, table("sequence", "M" * 10))
    for wrong in ("0", "many"):
        monkeypatch.setenv("D2PLM_SERVING_MAX_RESIDUES", wrong)
        with pytest.raises(ConfigError, match="must be an integer ≥ 1"):
            load()


def status_and_text(model: Any, **request: Any) -> tuple[int, str]:
    rows = request.pop("rows", table("sequence", "MKT"))
    with pytest.raises(MlflowException) as caught:
        model.predict(None, rows, request)
    return caught.value.get_http_status_code(), caught.value.serialize_as_json()


def test_a_defect_is_the_server_s_and_shows_nothing_of_it(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load()

    def fail(*_: Any) -> None:
        raise RuntimeError(f"in {__file__}")

    monkeypatch.setattr(model.service, "answer", fail)
    status, text = status_and_text(model)
    assert status == 500
    assert "the server's log" in text
    assert "/" not in text
    assert __file__ in caplog.text


def test_a_damaged_model_is_no_fault_of_the_request(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load()
    damaged = ModelError("the model's bound is not finite: it has diverged")
    monkeypatch.setattr(model.service, "answer", lambda *_: (_ for _ in ()).throw(damaged))
    status, text = status_and_text(model)
    assert status == 500
    assert "diverged" in text


@pytest.mark.parametrize("task", ["score", "generate"])
def test_what_takes_longer_than_the_server_waits_is_given_up(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    model = load()
    monkeypatch.setenv("MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT", "0.001")
    column = "length" if task == "generate" else "sequence"
    rows = table(column, 5 if task == "generate" else "MKT")
    status, text = status_and_text(model, rows=rows, task=task)
    assert status == 504
    assert "fewer residues" in text


def test_requests_take_turns_and_give_up_waiting_in_time(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, entered, go_on = load(), threading.Event(), threading.Event()
    answer = model.service.answer

    def slowly(*arguments: Any) -> pandas.DataFrame:
        entered.set()
        assert go_on.wait(30)
        return answer(*arguments)

    monkeypatch.setattr(model.service, "answer", slowly)
    first = threading.Thread(target=model.predict, args=(None, table("sequence", "MKT")))
    first.start()
    assert entered.wait(30)
    monkeypatch.setenv("MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT", "0.05")
    assert status_and_text(model)[0] == 504
    go_on.set()
    first.join(30)
    monkeypatch.delenv("MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT")
    assert len(model.predict(None, table("sequence", "MKT"))) == 1


# Through MLflow's server: bodies and content types in, status and document out.

JSON = "application/json"
Ask = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def logged(exports: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as it is registered."""
    folder = tmp_path_factory.mktemp("logged") / "model"
    mlflow.pyfunc.save_model(
        folder,
        python_model=str(MODEL_CODE),
        artifacts={"export": str(exports / "diffusion")},
        signature=_signature(),
        pip_requirements=["d2plm"],
    )
    return folder


@pytest.fixture(scope="module")
def loaded(logged: Path) -> Any:
    """The model, loaded by a process that has the server's module."""
    return mlflow.pyfunc.load_model(str(logged))


@pytest.fixture(scope="module")
def ask(loaded: Any) -> Ask:
    """(body, content type) → (status, document), as the server's handler gets them."""

    def of(body: Any, content_type: str | None = JSON) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        schema = loaded.metadata.get_input_schema()
        answer = scoring_server.invocations(data, content_type, loaded, schema)
        assert answer.mimetype == JSON
        return answer.status, json.loads(answer.response)

    return of


def in_form(form: str, columns: dict[str, list[Any]]) -> dict[str, Any]:
    """A table in one of MLflow's forms."""
    names, rows = [*columns], [*zip(*columns.values(), strict=True)]
    if form.endswith("columns"):
        return {form.split()[0]: columns}
    if form == "dataframe_split":
        return {form: {"columns": names, "data": rows}}
    return {form.split()[0]: [dict(zip(names, row, strict=True)) for row in rows]}


FORMS = [
    *("inputs columns", "inputs rows", "instances columns", "instances rows"),
    *("dataframe_records", "dataframe_split"),
]
PROTEIN = st.text(RESIDUES + RESIDUES.lower(), min_size=1, max_size=5)
# Texts that hold something else than residues, also where a conversion would drop or replace it.
NO_PROTEIN = st.sampled_from(
    ["", " ", "MK1", "MKT\0", "\0", "МКТ", "MK\u200b", "Ｍ", "MK?", "M\xa0"]
)
NO_TEXT = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    *(st.lists(PROTEIN, max_size=2), st.dictionaries(PROTEIN, PROTEIN, max_size=2)),
)


@pytest.mark.parametrize("form", FORMS)
@given(cells=st.lists(PROTEIN | NO_PROTEIN | NO_TEXT, min_size=1, max_size=3))
def test_only_texts_of_residues_are_scored_whatever_the_form(
    ask: Ask, form: str, cells: list[Any]
) -> None:
    body = in_form(form, {"sequence": cells}) | {"params": {"masks_per_sequence": 1}}
    status, document = ask(body)
    good = [
        isinstance(cell, str) and cell != "" and {*cell.upper()} <= {*RESIDUES} for cell in cells
    ]
    assert status == (200 if all(good) else 400), document
    if status == 200:
        residues = [row["residues"] for row in document["predictions"]]
        assert residues == [sum(letter in CANONICAL for letter in cell.upper()) for cell in cells]
    else:
        rows = [f"row {row}: " for row, fits in enumerate(good) if not fits]
        assert any(row in document["message"] for row in rows)


@given(
    cells=st.lists(PROTEIN | NO_PROTEIN | st.sampled_from(["NA", "nan", "None", "null", "True"]))
)
def test_the_texts_of_a_csv_are_what_is_scored(ask: Ask, cells: list[str]) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([["sequence"], *([cell] for cell in cells)])
    status, document = ask(text.getvalue().encode(), "text/csv; charset=UTF-8")
    good = [cell != "" and {*cell.upper()} <= {*RESIDUES} for cell in cells]
    assert status == (200 if cells and all(good) else 400), document
    if status == 200:
        for cell, row in zip(cells, document["predictions"], strict=True):
            assert row["residues"] == sum(letter in CANONICAL for letter in cell.upper())


LENGTH = st.none() | st.integers(1, 9) | st.integers(1, 9).map(float)
NO_LENGTH = st.booleans() | st.text(max_size=2) | st.lists(st.integers(1, 9), max_size=2)


@pytest.mark.parametrize("form", FORMS)
@given(cells=st.lists(LENGTH | NO_LENGTH, min_size=1, max_size=3))
def test_only_numbers_are_lengths_whatever_the_form(ask: Ask, form: str, cells: list[Any]) -> None:
    nothing = [None] * len(cells)
    columns = {"length": cells, "sequence": nothing}
    status, document = ask(in_form(form, columns) | {"params": {"task": "generate", "steps": 1}})
    good = [cell is None or type(cell) in (int, float) for cell in cells]
    assert status == (200 if all(good) else 400), document
    if status == 400:
        assert f"row {good.index(False)}: length=" in document["message"]


@given(name=st.sampled_from([*SETTINGS]), value=NO_TEXT | st.text(max_size=3))
def test_a_setting_of_a_wrong_type_is_rejected(ask: Ask, name: str, value: Any) -> None:
    kind, default, tasks = SETTINGS[name]
    task, columns = tasks[-1], {"sequence": ["M_"]}
    if task == "generate":
        columns = {"length": [3]}
    status, document = ask(
        in_form("inputs columns", columns) | {"params": {"task": task, name: value}}
    )
    right = type(value) is kind or (kind is float and type(value) is int)
    assert status in (200, 400)
    if not right and (value is not None or default is not None):
        assert status == 400
        assert document["message"].startswith(f"{name}=")


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (
            {"temprature": 1.0},
            "'temprature': no such setting (did you mean 'temperature'?)",
        ),
        ({"seed": True}, "seed=True: must be an integer"),
        ({"seed": 2**63}, "seed=9223372036854775808: must be an integer"),
        ({"seed": None}, "seed=None: must be an integer"),
        ({"task": "s" * 10_000}, "task='sss"),
        ([], "params: must be an object of settings"),
        (0, "params: must be an object of settings"),
    ],
)
def test_settings_are_rejected_as_they_were_sent(ask: Ask, params: Any, reason: str) -> None:
    status, document = ask({"inputs": {"sequence": ["MKT"]}, "params": params})
    assert status == 400
    assert document["message"].startswith(reason)
    assert len(document["message"]) < 600


SCORE = b'{"inputs": {"sequence": ["MKT"]}}'
JUNK = "junk " * 100_000


HOSTILE: list[tuple[bytes, str | None, int, str]] = [
    (SCORE, None, 415, "Content-Type: must be application/json or text/csv, in UTF-8"),
    (SCORE, "", 415, "Content-Type"),
    (SCORE, "text/plain", 415, "Content-Type"),
    (SCORE, "application/json; charset=utf-16", 415, "Content-Type"),
    (SCORE, "application/json; version=2", 415, "Content-Type"),
    (b"PAR1", "application/vnd.apache.parquet", 415, "Content-Type"),
    (SCORE + b" " * 2**20, JSON, 413, "longer than 1,048,576 bytes; send fewer rows"),
    (b"[" * 100_000, JSON, 400, "nested too deeply"),
    (b'{"inputs":' * 100_000, JSON, 400, "nested too deeply"),
    (JUNK.encode(), JSON, 400, "cannot be read: Expecting value: line 1 column 1"),
    (json.dumps(JUNK).encode(), JSON, 400, "a JSON object with one of inputs"),
    (b'{"inputs": {"sequence": ["MKT", NaN]}}', JSON, 400, "NaN is not JSON; send null"),
    (b'{"inputs": {"length": [-Infinity]}}', JSON, 400, "-Infinity is not JSON"),
    (b'{"inputs": {"length": [1e999]}}', JSON, 400, "row 0: length=inf: must be a number"),
    (b'{"inputs": {"length": [' + b"9" * 5000 + b"]}}", JSON, 400, "cannot be read"),
    (b'{"inputs": {"length": [' + b"9" * 4000 + b"]}}", JSON, 400, "row 0: length=999"),
    (b'{"inputs": {"sequence": ["\xff"]}}', JSON, 400, "can't decode byte 0xff"),
    (SCORE.decode().encode("utf-16"), JSON, 400, "can't decode byte"),
    (b'{"inputs": {"sequence": ["MK\\ud800"]}}', JSON, 400, r"holds '\ud800'"),
    (b'{"inputs": {"sequence": ["MK\\u0000"]}}', JSON, 400, r"holds '\x00', which is not a resid"),
    ('{"inputs": {"sequence": ["MКT"]}}'.encode(), JSON, 400, "holds 'К', which is not a residue"),
    (b'{"inputs": [], "instances": []}', JSON, 400, "a JSON object with one of inputs"),
    (b'{"inputs": [], "parms": {}}', JSON, 400, "a JSON object with one of inputs"),
    (b'{"inputs": "MKT"}', JSON, 400, "inputs: must be columns, or a list of rows"),
    (b'{"instances": ["MKT"]}', JSON, 400, "instances: must be columns, or a list of rows"),
    (b'{"dataframe_records": {"sequence": "MKT"}}', JSON, 400, "must be a list of rows"),
    (b'{"dataframe_split": {"data": [["MKT"]]}}', JSON, 400, "an object of columns and data"),
    (
        b'{"dataframe_split": {"columns": ["sequence", "sequence"], "data": [["M", "K"]]}}',
        *(JSON, 400, "columns: must have different names"),
    ),
    (
        b'{"dataframe_split": {"columns": ["sequence"], "data": [["M"], ["K", "V"]]}}',
        *(JSON, 400, "row 1: must have 1 values, one per column"),
    ),
    (b'{"inputs": {"sequence": ["M"], "length": [1, 2]}}', JSON, 400, "same number of rows"),
    (b'{"inputs": {"sequence": {"0": "MKT"}}}', JSON, 400, "row 0: {'0': 'MKT'} is not a string"),
    (b'{"inputs": {"length": [1, 1]}}', JSON, 400, "task='score'"),
    (b'{"inputs": {"length": [1%s]}}' % (b",1" * 65536), JSON, 400, "65,537 rows; this server"),
    (b"sequence\nMKT,GG\n", "text/csv", 400, "row 0: must have 1 values"),
    (b'sequence\n"MKT\n', "text/csv", 400, "cannot be read: unexpected end of data"),
    (b"sequence,length\nMKT,3\n", "text/csv", 400, "row 0: length='3': must be a number"),
    (b"sequence,length\nMK\0T,\n", "text/csv", 400, r"holds '\x00'"),
    (b"sequence\nNA\n\nMK\n", "text/csv", 400, "row 1: must have 1 values"),
    (b"", "text/csv", 400, "no rows with the column 'sequence'"),
    (b"", JSON, 400, "cannot be read"),
]


@pytest.mark.parametrize(
    ("body", "content_type", "status", "reason"),
    HOSTILE,
    ids=[f"{status}: {reason}" for _, _, status, reason in HOSTILE],  # bodies are long
)
def test_a_hostile_request_is_rejected_in_a_short_answer(
    ask: Ask, body: bytes, content_type: str | None, status: int, reason: str
) -> None:
    found, document = ask(body, content_type)
    assert (found, set(document)) == (status, {"error_code", "message"})
    assert reason in document["message"]
    assert len(document["message"]) < 600
    assert "junk junk" not in document["message"]


def test_a_row_may_be_one_object_or_have_columns_of_its_own(ask: Ask) -> None:
    for body in (
        {"inputs": {"sequence": "MKT"}},
        {"inputs": [{"sequence": "MKT", "name": "a", "other": [1]}], "params": None},
        {"dataframe_split": {"index": [7], "columns": ["name", "sequence"], "data": [[1, "MKT"]]}},
        {"dataframe_records": [{"sequence": "MKT", "length": None}]},
    ):
        status, document = ask(body)
        assert status == 200, document
        assert [row["residues"] for row in document["predictions"]] == [3]


def test_what_is_no_fault_of_the_request_is_a_500_without_details(
    ask: Ask, loaded: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"in {__file__}")

    monkeypatch.setattr(loaded, "predict", fail)
    status, document = ask({"inputs": {"sequence": ["MKT"]}})
    assert status == 500
    assert "/" not in document["message"]
    assert __file__ in caplog.text


def test_of_a_long_body_only_its_beginning_is_kept(loaded: Any) -> None:
    from fastapi.testclient import TestClient

    limit, kept = 2**20, []
    invocations = scoring_server.invocations
    scoring_server.invocations = lambda data, *rest: (
        kept.append(len(data)) or invocations(data, *rest)
    )
    try:
        with TestClient(scoring_server.init(loaded)) as client:
            chunks = (b" " * 2**16 for _ in range(100))
            response = client.post("/invocations", content=chunks, headers={"Content-Type": JSON})
            assert response.status_code == 413
            assert client.post(
                "/invocations", content=SCORE, headers={"Content-Type": JSON}
            ).is_success
            assert client.post("/invocations", content=SCORE).status_code == 415
            assert client.get("/ping").status_code == 200
    finally:
        scoring_server.invocations = invocations
    assert kept == [limit + 1, len(SCORE), len(SCORE)]


@pytest.mark.parametrize("name", request_guard.HOOKS)
def test_a_server_of_another_version_is_rejected_and_left_alone(name: str) -> None:
    def invocations(data: Any, content_type: Any, model: Any, input_schema: Any) -> None: ...

    def _async_catch_mlflow_exception(func: Any) -> None: ...

    server = ModuleType("server")
    hooks = {f.__name__: f for f in (invocations, _async_catch_mlflow_exception)}
    for replacement in ({}, {name: lambda request: None}):
        vars(server).update({other: hooks[other] for other in hooks if other != name})
        vars(server).update(replacement)
        with pytest.raises(ConfigError, match=rf"server has no {name}\("):
            request_guard.guard(server, 100)
        assert all(getattr(server, other) is hooks[other] for other in hooks if other != name)


@pytest.mark.parametrize(
    "rows",
    [
        pandas.DataFrame({"sequence": ["MKT", None]}),
        pandas.DataFrame({"sequence": ["MKT", float("nan")]}, dtype=object),
        pandas.DataFrame({"sequence": ["MKT", True]}),
        pandas.DataFrame({"sequence": [True, False]}),
        pandas.DataFrame({"sequence": [float("nan")]}),
        pandas.DataFrame({"sequence": pandas.array(["MKT", None], dtype="string")}),
        pandas.DataFrame({"sequence": ["MKT", ["MKT"]]}),
        pandas.DataFrame({"sequence": ["MKT", np.array(["MKT", "K"])]}),
        {"sequence": ["MKT", True]},
        [{"sequence": None}],
    ],
)
def test_the_model_in_python_takes_no_other_value_for_a_text_either(loaded: Any, rows: Any) -> None:
    with pytest.raises(MlflowException, match=r"is not a string|Incompatible input") as caught:
        loaded.predict(rows)
    assert caught.value.get_http_status_code() == 400
