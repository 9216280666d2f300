"""Sharding, compilation, recomputation and precision, applied to the model from outside.

FSDP2 (`fully_shard`) per block over a mesh of replicas × shards, on CUDA with NCCL or on a CPU with
gloo; a single process keeps the plain model.
"""

import logging
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint as recomputed

from d2plm.core.errors import first_line
from d2plm.model.experts import Experts
from d2plm.training.distributed import Process
from d2plm.training.plan import Plan

# Model FLOPs, minutes on two CPU cores: compiling takes about 20 s and saves a fifth of the time.
WORTH_COMPILING = 5e13

log = logging.getLogger(__name__)


def shard_model(
    model: nn.Module, blocks: nn.ModuleList, process: Process, plan: Plan, dtype: torch.dtype
) -> None:
    """Shard the parameters over the mesh; each block is gathered as a unit, with prefetching.

    Parameters stay fp32 masters and are gathered in `dtype`; gradients are averaged over the ranks
    in fp32 (fp64 parameters stay fp64 throughout).
    """
    assert process.mesh is not None
    low = dtype in (torch.bfloat16, torch.float16)
    shard = partial(
        fully_shard,
        mesh=process.mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype if low else None,
            reduce_dtype=torch.float32 if low else None,
            cast_forward_inputs=False,  # times stay fp32
        ),
        offload_policy=CPUOffloadPolicy() if plan.cpu_offload else OffloadPolicy(),
        reshard_after_forward=plan.reshard_after_forward,
    )
    for block in blocks:
        if process.expert_mesh is not None:
            for layer in [module for module in block.modules() if isinstance(module, Experts)]:
                shard(layer, mesh=process.expert_mesh)
        shard(block)
    shard(model, reshard_after_forward=False)
    units = [block for block in blocks if isinstance(block, FSDPModule)]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


def synchronise_gradients(model: nn.Module, last: bool, plan: Plan) -> None:
    """Before a micro-batch: gradients are reduced over the ranks only if it is the last."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or plan.reshard_between_micro_batches)


def reshard(model: nn.Module) -> None:
    """Free the parameters gathered by a forward without a backward, before shards change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def checkpoint_activations(blocks: nn.ModuleList, every: int) -> None:
    """Recompute the activations of every n-th block in the backward instead of keeping them."""
    if every:
        for block in list(blocks)[::every]:
            block.forward = partial(_recompute, block, block.forward)  # type: ignore[method-assign]


def _recompute(block: nn.Module, forward: Callable[..., Tensor], *inputs: object) -> Tensor:
    """`forward`, repeated in the backward with the present parameters.

    `in_precision` replaces them by cast ones, but only until the model's forward ends.
    """
    named: dict[str, Tensor] = dict(block.named_parameters())
    cast = {name: one for name, one in named.items() if not isinstance(one, nn.Parameter)}

    def with_cast(*inputs: object) -> Tensor:
        with _reparametrize_module(block, cast):
            return forward(*inputs)

    return recomputed(with_cast, *inputs, use_reentrant=False)


def is_to_compile(setting: bool | str, device: torch.device, flops: float) -> bool:
    """Whether to compile the blocks; arguments as for `compile_blocks`."""
    if setting == "auto":
        return device.type != "cpu" or flops >= WORTH_COMPILING
    return bool(setting)


def compile_blocks(
    blocks: nn.ModuleList, setting: bool | str, device: torch.device, flops: float
) -> bool:
    """Compile each block in place; returns whether it was compiled.

    Without a compiler and Python's headers a warning is logged and the blocks run uncompiled.

    Args:
        setting: `auto` compiles on CUDA, and on a CPU if the run is long enough to save time.
        flops: FLOPs of the whole run, not of the remaining steps, so that a resumed run is equal.
    """
    if not is_to_compile(setting, device, flops):
        return False
    try:
        torch.compile(lambda x: x + 1)(torch.ones(8, device=device))
    except Exception as error:  # the compilers have no common error class
        log.warning(
            "compile: running uncompiled, as the compiler fails here: %s", first_line(error)
        )
        return False
    for block in blocks:
        # Only the forward, so that FSDP's hooks stay outside.
        block.forward = torch.compile(block.forward, fullgraph=True)  # type: ignore[method-assign]
    return True


def in_precision(model: nn.Module, dtype: torch.dtype) -> Callable[..., Tensor]:
    """`model` with parameters cast to `dtype` at each call; the masters and gradients stay fp32."""
    if isinstance(model, FSDPModule) or all(p.dtype == dtype for p in model.parameters()):
        return model

    def forward(*inputs: object) -> Tensor:
        cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, cast, inputs)

    return forward
