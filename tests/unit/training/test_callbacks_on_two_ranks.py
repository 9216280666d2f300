"""What callbacks keep and decide where parameters are sharded over two processes (gloo)."""

import json
from pathlib import Path

import pytest

from d2plm.core.errors import ModelError
from d2plm.settings.callbacks import EarlyStoppingSettings
from d2plm.training.callbacks.early_stopping import EarlyStopping
from d2plm.training.callbacks.gradient_health import GradientHealth
from tests.ranks import run
from tests.runs import At, build, progress
from tests.unit.training.test_early_stopping import Evaluations
from tests.unit.training.test_optimizer_state import overflow


def a_failed_step_is_kept_by_all_ranks_together(store: Path, output: Path) -> None:
    infinite = At("on_micro_step_end", 2, overflow, rank=1)  # in its shard alone
    trainer = build(store, output, callbacks=[infinite, GradientHealth()], every=0)
    with pytest.raises(ModelError, match="step 3: "):
        trainer.train()
    folder, rank = output / "failed-step-3", trainer.process.rank
    assert progress(folder / "state" / "step-00000002")["step"] == 2
    described = json.loads((folder / f"batch.rank{rank}.json").read_text())
    assert (described["step"], described["rank"], described["world_size"]) == (3, rank, 2)
    assert trainer.batch is not None
    for found, packed in zip(described["micro_batches"], trainer.batch.micro_batches, strict=True):
        lengths = [len(sequence) for sequence in packed.split()]
        assert found["segment_lengths"] == lengths
        assert found["sequence_ids"] == packed.sequence_ids[: len(lengths)].tolist()
        assert found["draw_ids"] == packed.draw_ids[: len(lengths)].tolist()
    gradients = json.loads((folder / "gradients.json").read_text())
    (poisoned,) = gradients["not_finite"]
    assert [name for name, norm in gradients["norms"].items() if norm == "inf"] == [poisoned]


def both_ranks_stop_together(store: Path, output: Path) -> None:
    trainer = build(store, output, every=0)
    values = ([2.0, 2.0], [2.0, 1.0])[trainer.process.rank]  # by its own, rank 1 would continue
    trainer.add_callback(Evaluations(values))
    trainer.add_callback(EarlyStopping(EarlyStoppingSettings(patience=1)))
    trainer.train()
    assert trainer.step == 2


def on_ranks(store: Path, output: Path) -> None:
    a_failed_step_is_kept_by_all_ranks_together(store, output / "failed")
    both_ranks_stop_together(store, output / "stopped")


def test_what_callbacks_keep_and_decide_is_of_all_ranks(store: Path, tmp_path: Path) -> None:
    run(on_ranks, store, tmp_path, world_size=2)
