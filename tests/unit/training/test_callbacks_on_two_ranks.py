"""What callbacks decide where parameters are sharded over two processes (gloo)."""

from pathlib import Path

import pytest

from d2plm.core.errors import ModelError
from d2plm.settings.callbacks import EarlyStoppingSettings
from d2plm.training.callbacks.early_stopping import EarlyStopping
from d2plm.training.callbacks.gradient_health import GradientHealth
from tests.ranks import run
from tests.runs import At, build
from tests.unit.training.test_early_stopping import Evaluations
from tests.unit.training.test_optimizer_state import overflow


def a_failed_step_stops_all_ranks(store: Path, output: Path) -> None:
    infinite = At("on_micro_step_end", 2, overflow, rank=1)  # in its shard alone
    trainer = build(store, output, callbacks=[infinite, GradientHealth()], every=0)
    with pytest.raises(ModelError, match="step 3: "):
        trainer.train()


def both_ranks_stop_together(store: Path, output: Path) -> None:
    trainer = build(store, output, every=0)
    values = ([2.0, 2.0], [2.0, 1.0])[trainer.process.rank]  # by its own, rank 1 would continue
    trainer.add_callback(Evaluations(values))
    trainer.add_callback(EarlyStopping(EarlyStoppingSettings(patience=1)))
    trainer.train()
    assert trainer.step == 2


def on_ranks(store: Path, output: Path) -> None:
    a_failed_step_stops_all_ranks(store, output / "failed")
    both_ranks_stop_together(store, output / "stopped")


def test_what_callbacks_decide_is_of_all_ranks(store: Path, tmp_path: Path) -> None:
    run(on_ranks, store, tmp_path, world_size=2)
