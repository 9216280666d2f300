"""The served model: scores as the library does, prepares once, and tells bad input in one line."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
from mlflow.exceptions import MlflowException

from d2plm.alphabet import encode
from d2plm.evaluation.likelihood import score_sequences
from d2plm.export import ExportedModel, load_export, save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.diffusion import AbsorbingDiffusion

PROTEINS = ["MKTAYIAKQR", "GSHMLVAGG"]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, tiny_dit: Callable[..., Any]) -> Path:
    lengths = LengthHistogram.of(np.array([10, 9]), 126)
    folder = tmp_path_factory.mktemp("export") / "model"
    return save_export(folder, tiny_dit(), AbsorbingDiffusion(), lengths, {})


@pytest.fixture
def served(export: Path) -> Any:
    from d2plm.tracking.served_model import ScoringModel

    model = ScoringModel()
    model.load_context(SimpleNamespace(artifacts={"export": str(export)}))
    return model


def test_it_gives_what_the_library_gives(served: Any, export: Path) -> None:
    table = served.predict(None, pandas.DataFrame({"sequence": PROTEINS}))
    exported = load_export(export)
    scores = score_sequences(
        exported.denoiser(),
        exported.paradigm,
        [encode(protein) for protein in PROTEINS],
        max_length=exported.max_length,
    )
    np.testing.assert_array_equal(table["nats"], scores.nats)
    np.testing.assert_array_equal(table["residues"], [10, 9])
    np.testing.assert_allclose(np.log(table["perplexity"]) * table["residues"], table["nats"])


def test_the_model_is_prepared_once_for_all_requests(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExportedModel, "denoiser", lambda *_: pytest.fail("prepared again"))
    served.predict(None, pandas.DataFrame({"sequence": PROTEINS}), {"masks_per_sequence": 1})


@pytest.mark.parametrize(
    "rows, parameters, reason",
    [
        ([], {}, "no rows"),
        (["MKT", "MJT"], {}, "row 1: the sequence holds 'J'"),
        (["MKT", ""], {}, "row 1: the sequence is empty"),
        (["MKT", None], {}, "row 1: None is no text"),
        (["MKT"], {"masks_per_sequence": 0}, "masks_per_sequence"),
    ],
)
def test_bad_input_is_a_bad_request_of_one_line(
    served: Any, rows: list[str | None], parameters: dict[str, int], reason: str
) -> None:
    table = pandas.DataFrame({"sequence": pandas.Series(rows, dtype=object)})
    with pytest.raises(MlflowException, match=reason) as caught:
        served.predict(None, table, parameters)
    assert caught.value.get_http_status_code() == 400
    assert "\n" not in str(caught.value)
