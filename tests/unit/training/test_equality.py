"""One training, however it is spread: ranks, shards, copies, micro-batches, recomputation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from d2plm.data.loader import Collection
from d2plm.data.store import SequenceStore
from d2plm.model.config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.training.callbacks.base import Callback
from d2plm.training.distributed import Plan, full_weights, sharded_like
from d2plm.training.optimizer import build_adamw
from d2plm.training.schedule import cosine
from d2plm.training.trainer import Trainer
from tests.ranks import run

BUDGET = 96
BINS = 16
# Odd sizes: no shard of 2 or 4 is even.
SIZES: dict[str, Any] = {
    "hidden_size": 18,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 25,
    "time_embedding_dim": 10,
    "max_position_embeddings": 48,
}
STEPS = 100


class Record(Callback):
    """The first step's gradients, and every step's loss and gradient norm."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self.losses.append(float(trainer.loss))
        self.norms.append(float(trainer.grad_norm))
        if trainer.step == 0:
            for name, parameter in trainer.model.named_parameters():
                grad = sharded_like(trainer.parameters[name].grad, parameter)
                self.gradients[name] = whole(grad)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def build(store: Path, output: Path, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "precision": "fp64",
        "global_batch_tokens": BINS * BUDGET,
        "ema_decay": 0.99,
        "callbacks": [],
    }
    settings |= changes
    return Trainer(
        model=DiTConfig(**SIZES),
        paradigm=AbsorbingDiffusion(),
        collections=[Collection(SequenceStore(store))],
        output_dir=output,
        optimizer=lambda *both: build_adamw(*both, learning_rate=1e-2),
        schedule=lambda steps: cosine(steps, warmup_ratio=0.1),
        token_budget=BUDGET,
        max_length=48,
        device="cpu",
        **settings,
    )


def train(store: Path, output: Path, plan: dict[str, Any], **changes: Any) -> None:
    """Train and leave on rank 0 what there is to compare."""
    record = Record()
    trainer = build(store, output, plan=Plan(**plan), callbacks=[record], **changes)
    trainer.train()
    weights = full_weights(trainer.model, trainer.process)
    with trainer.ema.swapped_in():
        averages = full_weights(trainer.model, trainer.process)
    if trainer.process.is_main:
        output.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "gradients": record.gradients,
                "weights": weights,
                "averages": averages,
                "norms": torch.tensor(record.norms, dtype=torch.float64),
                "losses": torch.tensor(record.losses, dtype=torch.float64),
            },
            output / "result.pt",
        )


def train_with(store: Path, output: Path, plan: dict[str, Any], changes: dict[str, Any]) -> None:
    train(store, output, plan, **changes)


def result(output: Path) -> dict[str, Any]:
    return torch.load(output / "result.pt", weights_only=True)


def assert_close(found: Any, expected: Any, tolerance: float, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_close(found[key], expected[key], tolerance, f"{where}.{key}")
    else:
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{where}: {m}"
        )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_store: SequenceStore) -> Any:
    output = tmp_path_factory.mktemp("reference")
    run(train_with, tiny_store.path, output, {}, {"gradient_accumulation_steps": 4})
    return result(output)


SPREADS = [(1, {}), (2, {}), (4, {}), (4, {"replicate": 2})]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "plan"), SPREADS, ids=["1", "2", "4", "2x2"])
def test_fp64_training_is_the_same_however_it_is_spread(
    ranks: int,
    plan: dict[str, Any],
    micro_batches: int,
    reference: dict[str, Any],
    tiny_store: SequenceStore,
    tmp_path: Path,
) -> None:
    changes = {"gradient_accumulation_steps": micro_batches}
    run(train_with, tiny_store.path, tmp_path, plan, changes, world_size=ranks)
    assert_close(result(tmp_path), reference, 1e-10)
