"""GradientHealth: skips steps, stops at its bound, and saves the step at which it stopped."""

import json
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from d2plm.core.errors import CheckpointError, ConfigError, ModelError
from d2plm.settings.callbacks import CheckpointSettings, GradientHealthSettings, MetricsSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.gradient_health import GradientHealth, described_gradients
from d2plm.training.callbacks.metric_logger import MetricLogger
from d2plm.training.callbacks.save_checkpoint import SaveCheckpoint
from d2plm.training.distributed import Process
from d2plm.training.trainer import Trainer

Build = Callable[..., Trainer]


@pytest.fixture(autouse=True)
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that the state was saved to, instead of a checkpoint."""
    folders: list[Path] = []

    def save_state(self: Trainer, folder: Path) -> None:
        folders.append(folder)

    monkeypatch.setattr(Trainer, "save_state", save_state, raising=False)
    return folders


class Poison(Callback):
    """Makes one gradient of some steps no number."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_micro_step_end(self, trainer: Trainer) -> None:
        if trainer.step in self.steps:
            next(trainer.model.parameters()).grad.fill_(float("nan"))


class Weights(Callback):
    """Keeps a copy of the weights after each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        parameters = [p.detach().flatten() for p in trainer.model.parameters()]
        self.seen.append(torch.cat(parameters).clone())


def test_a_gradient_that_is_not_a_number_stops_before_it_reaches_the_weights(
    build: Build, tmp_path: Path, saved: list[Path]
) -> None:
    trainer = build(Poison(2), GradientHealth())
    with pytest.raises(ModelError, match="step 3: the gradient norm is nan") as caught:
        trainer.train()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    folder = tmp_path / "run" / "failed-step-3"
    assert str(folder) in str(caught.value)
    state = folder / "state" / "step-00000002"
    command = f"d2plm replay {tmp_path / 'run'} --step 3 --checkpoint {state}"
    assert command in str(caught.value)
    assert saved == [folder / "state"]


def test_a_failed_step_is_kept_with_its_sequences(build: Build, tmp_path: Path) -> None:
    trainer = build(Poison(1), GradientHealth(), gradient_accumulation_steps=2)
    with pytest.raises(ModelError):
        trainer.train()
    assert trainer.batch is not None
    folder = tmp_path / "run" / "failed-step-2"
    described = json.loads((folder / "batch.rank0.json").read_text())
    assert described["step"] == 2
    assert (described["epoch"], described["bins"]) == (0, 2)
    assert len(described["micro_batches"]) == 2
    for found, packed in zip(described["micro_batches"], trainer.batch.micro_batches, strict=True):
        lengths = [len(sequence) for sequence in packed.split()]
        assert found["segment_lengths"] == lengths
        assert found["sequence_ids"] == packed.sequence_ids[: len(lengths)].tolist()
        assert found["draw_ids"] == packed.draw_ids[: len(lengths)].tolist()
    gradients = json.loads((folder / "gradients.json").read_text(), parse_constant=pytest.fail)
    assert gradients["norms"].keys() == dict(trainer.model.named_parameters()).keys()
    assert gradients["grad_norm"] == "nan"


def test_the_kept_gradients_name_those_that_are_not_finite() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    model[0].weight.grad = torch.full((2, 3), 2.0)
    model[1].weight.grad = torch.tensor([[1.0, float("inf")], [0.0, 0.0]])
    stub: Any = SimpleNamespace(
        parameters=dict(model.named_parameters()),
        splits={},
        process=Process(),
        step=3,
        loss=torch.tensor(1.5),
        grad_norm=torch.tensor(float("inf")),
    )
    assert described_gradients(stub) == {
        "step": 4,
        "loss": 1.5,
        "grad_norm": "inf",
        "not_finite": ["1.weight"],
        "norms": {"0.weight": pytest.approx(24**0.5), "1.weight": "inf"},
    }


def test_a_state_that_cannot_be_saved_does_not_hide_why_the_run_stopped(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Trainer, folder: Path) -> None:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(Trainer, "save_state", full)
    with pytest.raises(ModelError, match="step 2: the gradient norm is nan"):
        build(Poison(1), GradientHealth()).train()
    assert "No space left" in caplog.text


def test_a_skipped_step_changes_no_weight_and_is_warned_of_once(
    build: Build, caplog: pytest.LogCaptureFixture, saved: list[Path]
) -> None:
    weights = Weights()
    with caplog.at_level(logging.WARNING):
        build(Poison(1, 3), GradientHealth(GradientHealthSettings(max_skipped=1)), weights).train()
    same = [torch.equal(before, now) for before, now in pairwise(weights.seen)]
    assert same == [True, False, True, False, False]
    assert all(torch.isfinite(seen).all() for seen in weights.seen)
    warnings = [record.getMessage() for record in caplog.records if "skipped" in record.message]
    assert [warning.split(":")[0] for warning in warnings] == ["step 2 skipped", "step 4 skipped"]
    assert "gradient norm nan (1 of at most 1 in a row)" in warnings[1]
    assert not saved


@pytest.mark.parametrize(
    ("poisoned", "settings", "stops_at"),
    [
        ((1, 2, 4), {"max_skipped": 2}, None),
        ((1, 2, 3), {"max_skipped": 2}, 4),
        ((1, 2, 4), {"max_skipped": 2, "counted": "in_total"}, 5),
        ((1, 4), {"max_skipped": 2, "counted": "in_total"}, None),
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


def test_looking_now_and_then_looks_before_what_is_saved(build: Build, tmp_path: Path) -> None:
    trainer = build(
        Poison(1),
        SaveCheckpoint(CheckpointSettings(every=3)),
        GradientHealth(GradientHealthSettings(every=3)),
    )
    with pytest.raises(ModelError, match=r"step 3: .*checked every 3 steps.*every=1"):
        trainer.train()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_last_step_is_looked_at_in_any_case(build: Build) -> None:
    with pytest.raises(ModelError, match="step 6: "):
        build(Poison(5), GradientHealth(GradientHealthSettings(every=4))).train()


@pytest.mark.parametrize(
    ("device", "settings", "callbacks", "interval"),
    [
        ("cpu", {}, [MetricLogger(settings=MetricsSettings(every=7))], 1),
        ("cuda", {}, [MetricLogger(settings=MetricsSettings(every=7))], 7),
        ("cuda", {}, [], 20),
        ("cuda", {"max_skipped": 1}, [MetricLogger(settings=MetricsSettings(every=7))], 1),
        ("cuda", {"every": 3}, [MetricLogger(settings=MetricsSettings(every=7))], 3),
    ],
)
def test_by_default_it_never_waits_for_a_cuda_device_where_no_row_does(
    device: str, settings: dict[str, Any], callbacks: list[Callback], interval: int
) -> None:
    health = GradientHealth(GradientHealthSettings(**settings))
    process = SimpleNamespace(device=torch.device(device))
    stub: Any = SimpleNamespace(process=process, callbacks=[health, *callbacks])
    health.on_train_begin(stub)
    assert health.interval == interval


def test_settings_that_exclude_each_other_are_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^every=2"):
        GradientHealth(GradientHealthSettings(every=2, max_skipped=1))
