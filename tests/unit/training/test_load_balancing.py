"""Training a mixture of experts: balanced and watched. (Spread: test_covering_array.)"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from d2plm.core.batch import PackedBatch
from d2plm.data.loader import Collection
from d2plm.data.store import SequenceStore
from d2plm.model.dit_config import DiTConfig
from d2plm.model.experts import Router
from d2plm.settings.callbacks import MetricsSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.metric_logger import MetricLogger
from d2plm.training.trainer import Trainer
from tests.conftest import TINY_SIZES, Tokens, write_store
from tests.unit.training.conftest import Build

EXPERTS: dict[str, Any] = {"num_experts": 5, "experts_per_token": 2}


def balanced(trainer: Trainer) -> list[Router]:
    return [module for module in trainer.model.modules() if isinstance(module, Router)]


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


def test_a_bias_moves_by_the_sign_of_what_training_alone_counts(build: Build) -> None:
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


def test_the_bias_of_a_frozen_router_stays(build: Build) -> None:
    frozen = ["blocks.0.feed_forward.router.weight"]
    trainer = build(model=DiTConfig(**TINY_SIZES, **EXPERTS), freeze=frozen)
    trainer.train()
    first, second = balanced(trainer)
    assert first.bias is not None and second.bias is not None
    assert not first.bias.any() and second.bias.any()


def test_the_monitor_s_figures_are_those_of_the_loads(build: Build) -> None:
    class Zero(Callback):
        @torch.no_grad()
        def on_step_begin(self, trainer: Trainer) -> None:
            if trainer.step == 5:
                for router in balanced(trainer):
                    router.weight.zero_()

    config, loads = DiTConfig(**TINY_SIZES, num_experts=8), Loads()
    logger = MetricLogger(settings=MetricsSettings(every=5))
    trainer = build(Zero(), loads, logger, model=config)
    trainer.train()
    for row, steps in zip(trainer.history, (loads.steps[:5], loads.steps[5:]), strict=True):
        load = torch.stack([load for _, load, _ in steps]).sum(0).double()
        relative = load / load.mean(-1, keepdim=True)
        assert row["expert_largest"] == pytest.approx(float(relative.max()))
        assert row["experts_starved"] == int((relative < 0.1).sum())
        share = load / load.sum(-1, keepdim=True)
        entropy = torch.distributions.Categorical(probs=share).entropy()
        assert row["expert_entropy"] == pytest.approx(float(entropy.min() / np.log(8)))
        for layer in (0, 1):
            for expert in range(8):
                found = row[f"expert_load/blocks.{layer}.{expert}"]
                assert found == pytest.approx(float(relative[layer, expert]))
    # Of a router without weights, z is the squared logarithm of the number of experts.
    assert trainer.history[-1]["router_z"] == pytest.approx(np.log(8) ** 2)


@pytest.mark.thorough
def test_after_200_steps_on_proteins_no_expert_is_far_above_the_mean(
    build: Build, proteins: list[Tokens], tmp_path: Path
) -> None:
    store = write_store(tmp_path / "store", proteins[:2000])
    sizes = {**TINY_SIZES, "hidden_size": 32, "intermediate_size": 32}
    trainer = build(
        MetricLogger(settings=MetricsSettings(every=20)),
        model=DiTConfig(**sizes, num_experts=8, initial_gate=1.0),
        collections=[Collection(SequenceStore(store.path))],
        token_budget=1024,
        max_length=128,
        max_steps=200,
    )
    trainer.train()
    largest = [row["expert_largest"] for row in trainer.history]
    assert max(largest) > 1.3
    assert largest[-1] <= 1.2, largest
    assert not trainer.history[-1]["experts_starved"]
