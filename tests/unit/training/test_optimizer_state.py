"""Resuming with any optimizer: its state is restored bit for bit, or rejected by name."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, Optimizer

from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.settings.training import MuonSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.muon import build_muon
from d2plm.training.shards import local
from d2plm.training.trainer import Trainer
from tests import runs
from tests.ranks import run
from tests.runs import At, assert_same_run, newest, tensors, train

Parameters = Mapping[str, Tensor]


def sgd(model: nn.Module, parameters: Parameters) -> Optimizer:
    return SGD(parameters.values(), lr=1e-2, momentum=0.9, nesterov=True, fused=True)


def muon(model: nn.Module, parameters: Parameters) -> Optimizer:
    return build_muon(model, parameters, settings=MuonSettings(learning_rate=1e-2))


class Counting(SGD):
    """Keeps a number for each parameter, and one that is a setting of the group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["lr_sum"] = group.get("lr_sum", 0.0) + group["lr"]
            for parameter in group["params"]:
                state = self.state[parameter]
                state["updates"] = state.get("updates", 0) + 1


def counting(model: nn.Module, parameters: Parameters) -> Optimizer:
    return Counting(parameters.values(), lr=1e-2, momentum=0.9)


KINDS: dict[str, Callable[..., Optimizer]] = {"muon": muon, "sgd": sgd}  # AdamW's: Muon's too


def overflow(trainer: Trainer) -> None:
    """An infinite gradient in one shard."""
    grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    next(g for g in map(local, grads) if g.numel()).view(-1)[0] = float("inf")


def train_broken_and_unbroken(store: Path, output: Path, optimizer: Any, precision: str) -> None:
    """Without a break, and interrupted after five steps and resumed."""
    # In fp16 the very first step overflows.
    planted: list[Callback] = [At("on_micro_step_end", 0, overflow)] * (precision == "fp16")
    settings = {"optimizer": optimizer, "precision": precision, "max_steps": 7, "every": 9}
    runs.build(store, output / "unbroken", callbacks=planted, **settings).train()
    stop = At("on_step_end", 5, runs.interrupt)
    with suppress(KeyboardInterrupt):
        runs.build(store, output / "broken", callbacks=[*planted, stop], **settings).train()
    train(store, output / "broken", settings)


def train_all(store: Path, output: Path) -> None:
    for name, optimizer in KINDS.items():
        train_broken_and_unbroken(store, output / name, optimizer, "fp16")


def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(store: Path, tmp_path: Path) -> None:
    run(train_all, store, tmp_path, world_size=2)
    for name in KINDS:
        broken, unbroken = tmp_path / name / "broken", tmp_path / name / "unbroken"
        assert_same_run(broken, unbroken)
        saved = tensors(newest(unbroken))
        assert all(torch.isfinite(tensor).all() for tensor in saved.values()), name
        assert (saved["loss_scale/scale"], saved["loss_scale/good_steps"]) == (2**15, 6)  # halved
        kinds = {place.rpartition("/")[2] for place in saved if place.startswith("optimizer/")}
        adam = {"step", "exp_avg", "exp_avg_sq"} if name == "muon" else set()
        assert kinds == adam | {"momentum_buffer"}


def test_numbers_of_a_state_and_a_group_are_resumed(store: Path, tmp_path: Path) -> None:
    train_broken_and_unbroken(store, tmp_path, counting, "fp32")
    assert_same_run(tmp_path / "broken", tmp_path / "unbroken")
    states = []
    for name in ("broken", "unbroken"):
        trainer = runs.build(store, tmp_path / name, optimizer=counting, max_steps=7)
        trainer.load(str(newest(trainer.output_dir)))
        states.append(trainer.optimizer.state_dict())
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["param_groups"][0]["lr_sum"] > 0
    assert {state["updates"] for state in states[0]["state"].values()} == {7}


def test_optimizers_that_cannot_be_resumed_are_rejected(build: Callable[..., Trainer]) -> None:
    with pytest.raises(ConfigError, match=r"^precision='fp16'"):  # it cannot skip a step
        build(optimizer=counting, precision="fp16")
    with pytest.raises(ConfigError, match="'row_var'"):  # another shape than its parameter's
        build(optimizer=lambda _, parameters: Adafactor(parameters.values(), lr=1e-2)).train()


def test_the_state_of_another_optimizer_is_rejected(build: Callable[..., Trainer]) -> None:
    trainer = build(optimizer=sgd, max_steps=1)
    trainer.train()
    location = trainer.save()
    trainer.saver.wait()
    other = build(optimizer=lambda _, p: Adam(p.values(), fused=True), max_steps=1)
    with pytest.raises(CheckpointError, match=r"SGD.*Adam"):
        other.load(location)
