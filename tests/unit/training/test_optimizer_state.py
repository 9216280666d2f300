"""Resuming with any optimizer: its state is restored bit for bit, or rejected by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, Muon, Optimizer

from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.data.store import SequenceStore
from d2plm.settings.training import AdamWSettings, MuonSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.muon import build_muon
from d2plm.training.optimizer import build_adamw
from d2plm.training.shards import local
from d2plm.training.trainer import Trainer
from tests import runs
from tests.ranks import run
from tests.runs import At, assert_same_run, history, newest, tensors, train

Parameters = Mapping[str, Tensor]


def adamw(model: nn.Module, parameters: Parameters) -> Optimizer:
    return build_adamw(model, parameters, settings=AdamWSettings(learning_rate=1e-2))


def sgd(model: nn.Module, parameters: Parameters, fused: bool = True) -> Optimizer:
    return SGD(parameters.values(), lr=1e-2, momentum=0.9, nesterov=True, fused=fused)


def sgd_not_fused(model: nn.Module, parameters: Parameters) -> Optimizer:
    return sgd(model, parameters, fused=False)


def muon(model: nn.Module, parameters: Parameters) -> Optimizer:
    return build_muon(model, parameters, settings=MuonSettings(learning_rate=1e-2))


def torch_muon(model: nn.Module, parameters: Parameters) -> Optimizer:
    decayed = build_adamw(model, parameters).param_groups[0]["params"]
    return Muon([p for p in decayed if p.ndim == 2], lr=1e-2)


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


KINDS: dict[str, tuple[Callable[..., Optimizer], str]] = {
    "AdamW": (adamw, "fp32"),
    "AdamW in fp16": (adamw, "fp16"),
    "Muon": (muon, "fp32"),
    "Muon in fp16": (muon, "fp16"),
    "SGD": (sgd_not_fused, "fp32"),
    "SGD in fp16": (sgd, "fp16"),
}


def overflow(trainer: Trainer) -> None:
    """An infinite gradient in one shard."""
    grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    next(g for g in map(local, grads) if g.numel()).view(-1)[0] = float("inf")


def interrupt(trainer: Trainer) -> None:
    trainer.saver.wait()
    raise KeyboardInterrupt


def train_broken_and_unbroken(store: Path, output: Path, optimizer: Any, precision: str) -> None:
    """Without a break, and interrupted after five steps and resumed from the fourth."""
    # In fp16 the very first step overflows.
    planted: list[Callback] = [At("on_micro_step_end", 0, overflow)] * (precision == "fp16")
    settings = {"optimizer": optimizer, "precision": precision, "max_steps": 7, "every": 4}
    runs.build(store, output / "unbroken", callbacks=planted, **settings).train()
    stop = At("on_step_end", 5, interrupt)
    try:
        runs.build(store, output / "broken", callbacks=[*planted, stop], **settings).train()
    except KeyboardInterrupt:
        train(store, output / "broken", settings)


def train_all(store: Path, output: Path) -> None:
    for name, (optimizer, precision) in KINDS.items():
        train_broken_and_unbroken(store, output / name, optimizer, precision)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    ranks: int, tiny_store: SequenceStore, tmp_path: Path
) -> None:
    run(train_all, tiny_store.path, tmp_path, world_size=ranks)
    for name in KINDS:
        broken, unbroken = tmp_path / name / "broken", tmp_path / name / "unbroken"
        assert [row["step"] for row in history(broken)] == list(range(1, 8))
        assert_same_run(broken, unbroken)
        saved = tensors(newest(unbroken))
        assert all(torch.isfinite(tensor).all() for tensor in saved.values()), name
        kinds = {place.rpartition("/")[2] for place in saved if place.startswith("optimizer/")}
        adam = {"step", "exp_avg", "exp_avg_sq"}
        momentum = {"momentum_buffer"}
        expected = {"AdamW": adam, "Muon": adam | momentum, "SGD": momentum}
        assert kinds == expected[name.partition(" ")[0]]


@pytest.mark.parametrize("optimizer", [torch_muon, counting])
def test_state_that_is_not_adams_is_resumed_exactly(
    optimizer: Callable[..., Optimizer], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    train_broken_and_unbroken(tiny_store.path, tmp_path, optimizer, "fp32")
    assert_same_run(tmp_path / "broken", tmp_path / "unbroken")
    settings = {"optimizer": optimizer, "max_steps": 7}
    folders = (tmp_path / "broken", tmp_path / "unbroken")
    broken, unbroken = (runs.build(tiny_store.path, folder, **settings) for folder in folders)
    for trainer in (broken, unbroken):
        trainer.load(str(newest(trainer.output_dir)))
    ours, theirs = (trainer.optimizer.state_dict() for trainer in (broken, unbroken))
    assert ours["param_groups"] == theirs["param_groups"]
    if optimizer is counting:
        assert {state["updates"] for state in ours["state"].values()} == {7}
        assert ours["param_groups"][0]["lr_sum"] > 0


def train_to_four(store: Path, output: Path) -> None:
    stop = At("on_step_end", 5, interrupt)
    settings = {"optimizer": sgd, "precision": "fp64", "every": 4, "max_steps": 8}
    try:
        runs.build(store, output, callbacks=[stop], **settings).train()
    except KeyboardInterrupt:
        return


def test_sgds_momentum_is_resumed_on_another_number_of_ranks(
    tiny_store: SequenceStore, tmp_path: Path
) -> None:
    settings = {"optimizer": sgd, "precision": "fp64", "every": 4, "max_steps": 8}
    run(train_to_four, tiny_store.path, tmp_path / "broken", world_size=2)
    train(tiny_store.path, tmp_path / "broken", settings)
    train(tiny_store.path, tmp_path / "unbroken", settings)
    assert_same_run(tmp_path / "broken", tmp_path / "unbroken", 1e-10)


def test_an_optimizer_that_cannot_skip_a_step_is_rejected_in_fp16(
    build: Callable[..., Trainer],
) -> None:
    with pytest.raises(ConfigError, match=r"^precision='fp16': SGD cannot skip .*fused=True"):
        build(optimizer=sgd_not_fused, precision="fp16")


def test_state_of_another_shape_is_rejected_after_the_first_step(
    build: Callable[..., Trainer],
) -> None:
    trainer = build(optimizer=lambda _, parameters: Adafactor(parameters.values(), lr=1e-2))
    with pytest.raises(ConfigError, match="'row_var' that Adafactor"):
        trainer.train()
    assert trainer.step == 1


def test_the_state_of_another_optimizer_is_rejected(build: Callable[..., Trainer]) -> None:
    trainer = build(optimizer=sgd, max_steps=1)
    trainer.train()
    location = trainer.save()
    trainer.saver.wait()
    other = build(optimizer=lambda _, p: Adam(p.values(), fused=True), max_steps=1)
    with pytest.raises(CheckpointError, match="the state of SGD, and the optimizer is Adam"):
        other.load(location)
