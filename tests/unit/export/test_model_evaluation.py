"""The evaluation inside an export: when it is reused, and the comparison of generated proteins."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from d2plm.core.errors import ModelError
from d2plm.data.relatives import RelativesIndex
from d2plm.evaluation.findings import judge
from d2plm.evaluation.result import read_evaluation
from d2plm.evaluation.tables import as_text
from d2plm.export.exported_model import ExportedModel, load_export, save_export
from d2plm.export.model_evaluation import evaluate, load_scores, reusable_evaluation
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from tests.conftest import DiTFactory

Stores = dict[str, Any]
LENGTHS = LengthHistogram.of(np.array([20, 30]), 128)


def export(folder: Path, model: Any) -> ExportedModel:
    return load_export(save_export(folder, model, AbsorbingDiffusion(), LENGTHS, {}))


def test_an_evaluation_is_kept_and_reused_for_the_same_settings_and_data(
    tmp_path: Path, tiny_dit: DiTFactory, stores_to_evaluate: Stores
) -> None:
    exported, stores = export(tmp_path / "model", tiny_dit(0)), stores_to_evaluate
    found, folder = evaluate(exported, *stores.values(), masks_per_sequence=2), exported.folder
    assert read_evaluation(folder) == found == load_scores(folder)[0]
    assert judge(found).headline in (folder / "README.md").read_text()
    settings, digests = found.settings, {"train": stores["train"].digest}
    assert reusable_evaluation(folder, settings, digests) == found
    assert reusable_evaluation(folder, {**settings, "seed": 1}, digests) is None
    assert reusable_evaluation(folder, settings, {"train": "other"}) is None
    (folder / "evaluation.json").write_text(json.dumps({**asdict(found), "format_version": 0}))
    assert reusable_evaluation(folder, settings, digests) is None
    with pytest.raises(ModelError, match="another version"):
        load_scores(folder)


def test_a_model_that_takes_relatives_is_evaluated_given_them(
    tmp_path: Path, tiny_dit: DiTFactory, stores_to_evaluate: Stores
) -> None:
    taking = export(tmp_path / "taking", tiny_dit(0, relatives_dim=8))
    ring = RelativesIndex.of_hits(
        6, np.repeat(np.arange(6), 2), np.tile([1, 2], 6) + np.arange(12) % 3, np.full(12, 0.6), 2
    )
    relatives = mock.Mock(return_value=ring)
    stores, settings = stores_to_evaluate.values(), {"masks_per_sequence": 2}
    found = evaluate(taking, *stores, **settings, relatives=relatives)
    given = found.given_relatives
    assert given is not None
    rows = [(row.identity, row.with_relatives) for row in given.below]
    assert rows == [(0.9, 6), (0.7, 6), (0.5, 0)]
    near, same, none = (row.model.nelbo.value for row in given.below)
    assert near == same != none
    assert none == pytest.approx(given.alone.nelbo.value, rel=1e-6)
    assert given.alone.nelbo.value == pytest.approx(found.model.nelbo.value, rel=1e-6)
    assert given.order_difference is not None and given.order_difference < 1e-4
    assert "below 70% (6 proteins have any)" in as_text(found)
    relatives.reset_mock()
    plain = export(tmp_path / "plain", tiny_dit(0))
    assert evaluate(plain, *stores, **settings, relatives=relatives).given_relatives is None
    assert not relatives.called
