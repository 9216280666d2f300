"""What a training would take, before anything is allocated: steps, FLOPs and memory of a rank.

The activations are not estimated: the model's forward runs on the meta device, compiled where
training compiles, and what autograd keeps of it for the backward is counted. The rest is arithmetic
over the parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from d2plm.model.config import DiTConfig
from d2plm.model.dit import DiT
from d2plm.training.parallelise import checkpoint_activations
from d2plm.training.plan import Plan


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its peak, in the backward of a micro-batch.

    Attributes:
        weights: this rank's shards of the masters.
        moments: AdamW's two.
        average: the EMA shadow.
        gradients: of this rank's shards, in the masters' dtype.
        gathered: parameters in the compute dtype, whole, and whole gradients before they are
            reduced; without sharding, the cast copy of the model.
        activations: what autograd keeps of a micro-batch's forward, with its logits.
    """

    weights: int
    moments: int
    average: int
    gradients: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        """Their sum; the framework's own and fragmentation come on top."""
        return sum(vars(self).values())


def memory_per_rank(
    config: DiTConfig,
    plan: Plan,
    *,
    tokens: int,
    segments: int,
    dtype: torch.dtype,
    compile: bool = False,
) -> Memory:
    """The memory that a step takes on each rank.

    Args:
        plan: resolved for its world size.
        tokens: of a micro-batch, padding included; `segments` in it, likewise.
        dtype: of the matrix work.
        compile: whether the blocks are compiled, which keeps a third less of their activations.
    """
    with torch.device("meta"):
        model = DiT(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    largest = max(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    outside = parameters - sum(p.numel() for p in model.blocks.parameters())
    shard, master = int(plan.shard), 8 if dtype == torch.float64 else 4
    own, low = -(-parameters // shard), dtype.itemsize
    if shard * plan.replicate == 1:
        gathered = 0 if low == master else parameters * low
    else:
        # Two blocks, as the next is gathered ahead, the parameters outside the blocks, and one
        # block's whole gradients; without resharding all of them at once.
        held = 2 * largest + outside if plan.reshard_after_forward else parameters
        gathered = held * low + largest * low
        if not plan.reshard_between_micro_batches:
            gathered += parameters * master  # whole gradients between micro-batches
    return Memory(
        weights=own * master,
        moments=2 * own * master,
        average=own * master,
        gradients=own * master,
        gathered=gathered,
        activations=activation_bytes(
            model, plan, tokens=tokens, segments=segments, dtype=dtype, compile=compile
        ),
    )


def activation_bytes(
    model: DiT,
    plan: Plan,
    *,
    tokens: int,
    segments: int,
    dtype: torch.dtype,
    compile: bool = False,
) -> int:
    """Bytes that autograd keeps of one forward, parameters left out; the model is on meta."""
    model = model.to(dtype).train()
    if compile:
        for block in model.blocks:
            # Without the code generation, which does not change what is kept.
            block.forward = torch.compile(  # type: ignore[method-assign]
                block.forward, fullgraph=True, backend="aot_eager_decomp_partition"
            )
    checkpoint_activations(model.blocks, plan.activation_checkpointing)
    with counting_saved(model) as saved:
        logits = model(
            torch.empty(tokens, dtype=torch.uint8, device="meta"),
            torch.empty(segments + 1, dtype=torch.int32, device="meta"),
            tokens,
            torch.empty(segments, device="meta"),
        )
    return sum(saved.values()) + logits.numel() * (dtype.itemsize + 2 * 4)  # log p in fp32, twice


@contextmanager
def counting_saved(model: nn.Module) -> Iterator[dict[int, int]]:
    """{storage: bytes} of what autograd saves inside the block, each storage once."""
    # A matrix is saved as its transpose, another tensor on the same storage.
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, int] = {}
    alive = []  # a freed storage's number would be given again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in saved:
            saved[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
