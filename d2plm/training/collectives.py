"""Collectives with gradients among the processes that share a packed row.

They are custom operators, so that a block that uses them compiles as one graph. A group is given by
its name, as an operator takes no process group.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

# As torch 2.13 and as earlier versions call them.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def group_name(mesh: DeviceMesh) -> str:
    """The name of the group of a mesh with one dimension."""
    return str(mesh.get_group().group_name)


def _group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]  # a str until torch 2.13


@torch.library.custom_op("d2plm::exchange", mutates_args=())
def exchange(x: Tensor, group: str) -> Tensor:
    """Send the r-th of equal parts of dimension 0 to rank r; returns what each rank sent here."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=_group(group))
    return out


@exchange.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("d2plm::gather_tokens", mutates_args=())
def gather_tokens(part: Tensor, group: str) -> Tensor:
    """The parts [n, …] of all ranks, in order → [ranks · n, …]; gradients are summed over them."""
    part = part.contiguous()
    out = part.new_empty(part.shape[0] * _group(group).size(), *part.shape[1:])
    _all_gather(out, part, group=_group(group))
    return out


@gather_tokens.register_fake
def _(part: Tensor, group: str) -> Tensor:
    return part.new_empty(part.shape[0] * _group(group).size(), *part.shape[1:])


@torch.library.custom_op("d2plm::scatter_sums", mutates_args=())
def scatter_sums(whole: Tensor, group: str) -> Tensor:
    """The sum over the ranks of [ranks · n, …], of which each rank receives its part [n, …]."""
    whole = whole.contiguous()
    out = whole.new_empty(whole.shape[0] // _group(group).size(), *whole.shape[1:])
    _reduce_scatter(out, whole, group=_group(group))
    return out


@scatter_sums.register_fake
def _(whole: Tensor, group: str) -> Tensor:
    return whole.new_empty(whole.shape[0] // _group(group).size(), *whole.shape[1:])


def _keep_group(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # torch's API
    ctx.group = inputs[1]


for _operator, _transpose in (
    (exchange, exchange),
    (gather_tokens, scatter_sums),
    (scatter_sums, gather_tokens),
):
    _operator.register_autograd(
        lambda ctx, grad, transpose=_transpose: (transpose(grad, ctx.group), None),
        setup_context=_keep_group,
    )
