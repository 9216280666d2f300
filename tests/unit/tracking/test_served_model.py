"""The served model: gives what the library gives, and tells in one line why it will not."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
from mlflow.exceptions import MlflowException

from d2plm.core.alphabet import decode, encode
from d2plm.core.errors import ConfigError, DataError, ModelError
from d2plm.evaluation.likelihood import score_sequences
from d2plm.export.exported_model import ExportedModel, load_export, save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from d2plm.tracking.serving import Service

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
        (table("sequence", "MKT", None), {}, "row 1: null is not a text"),
        (table("sequence", "M" * 127), {}, "row 0: the sequence has 127 residues; the model takes"),
        (table("sequence", "MKT"), {"masks_per_sequence": 0}, "masks_per_sequence=0: must be an"),
        (table("sequence", "MKT"), {"masks_per_sequence": 9999}, "must be an integer ≥ 1 and ≤"),
        (table("sequence", "MKT"), {"seed": -1}, "seed=-1: must be an integer ≥ 0"),
        (table("sequence", "MKT"), {"task": "fold"}, "must be one of score, generate, infill"),
        (table("sequence", "MKT"), {"temprature": 1.0}, r"no such setting \(did you mean 'temp"),
        (table("sequence", "MKT"), {"temperature": 0.5}, "temperature=0.5: must be left out with"),
        (table("sequence", "MKT"), {"task": "infill"}, "row 0: nothing to fill in"),
        (table("sequence", "M?_"), {"task": "infill"}, "illegal letter '?' at position 2"),
        (table("sequence", "_" * 127), {"task": "infill"}, "row 0: the sequence has 127 residues"),
        (table("length", 5, 127), {"task": "generate"}, "row 1: length=127: must be an integer"),
        (table("length", 1.5), {"task": "generate"}, "row 0: length=1.5: must be an integer"),
        (
            table("length", 5),
            {"task": "generate", "min_length": 4},
            "min_length=4: must be left out",
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
def test_a_request_for_too_much_is_refused_before_the_work(
    export: Path, rows: pandas.DataFrame, settings: dict[str, Any], monkeypatch: Any
) -> None:
    service = Service(load_export(export), max_residues=100)
    monkeypatch.setattr(service, "denoiser", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(DataError, match=r"this server takes 100 at a time"):
        service.answer(rows, settings)


def test_the_limit_is_set_by_the_environment(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("D2PLM_SERVING_MAX_RESIDUES", "9")
    with pytest.raises(MlflowException, match="this server takes 9 at a time"):
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
