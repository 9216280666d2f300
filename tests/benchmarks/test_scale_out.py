"""The calculation of many GPUs, against sums done by hand."""

import pytest
import torch

from benchmarks.scale_out import PEAK, Network, cost_of, row_seconds, step_of
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.model.flops import training_flops
from d2plm.training.plan import Plan

CONFIG = DiTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16)
NO_DELAY = Network(hop=0.0)


def parameters() -> int:
    with torch.device("meta"):
        return DiT(CONFIG).num_parameters()


def test_traffic_is_the_parameters_twice_and_the_gradients_once() -> None:
    step = step_of(CONFIG, shard=8, tokens=1000, network=NO_DELAY)
    assert step.volume == pytest.approx(7 / 8 * (2 * 2 + 4) * parameters())
    assert step.network_seconds == pytest.approx(step.volume / 450e9)


def test_a_hybrids_copies_sum_their_shards_over_the_adapters() -> None:
    alone = step_of(CONFIG, shard=8, tokens=1000, network=NO_DELAY)
    hybrid = step_of(CONFIG, shard=8, replicate=4, tokens=1000, network=NO_DELAY)
    sent = 2 * 3 / 4 * 4 * parameters() / 8
    assert hybrid.volume - alone.volume == pytest.approx(sent)
    extra = hybrid.network_seconds - alone.network_seconds
    assert extra == pytest.approx(sent / 50e9)


def test_at_the_tokens_to_hide_the_backwards_traffic_takes_as_long_as_its_compute() -> None:
    step = step_of(CONFIG, shard=8, tokens=1000, network=NO_DELAY)
    there = step_of(CONFIG, shard=8, tokens=round(step.tokens_to_hide), network=NO_DELAY)
    backward = there.volume * 3 / 4  # the parameters once, of two bytes, and the gradients of four
    assert backward / 450e9 == pytest.approx(there.compute_seconds * 2 / 3, rel=1e-3)
    # Without attention, modulation and embeddings it would be 1.5·F/W.
    assert step.tokens_to_hide == pytest.approx(1.5 * 0.5 * PEAK / 450e9, rel=0.2)


def test_the_traffic_of_a_shared_row_is_twelve_gatherings_or_six_exchanges_a_block() -> None:
    row = 24 * 4096 * 1024 * 2  # bytes of its hidden states, in all blocks
    tensor = row_seconds(CONFIG, tensor=4, tokens=4096, network=NO_DELAY)
    assert tensor == pytest.approx(12 * row * 3 / 4 / 450e9)
    context = row_seconds(CONFIG, context=4, tokens=4096, network=NO_DELAY)
    assert context == pytest.approx(3 * (3 + 1) * row / 4 * 3 / 4 / 450e9)
    both = row_seconds(CONFIG, tensor=2, context=2, tokens=4096, network=NO_DELAY)
    assert both == pytest.approx((12 * row / 2 / 2 + 12 * row / 4 / 2) / 450e9)


def test_exchanges_pass_each_gpu_s_own_adapter() -> None:
    assert NO_DELAY.exchange_seconds(1e9, 16) == pytest.approx(0.5 / 50)
    assert NO_DELAY.exchange_seconds(1e9, 8) == pytest.approx(7 / 8 / 450)
    # All GPUs of two machines: half of the volume comes through eight adapters of 50.
    assert NO_DELAY.collective_seconds(1e9, 16) == pytest.approx(15 / 16 / 450)
    assert NO_DELAY.collective_seconds(1e9, 1024) == pytest.approx((1 - 8 / 1024) / 400)


def test_a_step_waits_for_its_rows_and_for_what_parameters_exceed_their_compute() -> None:
    sizes = {"tokens": 16_384, "attended": 450.0, "network": NO_DELAY}
    assert cost_of(CONFIG, Plan(activation_checkpointing=1).resolved(8), **sizes)[1] == 0
    pipeline = Plan(pipeline=4, activation_checkpointing=1).resolved(32)
    staged = cost_of(CONFIG, pipeline, micro_batches=16, **sizes)
    assert staged[1] == pytest.approx(3 / 19)  # while the pipeline fills
    split = cost_of(CONFIG, Plan(tensor=8, activation_checkpointing=1).resolved(8), **sizes)
    waited = row_seconds(CONFIG, tensor=8, tokens=8 * 16_384, network=NO_DELAY)
    compute = training_flops(CONFIG, [450] * 36) / (450 * 36) * 16_384 * 4 / 3 / PEAK / 0.5
    assert split[1] == pytest.approx(waited / (waited + compute))
