"""Training a mixture of experts: equal however it is spread, balanced, watched and resumed."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from d2plm.core.batch import PackedBatch
from d2plm.data.loader import Collection
from d2plm.data.store import SequenceStore
from d2plm.model.dit_config import DiTConfig
from d2plm.model.experts import Router
from d2plm.settings.callbacks import MetricsSettings
from d2plm.settings.training import AdamWSettings, MuonSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.metric_logger import METRICS_FILE, MetricLogger
from d2plm.training.muon import build_muon
from d2plm.training.optimizer import build_adamw
from d2plm.training.trainer import Trainer
from tests import runs
from tests.conftest import TINY_SIZES, Tokens, write_store
from tests.ranks import Ranks

Build = Callable[..., Trainer]
# Five experts: no shard of 2 or 4 is even.
EXPERTS: dict[str, Any] = {"num_experts": 5, "experts_per_token": 2}


def balanced(trainer: Trainer) -> list[Router]:
    return [module for module in trainer.model.modules() if isinstance(module, Router)]


# --- spread --------------------------------------------------------------------------------------


def resume_in_turn(store: Path, output: Path) -> None:
    """A run without a break, and one that ends in step 7 and is resumed from its sixth."""
    sizes = {**EXPERTS, "balance_rate": 0.01, "auxiliary_loss": 0.1, "shared_expert_size": 24}
    runs.train(store, output / "unbroken", {"sizes": sizes})

    def fail(_: Trainer) -> None:
        raise KeyboardInterrupt

    try:
        broken = runs.At("on_step_begin", 7, fail)
        runs.train(store, output / "broken", {"sizes": sizes, "callbacks": [broken]})
    except KeyboardInterrupt:
        runs.train(store, output / "broken", {"sizes": sizes})


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(
    ranks: int, tiny_store: SequenceStore, tmp_path: Path
) -> None:
    assert Ranks(resume_in_turn, tiny_store.path, tmp_path, world_size=ranks).wait() == [0] * ranks
    runs.assert_same_run(tmp_path / "broken", tmp_path / "unbroken")
    kept = runs.tensors(runs.newest(tmp_path / "broken"))
    assert kept["model/blocks.0.feed_forward.router.bias"].any()
    assert kept["model/blocks.0.feed_forward.router.past_load"].sum() == pytest.approx(1)


# --- what counts ---------------------------------------------------------------------------------


class Loads(Callback):
    """The biases and loads after every step, and the tokens that it had."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[torch.Tensor], torch.Tensor, int]] = []

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        assert trainer.batch is not None
        biases = [
            router.bias.detach().clone() for router in balanced(trainer) if router.bias is not None
        ]
        self.steps.append((biases, trainer.experts.load, sum(trainer.batch.segment_lengths)))


class Evaluates(Callback):
    """Forwards of other tokens between the micro-batches of a step."""

    def on_micro_step_end(self, trainer: Trainer) -> None:
        with torch.no_grad(), trainer.evaluating() as denoiser:
            assert trainer.batch is not None
            packed: PackedBatch = trainer.batch.micro_batches[0]
            times = torch.zeros(packed.num_segments)
            denoiser(packed.tokens, packed.cu_seqlens, packed.max_seqlen, times)


def test_a_bias_moves_by_the_sign_of_the_load_and_by_what_training_alone_counts(
    build: Build,
) -> None:
    config = DiTConfig(**TINY_SIZES, **EXPERTS)
    loads = Loads()
    changes = {"model": config, "gradient_accumulation_steps": 2, "global_batch_tokens": 1024}
    build(loads, Evaluates(), **changes).train()
    expected = torch.zeros(2, 5)
    for biases, load, tokens in loads.steps:
        assert load.sum(-1).tolist() == [2 * tokens] * 2
        moves = config.balance_rate * (load.double().mean(-1, keepdim=True) - load).sign()
        expected = expected + moves - moves.mean(-1, keepdim=True)
        torch.testing.assert_close(torch.stack(biases), expected.float())
    assert expected.any()


