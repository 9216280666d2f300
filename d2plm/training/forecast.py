"""Forecast of the memory that training needs on each rank, before anything is allocated.

Activations are counted, not estimated: the model's forward runs on the meta device, compiled if
training compiles, and the bytes that autograd keeps for the backward are added up. If rows are
shared, it is the forward of one rank, with its part of tokens, heads and matrices. The rest is
arithmetic over the parameters.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import DeviceMesh

from d2plm.model.dit import DiT, dit_without_memory
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.paradigm import CHUNK_LOGITS, LARGE_VOCABULARY
from d2plm.training.context_parallel import apply_context_parallel
from d2plm.training.expert_parallel import apply_expert_parallel
from d2plm.training.parallelise import checkpoint_activations
from d2plm.training.plan import Plan


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the moment of a step when their sum is largest.

    With tensor parallelism a rank's parameters are its parts of the split matrices and all others.

    Attributes:
        weights: this rank's shards of the masters.
        moments: AdamW's two; Muon keeps one per matrix, plus a step's directions.
        average: the EMA shadow.
        gradients: of this rank's shards in the masters' dtype; whole while micro-batches follow, as
            they are reduced with the last.
        gathered: whole parameters in the compute dtype and a block's whole gradients before
            reduction; without sharding, the cast copy of the model.
        activations: kept by autograd for a micro-batch, with its logits, and those that a block
            recomputes; none when the backward has ended.
    """

    weights: int
    moments: int
    average: int
    gradients: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        """The sum, without the framework's own memory and fragmentation."""
        return sum(vars(self).values())


