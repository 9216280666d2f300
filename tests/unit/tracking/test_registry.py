"""The champion gate: only a significantly better model on the same residues and masks passes."""

import json
from pathlib import Path

import numpy as np
import pytest

from d2plm.errors import TrackingError
from d2plm.tracking.registry import beats

SEQUENCES, RESIDUES = 200, 100


def evaluated(folder: Path, nats_per_residue: float, masks: str = "m", seed: int = 0) -> Path:
    """An export's evaluation files: nats that vary by sequence around a mean."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    easy_or_hard = np.random.default_rng(0).normal(0, 0.3, SEQUENCES)  # shared by all models
    own = random.normal(0, 0.01, SEQUENCES)
    nats = RESIDUES * (nats_per_residue + easy_or_hard + own)
    residues = np.full(SEQUENCES, RESIDUES)
    clusters = np.arange(SEQUENCES) // 2
    np.savez(folder / "sequence_scores.npz", nats=nats, residues=residues, clusters=clusters)
    (folder / "evaluation.json").write_text(json.dumps({"digests": {"masks": masks}}))
    return folder


def test_a_better_model_passes_although_sequences_vary_far_more(tmp_path: Path) -> None:
    better, reason = beats(
        evaluated(tmp_path / "new", 2.86, seed=1), evaluated(tmp_path / "old", 2.87, seed=2)
    )
    assert better
    assert "better than the champion" in reason


def test_a_worse_or_equal_model_does_not_pass(tmp_path: Path) -> None:
    champion = evaluated(tmp_path / "old", 2.87)
    for name, nats, seed in (("worse", 2.88, 1), ("equal", 2.87, 2)):
        better, reason = beats(evaluated(tmp_path / name, nats, seed=seed), champion)
        assert not better
        assert "not significantly better" in reason


def test_a_champion_evaluated_on_other_masks_is_not_replaced(tmp_path: Path) -> None:
    better, reason = beats(
        evaluated(tmp_path / "new", 1.0, masks="a"), evaluated(tmp_path / "old", 2.0, masks="b")
    )
    assert not better
    assert "other data or masks" in reason


def test_an_unevaluated_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(TrackingError, match="d2plm evaluate"):
        beats(tmp_path / "new", evaluated(tmp_path / "old", 2.0))
