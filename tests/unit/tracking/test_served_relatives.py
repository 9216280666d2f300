"""The served model with relatives: same results as in Python, within the server's limits."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow.pyfunc import scoring_server
from mlflow.types import ParamSchema

from d2plm import load_model
from d2plm.api import SequenceModel
from d2plm.export.exported_model import save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching
from d2plm.tracking.registry import MODEL_CODE, _signature
from d2plm.tracking.served_model import ServedModel

pytestmark = pytest.mark.usefixtures("mlflow_s_own_server_afterwards")

FAMILY = ["MKTAYIAKQRLL", "MKSAYLAKQRL", "MRTAFIAKHRLLGG", "MKTGYIAQRL", "MHTAYIARQRLV"]
PROTEINS = ["MKTAYIAKQRLI", "GSHMLVAGG"]
JSON = "application/json"
Ask = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_dit: Callable[..., Any]) -> Path:
    """An export that takes relatives, and 126 residues; training proteins have 40 or 50."""
    path, lengths = tmp_path_factory.mktemp("served"), LengthHistogram.of(np.array([40, 50]), 126)
    return save_export(path / "model", tiny_dit(relatives_dim=8), MaskFlowMatching(), lengths, {})


@pytest.fixture(scope="module")
def library(folder: Path) -> SequenceModel:
    return load_model(folder)


def asking(registered: Path, folder: Path, signature: Any) -> Ask:
    """(columns, **params) → (status, document) of the model as it is registered and served."""
    mlflow.pyfunc.save_model(
        registered,
        python_model=str(MODEL_CODE),
        artifacts={"export": str(folder)},
        signature=signature,
        pip_requirements=["d2plm"],
    )
    loaded = mlflow.pyfunc.load_model(str(registered))

    def ask(columns: dict[str, list[Any]], **params: Any) -> tuple[int, dict[str, Any]]:
        body = json.dumps({"inputs": columns, "params": params}).encode()
        schema = loaded.metadata.get_input_schema()
        answer = scoring_server.invocations(body, JSON, loaded, schema)
        return answer.status, json.loads(answer.response)

    return ask


@pytest.fixture(scope="module")
def ask(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    return asking(tmp_path_factory.mktemp("registered") / "model", folder, _signature())


def rows_of(answer: tuple[int, dict[str, Any]], column: str) -> list[Any]:
    status, document = answer
    assert status == 200, document
    return [row[column] for row in document["predictions"]]


def test_scores_given_relatives_are_those_of_the_library(ask: Ask, library: SequenceModel) -> None:
    given = rows_of(ask({"sequence": PROTEINS}, relatives=FAMILY, max_relatives=2), "nats")
    expected = library.score(PROTEINS, relatives=FAMILY, max_relatives=2)
    assert given == pytest.approx([one.nats for one in expected], rel=1e-6)
    alone = rows_of(ask({"sequence": PROTEINS}), "nats")
    assert alone == pytest.approx([one.nats for one in library.score(PROTEINS)], rel=1e-6)
    assert all(one != pytest.approx(other) for one, other in zip(given, alone, strict=True))
    assert rows_of(ask({"sequence": PROTEINS}, relatives=[]), "nats") == alone


def test_new_members_are_those_of_the_library_and_of_the_relatives_lengths(
    ask: Ask, library: SequenceModel
) -> None:
    settings = {"steps": 4, "seed": 3, "relatives": FAMILY, "max_relatives": 3}
    answer = ask({"length": [None]}, task="generate", number=6, **settings)
    found = rows_of(answer, "sequence")
    assert found == library.generate(6, **settings)
    assert {len(text) for text in found} <= {len(text) for text in FAMILY}
    assert all(text.endswith("relatives=5 max_relatives=3") for text in rows_of(answer, "settings"))


def test_templates_are_filled_in_as_by_the_library(ask: Ask, library: SequenceModel) -> None:
    template, settings = "MKT____KQR__", {"steps": 4, "seed": 1, "relatives": FAMILY}
    answer = ask({"sequence": [template]}, task="infill", number=3, **settings)
    assert rows_of(answer, "sequence") == library.infill(template, 3, **settings)
    assert rows_of(answer, "sequence") != library.infill(template, 3, steps=4, seed=1)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"relatives": "MKT"}, "relatives='MKT': must be a list of strings"),
        ({"relatives": None}, "relatives=None: must be a list of strings"),
        ({"relatives": {"0": "MKT"}}, "relatives={'0': 'MKT'}: must be a list of strings"),
        ({"relatives": ["MKT", None]}, "relatives=['MKT', None]: must be a list of strings"),
        ({"relatives": [["MKT"]]}, "relatives=[['MKT']]: must be a list of strings"),
        ({"relatives": ["MKT", 7]}, "relatives=['MKT', 7]: must be a list of strings"),
        ({"relatives": ["MKT", "MJT"]}, "relative 1: the sequence holds 'J'"),
        ({"relatives": ["MKT", "MK\0"]}, r"relative 1: the sequence holds '\x00'"),
        ({"relatives": ["MKT", ""]}, "relative 1: the sequence is empty"),
        ({"relatives": ["XX"]}, "there are no relatives: give at least one protein"),
        ({"relatives": ["MKT"] * 257}, "relatives: 257 proteins; this server accepts 256"),
        ({"relatives": [""] * 250_000}, "relatives: 250,000 proteins"),
        ({"relatives": ["M" * 65_537]}, "relatives: 65,537 residues; this server accepts 65,536"),
        ({"relatives": ["M" * 40_000] * 2}, "relatives: 80,000 residues; this server accepts"),
        ({"relatives": FAMILY, "max_relatives": 0}, "max_relatives=0: must be an integer ≥ 1 and"),
        ({"relatives": FAMILY, "max_relatives": 17}, "max_relatives=17: must be an integer ≥ 1 a"),
        ({"relatives": FAMILY, "max_relatives": "8"}, "max_relatives='8': must be an integer"),
        ({"max_relatives": 3}, "max_relatives=3: must be omitted without relatives"),
        ({"relative": FAMILY}, "'relative': no such setting (did you mean 'relatives'?)"),
    ],
)
def test_relatives_that_cannot_be_taken_are_rejected_in_a_short_answer(
    ask: Ask, params: dict[str, Any], reason: str
) -> None:
    status, document = ask({"sequence": ["MKT"]}, **params)
    assert (status, document["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert reason in document["message"]
    assert len(document["message"]) < 600


def test_a_setting_that_the_registered_model_lacks_is_not_dropped(
    folder: Path, tmp_path: Path
) -> None:
    """MLflow would answer without the relatives."""
    older = _signature()
    older.params = ParamSchema([one for one in older.params if "relatives" not in one.name])
    ask = asking(tmp_path / "model", folder, older)
    assert ask({"sequence": ["MKT"]}, masks_per_sequence=1)[0] == 200
    status, document = ask({"sequence": ["MKT"]}, relatives=FAMILY)
    assert status == 400
    assert "relatives: the model was registered by a version without" in document["message"]


def test_long_relatives_are_cut_as_by_the_library(ask: Ask, library: SequenceModel) -> None:
    long = (FAMILY[0] * 200)[:3000]
    found = rows_of(ask({"sequence": PROTEINS}, relatives=[long]), "nats")
    expected = library.score(PROTEINS, relatives=[long[:2048]])
    assert found == pytest.approx([one.nats for one in expected], rel=1e-6)


def served(folder: Path) -> ServedModel:
    model = ServedModel()
    model.load_context(SimpleNamespace(artifacts={"export": str(folder)}))
    return model


def test_a_model_that_takes_none_rejects_them_without_a_word_of_the_server(
    tmp_path: Path, tiny_dit: Callable[..., Any]
) -> None:
    lengths = LengthHistogram.of(np.array([10]), 126)
    plain = served(save_export(tmp_path / "plain", tiny_dit(), AbsorbingDiffusion(), lengths, {}))
    rows = {"sequence": ["MKT"]}
    with pytest.raises(mlflow.MlflowException) as caught:
        plain.predict(None, mlflow_table(rows), {"relatives": FAMILY})
    assert caught.value.get_http_status_code() == 400
    text = caught.value.serialize_as_json()
    assert "relatives: not supported by this model; omit them" in text
    assert str(tmp_path) not in text


def test_the_model_in_python_checks_relatives_itself(folder: Path) -> None:
    rows = mlflow_table({"sequence": ["MKT"]})
    for relatives, reason in (
        (["MKT", None], "relative 1: null is not a string"),
        ([3], "relative 0: 3 is not a string"),
        (["M"] * 300, "300 proteins"),
    ):
        with pytest.raises(mlflow.MlflowException, match=reason) as caught:
            served(folder).predict(None, rows, {"relatives": relatives})
        assert caught.value.get_http_status_code() == 400


def test_the_limit_on_residues_is_that_of_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("D2PLM_SERVING_MAX_RESIDUES", "30")
    with pytest.raises(
        mlflow.MlflowException, match="residues; this server accepts 30 per request"
    ):
        served(folder).predict(None, mlflow_table({"sequence": ["MKT"]}), {"relatives": FAMILY})


def mlflow_table(columns: dict[str, list[Any]]) -> Any:
    import pandas

    return pandas.DataFrame({name: pandas.Series(c, dtype=object) for name, c in columns.items()})
