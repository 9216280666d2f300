"""EarlyStopping and GradientHealth: what ends training, what is saved, state on resume."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from d2plm.core.errors import ConfigError, ModelError
from d2plm.settings.callbacks import (
    CheckpointSettings,
    EarlyStoppingSettings,
    GradientHealthSettings,
    MetricsSettings,
)
from d2plm.training import checkpoint
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.early_stopping import EarlyStopping
from d2plm.training.callbacks.gradient_health import GradientHealth
from d2plm.training.callbacks.metric_logger import MetricLogger
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
        ({"patience": 2}, [3, 3, 3, 0, 0, 0], 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.5, 2.4, 2.3, 0], 3),
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


LOGGER = MetricLogger(settings=MetricsSettings(every=7))


class Poison(Callback):
    """Makes one gradient of some steps no number."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_micro_step_end(self, trainer: Trainer) -> None:
        if trainer.step in self.steps:
            next(trainer.model.parameters()).grad.fill_(float("nan"))


def test_nan_stops_before_it_reaches_the_weights(build: Build, tmp_path: Path) -> None:
    trainer = build(Poison(2), GradientHealth(), gradient_accumulation_steps=2)
    with pytest.raises(ModelError, match="step 3: ") as caught:
        trainer.train()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    assert f"d2plm replay {tmp_path / 'run'} --step 3 repeats the step" in str(caught.value)


def test_a_skipped_step_changes_neither_weights_nor_averages_nor_moments(build: Build) -> None:
    class States(Callback):
        def on_step_end(self, trainer: Trainer, *_: object) -> None:
            moments = [m for of in trainer.optimizer.state.values() for m in of.values()]
            every = [*trainer.parameters.values(), *trainer.ema.shadow.values(), *moments]
            states.append(torch.cat([tensor.detach().flatten() for tensor in every]))

    states: list[torch.Tensor] = []
    build(Poison(1, 3), GradientHealth(GradientHealthSettings(max_skipped=1)), States()).train()
    same = [torch.equal(before, now) for before, now in pairwise(states)]
    assert same == [True, False, True, False, False]
    assert all(torch.isfinite(seen).all() for seen in states)


@pytest.mark.parametrize(
    ("poisoned", "settings", "stops_at"),
    [
        ((1, 2, 4), {"max_skipped": 2}, None),
        ((1, 2, 3), {"max_skipped": 2}, 4),
        ((1, 2, 4), {"max_skipped": 2, "counted": "in_total"}, 5),
    ],
)
def test_the_bound_is_of_steps_in_a_row_or_in_total(
    poisoned: tuple[int, ...], settings: dict[str, Any], stops_at: int | None, build: Build
) -> None:
    trainer = build(Poison(*poisoned), GradientHealth(GradientHealthSettings(**settings)))
    if stops_at is None:
        trainer.train()
        assert trainer.step == 6
    else:
        with pytest.raises(ModelError, match=f"step {stops_at}: "):
            trainer.train()


def test_a_resumed_run_continues_counting(build: Build) -> None:
    before = GradientHealth(GradientHealthSettings(max_skipped=2, counted="in_total"))
    build(Poison(1, 3), before).train()
    after = GradientHealth(GradientHealthSettings(max_skipped=2, counted="in_total"))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    with pytest.raises(ModelError, match="step 1: "):
        build(Poison(0), after).train()


@pytest.mark.parametrize(("poisoned", "every", "found"), [(1, 3, 3), (5, 4, 6)])
def test_looking_now_and_then_looks_before_what_is_saved_and_at_the_end(
    poisoned: int, every: int, found: int, build: Build, tmp_path: Path
) -> None:
    health = GradientHealth(GradientHealthSettings(every=every))
    trainer = build(Poison(poisoned), SaveCheckpoint(CheckpointSettings(every=6)), health)
    with pytest.raises(ModelError, match=f"step {found}: "):
        trainer.train()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_by_default_it_never_waits_for_a_cuda_device_where_no_row_does() -> None:
    cases: list[tuple[str, dict[str, Any], list[Callback], int]] = [
        ("cpu", {}, [LOGGER], 1),
        ("cuda", {}, [LOGGER], 7),
        ("cuda", {}, [], 20),
        ("cuda", {"max_skipped": 1}, [LOGGER], 1),
        ("cuda", {"every": 3}, [LOGGER], 3),
    ]
    for device, settings, loggers, interval in cases:
        health = GradientHealth(GradientHealthSettings(**settings))
        process = SimpleNamespace(device=torch.device(device))
        health.on_train_begin(SimpleNamespace(process=process, callbacks=loggers))  # type: ignore[arg-type]
        assert health.interval == interval
    with pytest.raises(ConfigError, match=r"^every=2"):
        GradientHealth(GradientHealthSettings(every=2, max_skipped=1))
