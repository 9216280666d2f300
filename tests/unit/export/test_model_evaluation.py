"""The evaluation inside an export: when it is reused, and what generated proteins stand beside."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.core.errors import ModelError
from d2plm.evaluation.findings import judge, read_evaluation
from d2plm.export import model_evaluation
from d2plm.export.exported_model import ExportedModel, load_export, save_export
from d2plm.export.model_evaluation import (
    evaluate,
    generated_quality,
    load_scores,
    reusable_evaluation,
)
from d2plm.generation.lengths import LengthHistogram
from d2plm.generation.sampler_settings import Sampling
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from tests.conftest import DiTFactory, Tokens, write_store

Stores = dict[str, Any]


@pytest.fixture
def stores(tmp_path: Path, proteins: list[Tokens]) -> Stores:
    whole = [tokens[:60] for tokens in proteins if len(tokens) > 60]
    return {
        "train": write_store(tmp_path / "train_lmdb", whole[:40], [*range(40)]),
        "validation": write_store(tmp_path / "validation_lmdb", whole[40:46], [0, 0, 1, 2, 3, 4]),
    }


@pytest.fixture
def exported(tmp_path: Path, tiny_dit: DiTFactory) -> ExportedModel:
    lengths = LengthHistogram.of(np.array([20, 30]), 128)
    model: Any = tiny_dit(0)
    return load_export(save_export(tmp_path / "model", model, AbsorbingDiffusion(), lengths, {}))


def test_an_evaluation_is_kept_in_the_export_and_reused_for_the_same_settings_and_data(
    exported: ExportedModel, stores: Stores
) -> None:
    found = evaluate(exported, stores["train"], stores["validation"], masks_per_sequence=2)
    folder = exported.folder
    assert read_evaluation(folder) == found == load_scores(folder)[0]
    assert judge(found).headline in (folder / "README.md").read_text()
    settings, digests = found["settings"], {"train": stores["train"].digest}
    assert reusable_evaluation(folder, settings, digests) == found
    assert reusable_evaluation(folder, {**settings, "seed": 1}, digests) is None
    assert reusable_evaluation(folder, settings, {"train": "other"}) is None
    (folder / "evaluation.json").write_text(json.dumps({**found, "format_version": 0}))
    assert reusable_evaluation(folder, settings, digests) is None
    with pytest.raises(ModelError, match="another version"):
        load_scores(folder)


def test_no_more_proteins_are_generated_than_are_held_out(
    exported: ExportedModel, stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_evaluation, "find_novelty", lambda sets, *_, **__: sets)
    monkeypatch.setattr(model_evaluation, "compare_quality", lambda sets, *_: sets)
    said: list[str] = []
    sets = generated_quality(
        exported,
        stores["train"],
        stores["validation"],
        50,
        tmp_path,
        Sampling(steps=2),
        concentration=np.ones(20),
        report=said.append,
    )
    assert [len(one) for one in sets.values()] == [6, 6, 6]
    assert "generating 6 proteins" in said[0]
