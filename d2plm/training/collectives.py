"""Collectives with gradients among the processes that share a packed row: torch's functional ones.

A block that uses them compiles as one graph. A group is given by its name, as a graph takes no
process group.
"""

from typing import Any, cast

from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

# As torch 2.13 and as earlier versions call them.
_SUFFIX = "single" if hasattr(functional, "all_gather_single_autograd") else "tensor"
_all_gather: Any = getattr(functional, f"all_gather_{_SUFFIX}_autograd")
_reduce_scatter: Any = getattr(functional, f"reduce_scatter_{_SUFFIX}_autograd")
_all_to_all: Any = functional.all_to_all_single_autograd  # a group's name has its own type in 2.13


def group_name(mesh: DeviceMesh) -> str:
    """The name of the group of a mesh with one dimension."""
    return str(mesh.get_group().group_name)


def exchange(
    x: Tensor, group: str, received: list[int] | None = None, sent: list[int] | None = None
) -> Tensor:
    """Send `sent[r]` rows to each rank r and receive `received[r]` from it; None: equal parts."""
    return cast(Tensor, _all_to_all(x.contiguous(), received, sent, group))


def gather_tokens(part: Tensor, group: str) -> Tensor:
    """The parts [n, …] of all ranks, in order → [ranks · n, …]; gradients are summed over them."""
    return cast(Tensor, _all_gather(part.contiguous(), 0, group))


def scatter_sums(whole: Tensor, group: str) -> Tensor:
    """The sum over the ranks of [ranks · n, …], of which each rank receives its part [n, …]."""
    return cast(Tensor, _reduce_scatter(whole.contiguous(), "sum", 0, group))
