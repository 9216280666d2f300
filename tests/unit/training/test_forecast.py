"""The memory forecast, computed on the meta device, against the memory that training uses."""

from typing import Any

import pytest
import torch

from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.training.forecast import activation_bytes, counting_saved, memory_per_rank
from d2plm.training.parallelise import checkpoint_activations
from d2plm.training.plan import Plan
from tests.conftest import LLAMA, TINY_SIZES

TOKENS, SEGMENTS = 96, 5


@pytest.mark.parametrize(
    ("options", "dtype", "every"),
    [({}, torch.float32, 2), ({}, torch.bfloat16, 0), (LLAMA, torch.bfloat16, 1)],
    ids=["own in fp32", "own", "llama"],
)
def test_the_activations_are_those_that_a_forward_keeps(
    options: dict[str, Any], dtype: torch.dtype, every: int
) -> None:
    plan = Plan(activation_checkpointing=every)
    config = DiTConfig(**{**TINY_SIZES, **options})
    model = DiT(config)
    model.initialise(0)
    model.to(dtype).train()
    checkpoint_activations(model.blocks, every)
    bounds = torch.linspace(0, TOKENS, SEGMENTS + 1).int()
    tokens = torch.randint(4, 24, (TOKENS,), dtype=torch.uint8)
    with counting_saved(model) as saved:
        logits = model(tokens, bounds, TOKENS, torch.rand(SEGMENTS))
    with torch.device("meta"):
        foretold = DiT(config)
    expected = sum(saved.values()) + logits.numel() * (dtype.itemsize + 8)
    found = activation_bytes(foretold, plan, tokens=TOKENS, segments=SEGMENTS, dtype=dtype)
    assert found == pytest.approx(expected, rel=0.05)


def test_recomputation_leaves_the_blocks_inputs_alone() -> None:
    config = DiTConfig(**{**TINY_SIZES, "num_hidden_layers": 6})
    sizes = {"tokens": 4096, "segments": 8, "dtype": torch.bfloat16}
    whole, half, least = (
        memory_per_rank(config, Plan(activation_checkpointing=every).resolved(1), **sizes)
        for every in (0, 2, 1)
    )
    assert whole.activations > half.activations > least.activations
    assert whole.weights == least.weights


def test_state_is_sharded_and_copies_are_not() -> None:
    config = DiTConfig(**{**TINY_SIZES, "num_hidden_layers": 6})
    parameters = DiT(config).num_parameters()
    sizes = {"tokens": 64, "segments": 2, "dtype": torch.bfloat16}
    alone = memory_per_rank(config, Plan().resolved(1), **sizes)
    assert alone.weights == alone.average == 4 * parameters
    assert alone.moments == 8 * parameters
    assert alone.gathered == 2 * parameters
    four = memory_per_rank(config, Plan().resolved(4), **sizes)
    assert four.weights == pytest.approx(alone.weights / 4, abs=4)
    hybrid = memory_per_rank(config, Plan(replicate=2).resolved(4), **sizes)
    assert hybrid.weights == pytest.approx(alone.weights / 2, abs=4)
    assert hybrid.activations == four.activations == alone.activations
    assert alone.total == sum(vars(alone).values())
    kept = memory_per_rank(config, Plan(reshard_after_forward=False).resolved(4), **sizes)
    assert kept.gathered > four.gathered


def test_gradients_count_where_they_outweigh_the_activations_or_are_kept_for_the_next() -> None:
    config = DiTConfig(**{**TINY_SIZES, "num_hidden_layers": 6})
    parameters = DiT(config).num_parameters()
    many = {"tokens": 64, "segments": 2, "dtype": torch.bfloat16}
    few = {**many, "tokens": 2, "segments": 1}
    alone, two = Plan().resolved(1), Plan().resolved(2)
    assert memory_per_rank(config, alone, **many).gradients == 0
    assert memory_per_rank(config, alone, **few).gradients == 4 * parameters
    assert memory_per_rank(config, alone, **few).activations == 0
    assert memory_per_rank(config, alone, **many, micro_batches=2).gradients == 4 * parameters
    # Those of a sharded model are whole until the step's last micro-batch.
    assert memory_per_rank(config, two, **many, micro_batches=2).gradients == 4 * parameters


