"""A sharded model's parameters as plain tensors, and back.

The optimizer, clipping and the moving average see each rank's own shards: on DTensors the fused
kernels leak or crawl. Checkpoints and exports see whole tensors again.
"""

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from d2plm.training.distributed import Process


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, in the same memory; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_shard(full: Tensor, like: Tensor) -> Tensor:
    """The part of a full tensor that this rank holds of `like`; nothing is sent."""
    if not isinstance(like, DTensor):
        return full
    mesh, placements = like.device_mesh, like.placements
    return cast(DTensor, distribute_tensor(full, mesh, placements, src_data_rank=None)).to_local()


def sharded_like(shard: Tensor, like: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """This rank's `shard` as the DTensor that `like` is, on `mesh` or that of `like`.

    It stays as it is where `like` is plain.
    """
    if not isinstance(like, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        mesh or like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),  # uneven shards would break its inference
    )


class LocalParameters:
    """A model's parameters as this rank's shards: plain tensors in the same memory, by name."""

    def __init__(self, model: nn.Module) -> None:
        self.sharded = dict(model.named_parameters())
        self.local: dict[str, nn.Parameter | Tensor] = {
            name: local(parameter.detach()).requires_grad_(parameter.requires_grad)
            if isinstance(parameter, DTensor)
            else parameter
            for name, parameter in self.sharded.items()
        }

    def take_gradients(self) -> list[Tensor]:
        """Assign each shard its gradient; returns all gradients."""
        for name, parameter in self.sharded.items():
            if isinstance(parameter, DTensor):
                grad = parameter.grad
                self.local[name].grad = None if grad is None else local(grad)
        return [tensor.grad for tensor in self.local.values() if tensor.grad is not None]

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for tensors in (self.sharded, self.local):
            for tensor in tensors.values():
                tensor.grad = None


def norms(groups: Iterable[list[Tensor]], process: Process) -> Tensor:
    """[G] on the device: the 2-norm of each group of shards over all ranks, by one reduction.

    Squared norms are summed over the ranks that share one copy.
    """
    # Stacked first: a kernel for all instead of one for each parameter.
    each = [torch.stack(torch._foreach_norm(g) if g else [torch.zeros(())]) for g in groups]
    on_device = [group.to(process.device, non_blocking=True) for group in each]
    total = torch.stack([group.square().sum() for group in on_device])
    if process.mesh is not None:
        dist.all_reduce(total, group=process.mesh.get_group("shard"))
    return total.sqrt()


def full_weights(model: nn.Module, process: Process) -> dict[str, Tensor] | None:
    """A copy of every parameter, whole, in the memory of rank 0's host; None on the other ranks.

    One parameter at a time is gathered, on all ranks.
    """
    weights = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if process.is_main:
            weights[name] = whole.to("cpu", copy=True)
    return weights if process.is_main else None