@pytest.mark.parametrize("frozen", ["blocks.0.*", "blocks.0.feed_forward.router.weight"])
def test_the_bias_of_a_frozen_router_stays(build: Build, frozen: str) -> None:
    trainer = build(model=DiTConfig(**TINY_SIZES, **EXPERTS), freeze=[frozen])
    trainer.train()
    first, second = balanced(trainer)
    assert first.bias is not None and second.bias is not None
    assert not first.bias.any() and second.bias.any()


# --- the monitor ---------------------------------------------------------------------------------


def test_the_monitor_s_figures_are_those_of_the_loads(build: Build, tmp_path: Path) -> None:
    config = DiTConfig(**TINY_SIZES, num_experts=8)
    loads = Loads()
    build(loads, MetricLogger(settings=MetricsSettings(every=3)), model=config).train()
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()]
    for row, steps in zip(rows, (loads.steps[:3], loads.steps[3:]), strict=True):
        load = torch.stack([load for _, load, _ in steps]).sum(0).double()
        relative = load / load.mean(-1, keepdim=True)
        assert row["expert_largest"] == pytest.approx(float(relative.max()))
        assert row["experts_starved"] == int((relative < 0.1).sum())
        share = load / load.sum(-1, keepdim=True)
        entropy = torch.distributions.Categorical(probs=share).entropy()
        lowest = float(entropy.min() / torch.tensor(8.0).log())
        assert row["expert_entropy"] == pytest.approx(lowest)
        for layer in (0, 1):
            for expert in range(8):
                found = row[f"expert_load/blocks.{layer}.{expert}"]
                assert found == pytest.approx(float(relative[layer, expert]))
        assert 0 < row["router_z"] < 100


@pytest.fixture
def routed(build: Build) -> Callable[[float], Trainer]:
    """The scale of the router's weights → a trainer of one step with the monitor."""

    def train(scale: float) -> Trainer:
        class Scale(Callback):
            @torch.no_grad()
            def on_train_begin(self, trainer: Trainer) -> None:
                for router in balanced(trainer):
                    router.weight.mul_(scale)

        logger = MetricLogger(settings=MetricsSettings(every=1))
        config = DiTConfig(**TINY_SIZES, num_experts=8)
        trainer = build(Scale(), logger, model=config, max_steps=1)
        trainer.train()
        return trainer

    return train


def test_z_of_a_router_without_weights_is_the_squared_logarithm_of_their_number(
    routed: Callable[[float], Trainer],
) -> None:
    found = routed(0.0).history[-1]["router_z"]
    assert found == pytest.approx(float(torch.tensor(8.0).log().square()))


def test_a_dense_model_has_no_figures_of_experts(build: Build, tmp_path: Path) -> None:
    build(MetricLogger(settings=MetricsSettings(every=3))).train()
    assert "expert" not in (tmp_path / "run" / METRICS_FILE).read_text()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "optimizer", "most"),
    [
        ({}, partial(build_adamw, settings=AdamWSettings(learning_rate=1e-3)), 1.2),
        ({}, partial(build_muon, settings=MuonSettings(learning_rate=2e-3)), 1.2),
        (
            {"auxiliary_loss": 0.01},
            partial(build_adamw, settings=AdamWSettings(learning_rate=1e-3)),
            1.3,
        ),
    ],
    ids=["bias", "bias with Muon", "auxiliary loss"],
)
def test_after_200_steps_on_proteins_no_expert_is_far_above_the_mean(
    settings: dict[str, Any],
    optimizer: Any,
    most: float,
    build: Build,
    proteins: list[Tokens],
    tmp_path: Path,
) -> None:
    store = write_store(tmp_path / "store", proteins[:2000])
    sizes = {**TINY_SIZES, "hidden_size": 64, "intermediate_size": 64, "time_embedding_dim": 32}
    build(
        MetricLogger(settings=MetricsSettings(every=20)),
        model=DiTConfig(**sizes, num_experts=8, initial_gate=1.0, **settings),
        collections=[Collection(SequenceStore(store.path))],
        optimizer=optimizer,
        token_budget=2048,
        max_length=128,
        max_steps=200,
    ).train()
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()]
    assert max(row["expert_largest"] for row in rows) > 1.3
    assert rows[-1]["expert_largest"] <= most, [row["expert_largest"] for row in rows]
    assert not rows[-1]["experts_starved"]