def test_compiled_blocks_keep_what_is_foretold() -> None:
    config = DiTConfig(**TINY_SIZES)
    model = DiT(config)
    model.initialise(0)
    model.to(torch.bfloat16).train()
    for block in model.blocks:
        block.forward = torch.compile(  # type: ignore[method-assign]
            block.forward, fullgraph=True, backend="aot_eager_decomp_partition"
        )
    bounds = torch.linspace(0, TOKENS, SEGMENTS + 1).int()
    tokens = torch.randint(4, 24, (TOKENS,), dtype=torch.uint8)
    with counting_saved(model) as saved:
        logits = model(tokens, bounds, TOKENS, torch.rand(SEGMENTS))
    torch._dynamo.reset()
    sizes = {"tokens": TOKENS, "segments": SEGMENTS, "dtype": torch.bfloat16}
    with torch.device("meta"):
        eager, compiled = DiT(config), DiT(config)
    found = activation_bytes(compiled, Plan(), **sizes, compile=True)
    assert found == pytest.approx(sum(saved.values()) + logits.numel() * 10, rel=0.05)
    assert found < 0.9 * activation_bytes(eager, Plan(), **sizes)


LONG = DiTConfig(**{**TINY_SIZES, "num_attention_heads": 4, "num_hidden_layers": 6})


def test_a_protein_of_16_k_tokens_takes_a_quarter_of_the_activations_under_context_4() -> None:
    config = DiTConfig(  # 150 M parameters
        hidden_size=640,
        num_hidden_layers=30,
        num_attention_heads=20,
        intermediate_size=1728,
        max_position_embeddings=16_384,
    )
    sizes = {"tokens": 16_384, "segments": 1, "dtype": torch.bfloat16}
    alone = memory_per_rank(config, Plan().resolved(1), **sizes)
    shared = memory_per_rank(config, Plan(context=4).resolved(4), **sizes)
    # The exchange leaves a copy of the values and of the attention's output, and logits are whole.
    print(f"{shared.activations / alone.activations:.1%}")  # in docs/training.md
    assert 0.25 < shared.activations / alone.activations < 0.275


def test_tensor_parallelism_splits_matrices_and_the_rest_is_on_every_rank() -> None:
    sizes = {"tokens": 64, "segments": 2, "dtype": torch.bfloat16}
    parameters = DiT(LONG).num_parameters()
    matrices = sum(
        p.numel() for n, p in DiT(LONG).named_parameters() if "proj" in n and "head" not in n
    )
    two = memory_per_rank(LONG, Plan(tensor=2).resolved(2), **sizes)
    assert two.weights == 4 * (parameters - matrices // 2)
    both = memory_per_rank(LONG, Plan(tensor=2, context=2).resolved(8), **sizes)
    assert both.weights == pytest.approx(two.weights / 4, abs=4)  # two shards × two of a context


def test_a_rank_of_a_pipeline_has_its_blocks_and_the_activations_of_all_ranks_micro_batches() -> (
    None
):
    config = DiTConfig(**{**TINY_SIZES, "num_hidden_layers": 8})
    sizes = {"tokens": 4096, "segments": 8, "dtype": torch.bfloat16, "micro_batches": 8}
    model = DiT(config)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    outside = model.num_parameters() - 8 * block
    whole = memory_per_rank(config, Plan().resolved(1), **sizes)
    for plan, waiting in (
        (Plan(pipeline=4), 4),
        (Plan(pipeline=4, pipeline_stages_per_rank=2), 11),
    ):
        found = memory_per_rank(config, plan.resolved(4), **sizes)
        assert found.weights == 4 * (outside + 2 * block)
        assert found.activations == pytest.approx(
            whole.activations * waiting / plan.stages, rel=1e-6
        )


def test_ranks_that_share_experts_gather_only_their_own() -> None:
    config = DiTConfig(**{**TINY_SIZES, "num_hidden_layers": 6, "num_experts": 4})
    sizes = {"tokens": 64, "segments": 2, "dtype": torch.bfloat16}
    all_of_them, half = (
        memory_per_rank(config, Plan(expert=expert).resolved(4), **sizes) for expert in (1, 2)
    )
    experts = sum(
        parameter.numel() for parameter in DiT(config).blocks[0].feed_forward.experts.parameters()
    )
    assert half.weights == all_of_them.weights
    # At the backward's beginning two blocks are gathered, in two bytes a parameter.
    assert all_of_them.gathered - half.gathered == pytest.approx(2 * 2 * experts / 2)
