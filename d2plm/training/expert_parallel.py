"""Expert parallelism: each rank of a group holds some of the experts, and tokens travel to them.

The ranks of a group are neighbours among those that shard a copy, so that all else is sharded over
them as before. Rows are sent to the experts' ranks and back by all-to-all exchanges of as many rows
as were routed (Lepikhin et al., arXiv:2006.16668, without their limit of an expert's capacity).
Their numbers are read by the host: a device is waited for twice in every such layer.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from d2plm.model.dit import DiT
from d2plm.model.experts import Experts
from d2plm.training.collectives import exchange, group_name
from d2plm.training.tensor_parallel import Split


def apply_expert_parallel(model: DiT, mesh: DeviceMesh) -> None:
    """Leave every layer of experts those of this rank of `mesh`, the ranks of an expert group."""
    for module in list(model.modules()):
        if isinstance(module, Experts):
            split = Split(0, 1, mesh)
            for name, weight in list(module.named_parameters()):
                part = nn.Parameter(split.of(weight.detach()), weight.requires_grad)
                setattr(module, name, part)
            module.split = split  # type: ignore[assignment]  # see `splits_of`
            module.forward = partial(exchanged_experts, module.forward, mesh)  # type: ignore[method-assign]


def exchanged_experts(
    experts: Callable[[Tensor, Tensor], Tensor], mesh: DeviceMesh, rows_ND: Tensor, ends_E: Tensor
) -> Tensor:
    """The outputs of all experts, of which `experts` computes those of this rank.

    Args:
        experts: (rows sorted by expert, where each expert's end) → their outputs.
        rows_ND: this rank's rows, sorted by expert; int32 `ends_E` over the experts of all ranks.
    """
    ranks, group = mesh.size(), group_name(mesh)
    sent = ends_E.diff(prepend=ends_E.new_zeros(1)).view(ranks, -1)  # [rank, its expert]
    received = exchange(sent, group)
    there, here = sent.sum(1).tolist(), received.sum(1).tolist()
    arrived = exchange(rows_ND, group, here, there)
    expert = torch.arange(sent.shape[1], device=sent.device).repeat(ranks)
    order = expert.repeat_interleave(received.flatten()).argsort(stable=True)
    done = experts(arrived[order], received.sum(0).cumsum(0).to(torch.int32))
    return exchange(done[order.argsort()], group, there, here)
