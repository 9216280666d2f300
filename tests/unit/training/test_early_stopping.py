"""EarlyStopping: ends after its patience, saves that step, and keeps its state on resume."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from d2plm.core.errors import ConfigError
from d2plm.settings.callbacks import CheckpointSettings, EarlyStoppingSettings
from d2plm.training import checkpoint
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.early_stopping import EarlyStopping
from d2plm.training.callbacks.save_checkpoint import SaveCheckpoint
from d2plm.training.distributed import Process
from d2plm.training.trainer import Trainer
from tests.unit.training.conftest import Build

NAN = float("nan")


class Evaluations(Callback):
    """Stands for evaluations with these values, one after each step."""

    def __init__(self, values: Sequence[float], name: str = "validation_nelbo") -> None:
        self.values, self.name = values, name

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        trainer.notify("on_evaluate", {self.name: self.values[trainer.step - 1]})


@pytest.mark.parametrize(
    ("settings", "values", "ends_at"),
    [
        ({"patience": 2}, [3, 2, 1, 2, 2, 0], 5),
        ({"patience": 2}, [3, 2, 1, 2, 0, 2], 6),
        ({"patience": 2}, [3, 3, 3, 0, 0, 0], 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.5, 2.4, 2.3, 0], 3),
        ({"patience": 2, "min_delta": 0.4}, [3, 2.5, 2, 1.5, 1, 0.5], 6),
        ({"patience": 2, "mode": "max"}, [3, 4, 5, 4, 5, 9], 5),
        ({"patience": 2}, [NAN, NAN, 1, 1, 1, 1], 2),
        ({"patience": 2}, [3, NAN, 2, NAN, NAN, 1], 5),
        ({}, [1, 2, 3, 4, 5, 6], 6),
    ],
)
def test_training_ends_where_the_metric_no_longer_gets_better(
    settings: dict[str, Any], values: list[float], ends_at: int
) -> None:
    stub, stopping = mock.Mock(process=Process()), EarlyStopping(EarlyStoppingSettings(**settings))
    done = 0
    while done < len(values) and not stub.end_training.called:
        stopping.on_evaluate(stub, {"validation_nelbo": values[done]})
        done += 1
    assert done == ends_at


def test_a_metric_that_is_not_evaluated_is_named(build: Build) -> None:
    stopping = EarlyStopping(EarlyStoppingSettings(monitor="validation_nelb", patience=1))
    with pytest.raises(ConfigError, match=r"^monitor=.*did you mean 'validation_nel"):
        build(Evaluations([1] * 6), stopping).train()


def test_the_step_at_which_it_ends_is_saved(build: Build, tmp_path: Path) -> None:
    stopping = EarlyStopping(EarlyStoppingSettings(patience=2))
    save = SaveCheckpoint(CheckpointSettings(every=100))
    build(Evaluations([1] * 6), stopping, save).train()
    root = checkpoint.Root(str(tmp_path / "run" / "checkpoints"))
    assert root.names() == ["step-00000003"]


def test_a_resumed_run_continues_waiting(build: Build) -> None:
    before = EarlyStopping(EarlyStoppingSettings(patience=3))
    build(Evaluations([1, 2, 2]), before, max_steps=3).train()
    after = EarlyStopping(EarlyStoppingSettings(patience=3))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    trainer = build(Evaluations([2] * 6), after)
    trainer.train()
    assert trainer.step == 1
    again = build(after)
    after.on_train_begin(again)
    assert again.is_last_step, "a run that has stopped does not start again"
