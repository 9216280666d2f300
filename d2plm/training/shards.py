"""A sharded model's parameters as plain tensors, and back.

Optimizer, clipping and moving average use each rank's own shards, because fused kernels leak or are
slow on DTensors. Checkpoints and exports use whole tensors.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from d2plm.training.distributed import Process
from d2plm.training.tensor_parallel import Split, SplitShard, splits_of

Shard = Tensor | SplitShard  # a tensor of a checkpoint


def local(tensor: Shard) -> Tensor:
    """This rank's shard of a tensor, in the same memory; a plain tensor is returned unchanged."""
    if isinstance(tensor, SplitShard):
        return tensor.shard
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_shard(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a full tensor, sharded as `like`, without communication."""
    if not isinstance(like, DTensor):
        return full
    mesh, placements = like.device_mesh, like.placements
    return cast(DTensor, distribute_tensor(full, mesh, placements, src_data_rank=None)).to_local()


def sharded_like(shard: Tensor, like: Shard, mesh: DeviceMesh | None = None) -> Shard:
    """This rank's `shard` with the type of `like`, on `mesh` or the mesh of `like`."""
    if isinstance(like, SplitShard):
        return like.like(shard)
    if not isinstance(like, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        mesh or like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),  # cannot be inferred from uneven shards
    )


class LocalParameters:
    """A model's parameters as this rank's shards: plain tensors in the same memory, by name.

    Attributes:
        sharded: the parameters of the model.
        local: this rank's shards of them.
        splits: parameters that are split over a tensor group.
        expert_splits: parameters that are split over an expert group.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sharded, splits = dict(model.named_parameters()), splits_of(model)
        self.splits = {name: split for name, split in splits.items() if not split.is_of_experts}
        self.expert_splits = {name: s for name, s in splits.items() if s.is_of_experts}
        self.local: dict[str, nn.Parameter | Tensor] = {
            name: local(parameter.detach()).requires_grad_(parameter.requires_grad)
            if isinstance(parameter, DTensor)
            else parameter
            for name, parameter in self.sharded.items()
        }

    def stored(self) -> dict[str, Shard]:
        """The parameters by name, as stored in a checkpoint."""
        stored: dict[str, Shard] = dict(self.sharded)
        for name, split in (self.splits | self.expert_splits).items():
            part, shard = cast(DTensor, self.sharded[name]), self.local[name].detach()
            rank, ranks = part.device_mesh.get_local_rank("shard"), part.device_mesh["shard"].size()
            rows = -(-part.shape[0] // ranks)
            stored[name] = SplitShard(shard, split, min(rank * rows, part.shape[0]), part.shape)
        return stored

    def take_gradients(self) -> dict[str, Tensor]:
        """Assign each shard its gradient; returns all gradients by name.

        Gradients of parameters common to a tensor group are summed over it, as each rank has those
        of its own tokens. An expert's gradients, from the tokens of all ranks of its group, are
        averaged over fewer ranks than all others.
        """
        for name, parameter in self.sharded.items():
            if isinstance(parameter, DTensor):
                grad = parameter.grad
                self.local[name].grad = None if grad is None else local(grad)
        own = ((name, tensor.grad) for name, tensor in self.local.items())
        gradients = {name: grad for name, grad in own if grad is not None}
        if experts := [gradients[name] for name in self.expert_splits if name in gradients]:
            ranks = next(iter(self.expert_splits.values())).mesh.size()
            torch._foreach_div_(experts, float(ranks))
        common = [grad for name, grad in gradients.items() if name not in self.splits]
        if self.splits and common:
            group = next(iter(self.splits.values())).mesh.get_group()
            flat = torch.cat([grad.flatten() for grad in common])
            dist.all_reduce(flat, group=group)
            summed = flat.split([grad.numel() for grad in common])
            torch._foreach_copy_(
                common, [s.view_as(g) for s, g in zip(summed, common, strict=True)]
            )
        return gradients

    def drop_gradients(self) -> None:
        for tensors in (self.sharded, self.local):
            for tensor in tensors.values():
                tensor.grad = None


def norms(
    groups: Iterable[Mapping[str, Tensor]], process: Process, splits: Mapping[str, Split]
) -> Tensor:
    """[G] on the device: the 2-norm of each group of shards over all ranks, in one reduction.

    Squared norms are summed over the ranks that share one copy, and over the stages of a pipeline,
    which must have the same groups.

    Args:
        groups: shards by the parameter's name.
        splits: the parameters that are split over a tensor group.
    """
    groups = list(groups)

    def squares(chosen: Callable[[str], bool]) -> Tensor:
        """[G] over the shards of this rank whose names are `chosen`."""
        own = [[shard for name, shard in group.items() if chosen(name)] for group in groups]
        # Stacked first: one kernel instead of one per parameter.
        each = [torch.stack(torch._foreach_norm(g) if g else [torch.zeros(())]) for g in own]
        on_device = [group.to(process.device, non_blocking=True) for group in each]
        return torch.stack([group.square().sum() for group in on_device])

    total = squares(lambda name: name not in splits)
    if splits:
        of_parts = squares(lambda name: name in splits)
        dist.all_reduce(of_parts, group=next(iter(splits.values())).mesh.get_group())
        total = total + of_parts
    if process.mesh is not None:
        dist.all_reduce(total, group=process.mesh.get_group("shard"))
    return process.sum_stages(total).sqrt()


def full_weights(model: nn.Module, process: Process) -> dict[str, Tensor] | None:
    """A copy of every whole parameter in rank 0's host memory; None on the other ranks.

    Parameters are gathered one at a time on all ranks of a stage, and sent by its first rank.
    """
    splits, ranks = splits_of(model), process.world_size // process.pipeline_ranks
    weights: dict[str, Tensor] = {}
    shapes = [
        (name, splits[name].whole_shape(p.shape) if name in splits else p.shape, p.dtype)
        for name, p in model.named_parameters()
    ]
    of_stages = process.on_all(lambda: shapes)[::ranks]
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if name in splits:
            whole = splits[name].join(whole)
        if process.is_main:
            weights[name] = whole.to("cpu", copy=True)
        elif process.rank % ranks == 0:
            dist.send(whole.cpu(), 0)
    for stage, content in enumerate(of_stages if process.is_main else ()):
        for name, shape, dtype in content if stage else ():
            dist.recv(weights.setdefault(name, torch.empty(shape, dtype=dtype)), stage * ranks)
    return weights if process.is_main else None