def memory_per_rank(
    config: DiTConfig,
    plan: Plan,
    *,
    tokens: int,
    segments: int,
    dtype: torch.dtype,
    compile: bool = False,
    micro_batches: int = 1,
) -> Memory:
    """The memory that a step takes on each rank.

    During a backward, activations are freed as gradients are allocated, so the maximum is at its
    beginning or end. For a pipeline it is that of the first rank, with the embeddings and the head,
    whose activations wait longest. Experts are assumed to be equally loaded.

    Args:
        plan: resolved for its world size.
        tokens, segments: their numbers in a micro-batch, including padding.
        dtype: dtype of the matrix products.
        compile: whether the blocks are compiled, which keeps a third less of their activations.
        micro_batches: number of micro-batches in a step.
    """
    model = dit_without_memory(config)
    with _row_mesh(plan) as mesh:
        if mesh is not None:
            apply_context_parallel(model, mesh)
        # Of a pipeline's first stage, as many micro-batches as there are stages are kept.
        activations = _activations(
            model, plan, tokens=tokens, segments=segments, dtype=dtype, compile=compile
        )
    stage = -(-len(model.blocks) // plan.pipeline) / len(model.blocks)

    def kept_here() -> tuple[int, int]:
        """(number of this rank's parameters, number of them outside the blocks)."""
        blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
        outside = sum(parameter.numel() for parameter in model.parameters()) - blocks
        return outside + int(blocks * stage), outside

    shards, master = int(plan.shard) * plan.context, 8 if dtype == torch.float64 else 4
    own, low, several = -(-kept_here()[0] // shards), dtype.itemsize, micro_batches > 1
    if plan.expert > 1:  # each rank gathers only its own experts
        apply_expert_parallel(model, cast(DeviceMesh, _GroupSizes({"expert": plan.expert})))
    parameters, outside = kept_here()
    largest = max(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    if shards * plan.replicate * plan.tensor * plan.pipeline == 1:
        copy_bytes = 0 if low == master else parameters * low
        beginning = (own * master if several else 0, copy_bytes, activations)
        ends = [(own * master, copy_bytes, 0)]
    else:
        # Two blocks, as the next one is prefetched, and the parameters outside the blocks; without
        # resharding, all at once. A block's gradients are whole until they are reduced.
        ahead = (2 * largest + outside) * low
        reduced = largest * (low + master)
        kept = ahead if plan.reshard_after_forward else parameters * low
        beginning = (parameters * master if several else 0, kept, activations)
        ends = [(own * master, ahead + reduced, 0)]
        if several:
            between = ahead if plan.reshard_between_micro_batches else parameters * low
            ends.append((parameters * master, between, 0))
    gradients, gathered, held = max([beginning, *ends], key=sum)
    return Memory(
        weights=own * master,
        moments=2 * own * master,
        average=own * master,
        gradients=gradients,
        gathered=gathered,
        activations=held,
    )


@dataclass(frozen=True)
class _GroupSizes:
    """Mock of a mesh of processes of which this is the first; only its sizes are used."""

    sizes: dict[str, int]

    def __getitem__(self, dimension: str) -> "_GroupSizes":
        return _GroupSizes({dimension: self.sizes[dimension]})

    def size(self) -> int:
        return prod(self.sizes.values())

    def get_local_rank(self) -> int:
        return 0

    def get_group(self) -> "_GroupSizes":
        return self

    @property
    def group_name(self) -> str:
        return "forecast's " + ", ".join(self.sizes)


@contextmanager
def _row_mesh(plan: Plan) -> Iterator[DeviceMesh | None]:
    """A mesh for `apply_context_parallel` on the meta device; None if rows are not shared."""
    if plan.row_ranks == 1:
        yield None
        return
    mesh = _GroupSizes({"context": plan.context, "tensor": plan.tensor})
    groups = {
        mesh[dimension].group_name: dist.ProcessGroup(dist.HashStore(), 0, size)
        for dimension, size in mesh.sizes.items()
    }
    for name, group in groups.items():
        _register_process_group(name, group)  # type: ignore[arg-type]  # a str until torch 2.13
    try:
        yield cast(DeviceMesh, mesh)
    finally:
        for name in groups:
            _unregister_process_group(name)  # type: ignore[arg-type]  # the same


def _activations(model: DiT, plan: Plan, **sizes: Any) -> int:
    """The bytes kept of a forward, plus those that the backward of one block recomputes."""
    every = plan.activation_checkpointing
    # If the last block keeps its activations, they are freed before the first recomputation.
    if every == 0 or (len(model.blocks) - 1) % every:
        return activation_bytes(model, plan, **sizes)
    without = replace(plan, activation_checkpointing=0)
    whole = activation_bytes(copy.deepcopy(model), without, **sizes)
    kept = activation_bytes(model, plan, **sizes)
    return kept + (whole - kept) // len(list(model.blocks)[::every])


def activation_bytes(
    model: DiT, plan: Plan, *, tokens: int, segments: int, dtype: torch.dtype, compile: bool = False
) -> int:
    """Bytes that autograd keeps of one forward on the meta device, without parameters.

    The logits of a large vocabulary are those of a chunk of positions (`Paradigm.model_loss`), all
    assumed to be corrupted.
    """
    vocabulary = model.config.vocab_size
    chunked = vocabulary > LARGE_VOCABULARY and plan.row_ranks * plan.pipeline == 1

    def of_a_chunk(hidden_TD: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        corrupted_TD = hidden_TD.index_select(0, torch.arange(tokens, device="meta"))
        return project(corrupted_TD[: CHUNK_LOGITS // vocabulary])

    model = model.to(dtype).train()
    if compile:
        for block in model.blocks:
            # Without code generation, which does not change the saved activations.
            block.forward = torch.compile(  # type: ignore[method-assign]
                block.forward, fullgraph=True, backend="aot_eager_decomp_partition"
            )
    checkpoint_activations(model.blocks, plan.activation_checkpointing)
    # Blocks of all models share one code object, and there may be many forecasts.
    with counting_saved(model) as saved, torch._dynamo.config.patch(recompile_limit=256):
        logits = model(
            torch.empty(tokens, dtype=torch.uint8, device="meta"),
            torch.empty(segments + 1, dtype=torch.int32, device="meta"),
            tokens,
            torch.empty(segments, device="meta"),
            *((None, of_a_chunk) if chunked else ()),
        )
    return sum(saved.values()) + logits.numel() * (dtype.itemsize + 2 * 4)  # log p in fp32, twice


@contextmanager
def counting_saved(model: nn.Module) -> Iterator[dict[int, int]]:
    """Context manager: {storage: bytes} saved by autograd inside the block."""
    # A saved transpose is another tensor on the same storage.
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, int] = {}
    alive = []  # the address of a freed storage would be reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in saved:
            saved[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
