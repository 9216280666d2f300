"""A replayed step is the step that was trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.settings.training import CosineSettings
from d2plm.training.learning_rate import cosine
from d2plm.training.replay import Replayed, replay
from tests.ranks import run
from tests.runs import build, history, train

SETTINGS: dict[str, Any] = {"max_steps": 9, "every": 4, "save_total_limit": 9}


def replayed(store: Path, output: Path, step: int, checkpoint: str | None = None) -> Replayed:
    trainer = build(store, output, **SETTINGS, log=False)
    trainer.callbacks.clear()  # they write the history
    return replay(trainer, step, checkpoint)


def test_replayed_steps_are_the_trained_ones_and_the_run_stays_as_it_was(
    store: Path, tmp_path: Path
) -> None:
    train(store, tmp_path, {**SETTINGS, "log": False})
    factor = cosine(9, settings=CosineSettings(warmup_ratio=0.1))
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    for step in (1, 4, 9):
        found, row = replayed(store, tmp_path, step), history(tmp_path)[step - 1]
        assert (found.loss, found.grad_norm) == (row["loss"], row["grad_norm"])
        assert found.learning_rate == pytest.approx(1e-2 * factor(step - 1))
        assert sorted(one.sequence_id for one in found.sequences) == row["ids"]
        # They make up the step.
        nats = [one.nats for one in found.sequences]
        assert nats == sorted(nats, reverse=True)
        assert all(one.predicted <= one.residues <= 48 for one in found.sequences)
        residues = sum(one.residues for one in found.sequences)  # not tokens
        assert found.loss == pytest.approx(sum(nats) / residues, rel=0.1)
        norm = np.linalg.norm([*found.gradients.values()])
        assert norm == pytest.approx(found.grad_norm, rel=1e-5)
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before
    with pytest.raises(CheckpointError, match="of step 8"):
        replayed(store, tmp_path, 3, str(tmp_path / "checkpoints" / "step-00000008"))
    for step in (0, 10):
        with pytest.raises(ConfigError, match="steps 1 to 9"):
            replayed(store, tmp_path, step)


def test_a_step_of_two_ranks_is_replayed_on_one(store: Path, tmp_path: Path) -> None:
    run(train, store, tmp_path, SETTINGS, world_size=2)
    found = replayed(store, tmp_path, 7)
    row = history(tmp_path)[6]
    expected = [row["loss"], row["grad_norm"]]
    assert [found.loss, found.grad_norm] == pytest.approx(expected, rel=1e-4, abs=1e-5)
