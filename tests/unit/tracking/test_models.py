"""Locations of models, adapters with their bases, and the registered model of MLflow's own API."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from transformers import EsmForMaskedLM

from d2plm import load_model
from d2plm.assembly.training_run import refuse_adapter
from d2plm.core.errors import ConfigError, DataError, ModelError, TrackingError
from d2plm.export.exported_model import save_export, weights_digest
from d2plm.generation.lengths import LengthHistogram
from d2plm.model.lora import add_lora
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.tracking.locations import model_folder, open_model, pinned
from d2plm.tracking.mlflow_run import open_client
from d2plm.tracking.pyfunc_model import SERVER_TIMEOUT, PyfuncModel
from d2plm.tracking.registry import MODEL_CODE, _signature
from tests.conftest import Exports, MonkeyPatch
from tests.unit.model.test_esm import esm_like
from tests.unit.tracking.test_registry import registered, whole

CONTENT = AbsorbingDiffusion(), LengthHistogram.of(np.array([5, 9]), 126)


def add_evaluation(export: Path) -> None:
    """Put an evaluation's files into a real export."""
    made = whole(export.with_name(f"of_{export.name}"), 2.0, 1)
    for file in ("evaluation.json", "sequence_scores.npz"):
        shutil.copy(made / file, export)


def test_an_adapter_in_the_registry_finds_its_base_there(
    client: MlflowClient, tmp_path: Path, tiny_dit: Callable[..., Any]
) -> None:
    base = tiny_dit()
    save_export(tmp_path / "base", base, *CONTENT, {})
    digest = weights_digest(tmp_path / "base")
    add_evaluation(tmp_path / "base")
    version = registered(client, tmp_path / "base", "base").version
    location = pinned("models:/base@champion", key="init_from")
    assert location == f"models:/base/{version}"

    changed = tiny_dit()
    add_lora(changed, 2)
    with torch.no_grad():
        for name, weight in changed.named_parameters():
            weight += 0.01 * ("lora_" in name)
    weights = {name: weight.detach() for name, weight in changed.named_parameters()}
    provenance = {"init_from": location, "init_from_digest": digest}
    save_export(tmp_path / "adapter", base, *CONTENT, provenance, weights)
    here = open_model(tmp_path / "adapter", key="model_dir")
    add_evaluation(tmp_path / "adapter")
    registered(client, tmp_path / "adapter", "adapter")
    provenance["init_from"] = str(tmp_path / "base")  # which other machines do not have
    save_export(tmp_path / "alone", base, *CONTENT, provenance, weights)
    add_evaluation(tmp_path / "alone")
    with pytest.raises(ModelError, match="a local folder"):
        registered(client, tmp_path / "alone", "alone")
    with pytest.raises(ModelError, match="is an adapter"):
        refuse_adapter(tmp_path / "alone", "alone")
    shutil.rmtree(tmp_path / "base")
    shutil.rmtree(tmp_path / "adapter")

    found = open_model("models:/adapter@champion", key="model_dir")
    served = PyfuncModel()
    served.load_context(SimpleNamespace(artifacts={"export": str(found.folder)}))
    expected, before = here.model.state_dict(), base.state_dict()
    for model in (found.model, served.service.exported.model):
        torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    assert any(not torch.equal(weight, before[name]) for name, weight in expected.items())
    assert not list(found.folder.glob("model*.safetensors"))  # the changes alone are registered


@pytest.fixture
def esm(tmp_path: Path) -> Path:
    """A small ESM-2 checkpoint with weights as transformers draws them."""
    config = esm_like(2, 16, 2, 32, max_position_embeddings=130)
    EsmForMaskedLM(config).eval().save_pretrained(tmp_path / "esm")
    return tmp_path / "esm"


def test_esm_2_is_a_model_as_any(esm: Path) -> None:
    model = load_model(esm)
    assert model.exported.max_residues == 126
    assert all(np.isfinite(score.perplexity) for score in model.score(["MKTAYIAK", "GSHM"]))
    assert model.embed(["MKT"])[0].shape == (3, 16)
    assert 50 <= len(model.generate(1, steps=2, seed=1)[0]) <= 126


def test_the_hub_gives_no_code(esm: Path, monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    fetch = Mock(return_value=str(esm))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    assert open_model("facebook/esm2", key="model_dir").folder == esm
    assert fetch.call_args.args == ("facebook/esm2",)
    assert not {"*.py", "*.bin", "*"} & {*fetch.call_args.kwargs["allow_patterns"]}
    fetch.side_effect = huggingface_hub.errors.LocalEntryNotFoundError("no connection\nlong story")
    with pytest.raises(ModelError, match=r"on the Hugging Face Hub: no connection$"):
        open_model("facebook/esm2", key="model_dir")
    (tmp_path / "facebook").mkdir()  # a folder of this name: what is not in it is a mistake
    with pytest.raises(ModelError, match="facebook/esm2: no such model folder"):
        open_model("facebook/esm2", key="model_dir")


@pytest.mark.parametrize(
    ("uri", "location"), [(None, "models:/a@champion"), ("sqlite:///none/other.db", "models:/a/3")]
)
def test_reading_a_registry_creates_none(
    uri: str | None, location: str, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrackingError, match=r"there is no file .*\.db"):
        model_folder(location, uri, key="model_dir")
    assert not [*tmp_path.iterdir()]


def test_each_call_opens_the_store_that_it_names(store: str, tmp_path: Path) -> None:
    open_client(store, create=True)
    other = tmp_path / "other.db"
    shutil.copy(store.removeprefix("sqlite:///"), other)
    for address in (f"sqlite:///{other}", store):
        assert open_client(address).tracking_uri == address
    with pytest.raises(ConfigError, match=r"^tracking_uri="):
        open_client({"uri": store})  # type: ignore[arg-type]  # no address


def test_another_kind_of_model_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ModelError, match="model_type is 'bert'"):
        open_model(tmp_path, key="model_dir")
    for location in ("models:/proteins", "models:/a/b/3", "models:/@x", 3):
        with pytest.raises(ConfigError, match="model_dir="):
            model_folder(location, key="model_dir")


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
