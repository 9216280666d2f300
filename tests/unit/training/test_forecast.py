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
    ("options", "dtype", "every", "backend"),
    [
        ({}, torch.float32, 2, None),
        (LLAMA, torch.bfloat16, 1, None),
        # This backend divides graphs as Inductor does, and needs no compiler of C++.
        ({}, torch.bfloat16, 0, "aot_eager_decomp_partition"),
    ],
    ids=["own in fp32", "llama", "compiled"],
)
def test_activations_are_what_is_kept(
    options: dict[str, Any], dtype: torch.dtype, every: int, backend: str | None
) -> None:
    config = DiTConfig(**{**TINY_SIZES, **options})
    model = DiT(config)
    model.initialise(0)
    model.to(dtype).train()
    checkpoint_activations(model.blocks, every)
    for block in model.blocks if backend else ():
        block.forward = torch.compile(  # type: ignore[method-assign]
            block.forward, fullgraph=True, backend=backend
        )
    bounds = torch.linspace(0, TOKENS, SEGMENTS + 1).int()
    tokens = torch.randint(4, 24, (TOKENS,), dtype=torch.uint8)
    with counting_saved(model) as saved:
        logits = model(tokens, bounds, TOKENS, torch.rand(SEGMENTS))
    torch._dynamo.reset()
    sizes = {"tokens": TOKENS, "segments": SEGMENTS, "dtype": dtype, "compile": bool(backend)}
    with torch.device("meta"):
        foretold = activation_bytes(DiT(config), Plan(activation_checkpointing=every), **sizes)
    kept = sum(saved.values()) + logits.numel() * (dtype.itemsize + 8)
    assert foretold == pytest.approx(kept, rel=0.05)


def test_state_is_sharded_and_copies_are_not() -> None:
    config = DiTConfig(**{**TINY_SIZES, "num_hidden_layers": 6})
    parameters = DiT(config).num_parameters()
    sizes = {"tokens": 64, "segments": 2, "dtype": torch.bfloat16}
    alone = memory_per_rank(config, Plan().resolved(1), **sizes)
    assert alone.weights == alone.average == alone.moments / 2 == 4 * parameters
    assert (alone.gathered, alone.gradients) == (2 * parameters, 0)
    hybrid = memory_per_rank(config, Plan(replicate=2).resolved(4), **sizes, micro_batches=2)
    assert hybrid.weights == pytest.approx(alone.weights / 2, abs=4)
    assert hybrid.activations == alone.activations
    # Those of a sharded model are whole until the step's last micro-batch.
    assert hybrid.gradients == 4 * parameters
    assert alone.total == sum(vars(alone).values())


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


def test_a_rank_of_a_pipeline_has_its_blocks_and_a_part_of_several_micro_batches() -> None:
    config = DiTConfig(**{**TINY_SIZES, "num_hidden_layers": 8})
    sizes = {"tokens": 4096, "segments": 8, "dtype": torch.bfloat16, "micro_batches": 8}
    model = DiT(config)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    outside = model.num_parameters() - 8 * block
    whole = memory_per_rank(config, Plan().resolved(1), **sizes)
    found = memory_per_rank(config, Plan(pipeline=4).resolved(4), **sizes)
    assert found.weights == 4 * (outside + 2 * block)
    assert found.activations == whole.activations  # a quarter of each of four micro-batches


def test_ranks_that_share_experts_gather_only_their_own() -> None:
    config = DiTConfig(**{**TINY_SIZES, "num_hidden_layers": 6, "num_experts": 4})
    sizes = {"tokens": 64, "segments": 2, "dtype": torch.bfloat16}
    every, half = (memory_per_rank(config, Plan(expert=n).resolved(4), **sizes) for n in (1, 2))
    experts = sum(p.numel() for p in DiT(config).blocks[0].feed_forward.experts.parameters())
    assert half.weights == every.weights
    # At the backward's beginning two blocks are gathered, in two bytes a parameter.
    assert every.gathered - half.gathered == pytest.approx(2 * 2 * experts / 2)
