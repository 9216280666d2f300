"""The registered model in Python: `mlflow.pyfunc.load_model(...).predict(...)`."""

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException

from d2plm import load_model
from d2plm.core.errors import ConfigError, DataError
from d2plm.tracking.pyfunc_model import SERVER_TIMEOUT
from d2plm.tracking.registry import MODEL_CODE, _signature
from tests.conftest import Exports, MonkeyPatch

PROTEINS = ["MKTAYIAKQR", "GSHMLVAGG"]


@pytest.fixture(scope="module")
def folder(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logged") / "model"
    mlflow.pyfunc.save_model(
        folder,
        python_model=str(MODEL_CODE),
        artifacts={"export": str(exports.masked)},
        signature=_signature(),
        pip_requirements=["d2plm"],
    )
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return mlflow.pyfunc.load_model(str(folder))


def test_it_designs_as_the_library_does(loaded: Any, exports: Exports) -> None:
    library, settings = load_model(exports.masked), {"number": 2, "steps": 2, "temperature": 0.7}
    lengths = pd.DataFrame({"length": [np.nan, np.nan]})
    new = loaded.predict(lengths, params={"task": "generate", **settings})
    assert new["sequence"].tolist() == library.generate(**settings | {"number": 4})
    lengths = pd.DataFrame({"length": [5.0, np.nan]})
    assert loaded.predict(lengths, params={"task": "generate"})["length"][0] == 5
    templates = pd.DataFrame({"sequence": ["MK__GG"]})
    filled = loaded.predict(templates, params={"task": "infill", **settings})
    assert filled["sequence"].tolist() == library.infill("MK__GG", **settings)


@pytest.mark.parametrize("rows", [pd.DataFrame({"sequence": ["MKT", None]}), [{"sequence": None}]])
def test_it_takes_no_other_value_for_a_text(loaded: Any, rows: Any) -> None:
    with pytest.raises((MlflowException, DataError), match=r"valid string|Incompatible input"):
        loaded.predict(rows)


def test_mlflow_s_server_is_refused(folder: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_TIMEOUT, "60")
    with pytest.raises(ConfigError, match="run d2plm serve model_dir="):
        mlflow.pyfunc.load_model(str(folder))
