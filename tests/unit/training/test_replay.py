"""A replayed step is the step that was trained."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from d2plm.settings.training import CosineSettings
from d2plm.training.learning_rate import cosine
from d2plm.training.replay import Replayed, replay
from tests.ranks import run
from tests.runs import build, history, train

SETTINGS: dict[str, Any] = {"max_steps": 9, "every": 4, "save_total_limit": 9}


def replayed(
    store: Path, output: Path, step: int, checkpoint: str | None = None, **changes: Any
) -> Replayed:
    trainer = build(store, output, **SETTINGS, **changes, log=False)
    trainer.callbacks.clear()  # they write the history
    return replay(trainer, step, checkpoint)


@pytest.mark.parametrize("paradigm", [AbsorbingDiffusion, UniformFlowMatching])
def test_replayed_steps_are_the_trained_ones_and_the_run_stays_as_it_was(
    paradigm: Callable[[], Paradigm], store: Path, tmp_path: Path
) -> None:
    train(store, tmp_path, {**SETTINGS, "paradigm": paradigm(), "log": False})
    again = partial(replayed, store, tmp_path, paradigm=paradigm())
    factor = cosine(9, settings=CosineSettings(warmup_ratio=0.1))
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    for step in (1, 4, 9):
        found, row = again(step), history(tmp_path)[step - 1]
        assert (found.loss, found.grad_norm) == (row["loss"], row["grad_norm"])
        assert found.learning_rate == pytest.approx(1e-2 * factor(step - 1))
        assert sorted(one.sequence_id for one in found.sequences) == row["ids"]
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before
    with pytest.raises(CheckpointError, match="of step 8"):
        again(3, str(tmp_path / "checkpoints" / "step-00000008"))
    for step in (0, 10):
        with pytest.raises(ConfigError, match="steps 1 to 9"):
            again(step)


def test_the_sequences_and_the_gradients_make_up_the_step(store: Path, tmp_path: Path) -> None:
    found = replayed(store, tmp_path, 2)
    assert all(one.predicted <= one.residues <= 48 for one in found.sequences)
    maskable = sum(one.residues for one in found.sequences)
    nats = [one.nats for one in found.sequences]
    assert found.loss == pytest.approx(sum(nats) / maskable, rel=0.1)  # of residues, not of tokens
    assert nats == sorted(nats, reverse=True)
    norm = np.sqrt(sum(norm**2 for norm in found.gradients.values()))
    assert norm == pytest.approx(found.grad_norm, rel=1e-5)


def test_a_step_of_two_ranks_is_replayed_on_one(store: Path, tmp_path: Path) -> None:
    run(train, store, tmp_path, SETTINGS, world_size=2)
    found = replayed(store, tmp_path, 7)
    row = history(tmp_path)[6]
    expected = [row["loss"], row["grad_norm"]]
    assert [found.loss, found.grad_norm] == pytest.approx(expected, rel=1e-4, abs=1e-5)
