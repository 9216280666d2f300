"""Muon: the matrices of the blocks use orthogonalised momentum, all other parameters AdamW.

The momentum of a matrix is replaced by an approximation of the closest matrix with orthonormal rows
or columns, so that no direction of the matrix is neglected (Jordan et al.,
kellerjordan.github.io/posts/muon, 2024). The step is scaled to AdamW's root mean square (Liu et
al., arXiv:2502.16982, section 2.2), so that both share one learning rate.

Orthogonalisation needs whole matrices. If parameters are sharded, each rank gathers its share of
the matrices, orthogonalises them and returns the rows: two all-to-all exchanges, with no matrix
computed twice among the ranks that share one copy.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from d2plm.core.precision import resolve_precision
from d2plm.model.dit import DiT
from d2plm.settings.training import MuonSettings
from d2plm.training.optimizer import adamw_keywords, decayed_and_kept
from d2plm.training.tensor_parallel import Split, splits_of

# Five iterations of x ← a·x + (b·xxᵀ + c·(xxᵀ)²)·x map singular values 0.003 … 1 to 0.68 … 1.21.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-12  # avoids division by zero
ADAMW_RMS = 0.2  # typical root mean square of AdamW's steps at a learning rate of 1


def build_muon(
    model: DiT, parameters: Mapping[str, Tensor] | None = None, settings: MuonSettings | None = None
) -> "Muon":
    """Muon for the matrices of `model.blocks` and AdamW for all other trainable parameters.

    A learning rate is meant to transfer across widths (Yang et al., arXiv:2203.03466): the output
    of a matrix should change equally per step at every width. With m = `base_width` ÷ the input
    width of a matrix (hidden states or time embedding), Muon's steps, which would grow with the
    square root of the width, are multiplied by √m, and the rate of AdamW's matrices by m, and with
    it their decay.

    Args:
        model: has the widths `config.hidden_size` and `config.time_embedding_dim`.
        parameters: this rank's shards by name, updated instead of the model's parameters.
    """
    settings = settings or MuonSettings()
    learning_rate, base_width = settings.learning_rate, settings.base_width
    decayed, kept = decayed_and_kept(model)
    named, splits = dict(model.named_parameters()), splits_of(model)
    matrices = [name for name in decayed if name.startswith("blocks.")]
    rest = [name for name in decayed if name not in matrices]
    of_relatives = [name for name in rest if name.startswith("relatives.")]
    of_hidden = [n for n in rest if n.startswith("head.") and ".modulation." not in n]
    of_time = [name for name in rest if name not in {*of_relatives, *of_hidden}]

    def tensors(names: Iterable[str]) -> list[Tensor]:
        return [named[name] if parameters is None else parameters[name] for name in names]

    def narrower(width: int | None) -> float:
        return 1.0 if base_width is None or width is None else base_width / width

    hidden, time = narrower(model.config.hidden_size), narrower(model.config.time_embedding_dim)
    return Muon(
        tensors(matrices),
        [
            # Every rank has whole matrices of a stack, even if it is split.
            Sharding.of(named[name], splits.get(name) if named[name].ndim == 2 else None)
            for name in matrices
        ],
        [(time if ".modulation." in name else hidden) ** 0.5 for name in matrices],
        [
            {"params": tensors(of_hidden), "lr": learning_rate * hidden},
            {"params": tensors(of_time), "lr": learning_rate * time},
            {"params": tensors(kept), "weight_decay": 0.0},
            # Their input width does not depend on the model.
            *([{"params": tensors(of_relatives)}] if of_relatives else []),
        ],
        momentum=settings.momentum,
        **adamw_keywords(settings),
    )


class Muon(AdamW):
    """Matrices by Muon with Nesterov momentum, the groups of other parameters by AdamW.

    Args:
        matrices: plain tensors, this rank's shards of matrices or stacks of them.
        factors: step-size multiplier of each matrix.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        shardings: "Sequence[Sharding]",
        factors: Sequence[float],
        others: Sequence[dict[str, Any]],
        *,
        momentum: float,
        **settings: Any,
    ) -> None:
        super().__init__([{"params": list(matrices), "momentum": momentum}, *others], **settings)
        self._shardings = list(shardings)
        self._sizes = [
            ADAMW_RMS * max(sharding.whole) ** 0.5 * factor
            for sharding, factor in zip(shardings, factors, strict=True)
        ]
        self._dtype = product_dtype(shardings)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("_shardings", "_sizes", "_dtype")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)  # AdamW's expects a step count per parameter

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the value of `closure`, if any."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        everything = self.param_groups
        self._move_matrices(everything[0])
        self.param_groups = everything[1:]
        try:
            super().step()
        finally:
            self.param_groups = everything
        return loss

    def _move_matrices(self, group: dict[str, Any]) -> None:
        everything = zip(group["params"], self._shardings, self._sizes, strict=True)
        moved = [each for each in everything if each[0].grad is not None]
        if not moved:
            return
        matrices, shardings, sizes = (list(column) for column in zip(*moved, strict=True))
        grads, buffers = [matrix.grad for matrix in matrices], self._momenta(matrices)
        rate, decay = group["lr"], group["lr"] * group["weight_decay"]
        overflow = getattr(self, "found_inf", None)  # as for torch's fused optimizers
        if overflow is not None:  # momenta and matrices do not change
            overflow = overflow.to(buffers[0].device)
            grads = [grad.where(overflow == 0, b) for grad, b in zip(grads, buffers, strict=True)]
            decay = decay * (1 - overflow)
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        directions = torch._foreach_lerp(grads, buffers, group["momentum"])
        updates = orthogonalise_shards(directions, shardings, self._dtype)
        torch._foreach_mul_(updates, sizes)
        if overflow is not None:
            torch._foreach_mul_(updates, 1 - overflow)
        torch._foreach_mul_(matrices, 1 - decay)
        torch._foreach_sub_(matrices, updates, alpha=rate)

    def _momenta(self, matrices: Iterable[Tensor]) -> list[Tensor]:
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        return [self.state[matrix]["momentum_buffer"] for matrix in matrices]


@dataclass(frozen=True)
class Sharding:
    """The distribution of a matrix over the ranks: by rows, as in FSDP2.

    A stack of matrices (experts) is distributed by matrices.

    Attributes:
        shape: rows and columns of the matrix, of its split part, or of each matrix of a stack.
        device: device on which it is orthogonalised.
        group: the ranks that share it; None if this rank has all of it.
        split: its split over a tensor group, each rank of which orthogonalises it.
    """

    shape: tuple[int, int]
    device: torch.device
    group: dist.ProcessGroup | None
    split: Split | None = None

    @classmethod
    def of(cls, parameter: Tensor, split: Split | None = None) -> "Sharding":
        shape = cast(tuple[int, int], tuple(parameter.shape[-2:]))
        if not isinstance(parameter, DTensor):
            return cls(shape, parameter.device, None)
        mesh = parameter.device_mesh
        device = torch.device(mesh.device_type, parameter.device.index)
        return cls(shape, device, mesh.get_group("shard") if parameter.ndim == 2 else None, split)

    @property
    def whole(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        shape = torch.Size(self.shape)
        return cast(tuple[int, int], self.split.whole_shape(shape) if self.split else self.shape)

    @property
    def cost(self) -> int:
        """Floating-point operations of the orthogonalisation, up to a factor."""
        short, long = sorted(self.whole)
        return short * short * (2 * long + short)

    def shard(self, rank: int) -> tuple[int, int]:
        """Rows and columns held by `rank` of the group."""
        assert self.group is not None
        rows = -(-self.shape[0] // self.group.size())
        return min(max(self.shape[0] - rank * rows, 0), rows), self.shape[1]


def product_dtype(shardings: Sequence[Sharding]) -> torch.dtype:
    """The dtype of the products: bf16 if every rank's hardware has instructions for it."""
    fast = not shardings or resolve_precision("auto", shardings[0].device) == torch.bfloat16
    if dist.is_initialized():  # all ranks take part, even a pipeline stage without matrices
        everywhere = torch.tensor(int(fast))  # on the host, for any device
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        fast = bool(everywhere)
    return torch.bfloat16 if fast else torch.float32


def orthogonalise_shards(
    shards: Sequence[Tensor], shardings: Sequence[Sharding], dtype: torch.dtype
) -> list[Tensor]:
    """This rank's rows of each orthogonalised matrix, from its rows of the matrices.

    Args:
        shards: [rows of this rank, columns] of each matrix, or the matrices of a stack held here.
        dtype: dtype of the products and messages, unless the shards are fp64.
    """
    if shards[0].dtype == torch.float64:
        dtype = torch.float64
    home, numbers = shards[0].device, range(len(shards))
    whole = [i for i in numbers if shardings[i].group is None]
    shared = [i for i in numbers if shardings[i].group is not None]
    moved = orthogonalise([shards[i].to(shardings[i].device) for i in whole], dtype)
    if shared:
        parts = [shards[i] for i in shared], [shardings[i] for i in shared]
        moved += _orthogonalise_shared(*parts, dtype)
    found = dict(zip([*whole, *shared], moved, strict=True))
    return [found[i].to(home) for i in numbers]


def _orthogonalise_shared(
    shards: Sequence[Tensor], shardings: Sequence[Sharding], dtype: torch.dtype
) -> list[Tensor]:
    group, device = shardings[0].group, shardings[0].device
    assert group is not None
    ranks, here = range(group.size()), group.rank()
    owned = assign_to_ranks([sharding.cost for sharding in shardings], len(ranks))
    mine = [shardings[i] for i in owned[here]]
    swapped = partial(exchange, like=shards[0], group=group, device=device, dtype=dtype)
    rows = swapped(
        [[shards[i] for i in owned[rank]] for rank in ranks],
        [[sharding.shard(rank) for sharding in mine] for rank in ranks],
    )
    wholes = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    wholes = [m.split.join(w) if m.split else w for w, m in zip(wholes, mine, strict=True)]
    done = orthogonalise(wholes, dtype)
    done = [m.split.of(w) if m.split else w for w, m in zip(done, mine, strict=True)]
    cut = [
        whole.split([sharding.shard(rank)[0] for rank in ranks])
        for whole, sharding in zip(done, mine, strict=True)
    ]
    back = swapped(
        [[parts[rank] for parts in cut] for rank in ranks],
        [[shardings[i].shard(here) for i in owned[rank]] for rank in ranks],
    )
    found = {i: t for rank in ranks for i, t in zip(owned[rank], back[rank], strict=True)}
    return [found[i] for i in range(len(shards))]


def orthogonalise(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Each matrix or stack with singular values close to 1; equal shapes are batched."""
    alike: dict[torch.Size, list[int]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        alike[matrix.shape[-2:]].append(number)
    done: dict[int, Tensor] = {}
    for (rows, columns), numbers in alike.items():
        stacks = [matrices[number].reshape(-1, rows, columns) for number in numbers]
        stack = torch.cat(stacks).to(dtype)
        factors = (
            polar_factors(stack) if rows <= columns else polar_factors(stack.mT).mT.contiguous()
        )
        parts = factors.to(matrices[0].dtype).split([len(each) for each in stacks])
        done |= {n: p.view(matrices[n].shape) for n, p in zip(numbers, parts, strict=True)}
    return [done[number] for number in range(len(matrices))]


def polar_factors(x: Tensor) -> Tensor:
    """[N, short, long] → nearly the closest matrices with orthonormal rows (Newton–Schulz)."""
    a, b, c = COEFFICIENTS
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def assign_to_ranks(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """The positions in `costs` assigned to each rank, so that costs are about equal."""
    own: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for position in sorted(range(len(costs)), key=lambda i: -costs[i]):
        lightest = load.index(min(load))
        own[lightest].append(position)
        load[lightest] += costs[position]
    return own


def exchange(
    outgoing: Sequence[Sequence[Tensor]],
    incoming: Sequence[Sequence[tuple[int, int]]],
    like: Tensor,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> list[list[Tensor]]:
    """Send tensors to each rank of the group, from `device` and in `dtype`.

    Args:
        outgoing: the tensors for each rank.
        incoming: the shapes of the tensors from each rank.
        like: a tensor with the dtype of `outgoing` and of the result.
    """
    nothing = like.new_empty(0)  # a rank may own no matrix
    flat = torch.cat([nothing, *(tensor.reshape(-1) for some in outgoing for tensor in some)])
    sizes = [[prod(shape) for shape in shapes] for shapes in incoming]
    received = flat.new_empty(sum(map(sum, sizes)), device=device, dtype=dtype)
    sent = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
    dist.all_to_all_single(
        received, flat.to(device, dtype), [sum(some) for some in sizes], sent, group=group
    )
    pieces = iter(received.to(flat.dtype).split([size for some in sizes for size in some]))
    return [[next(pieces).view(shape) for shape in shapes] for shapes in incoming]
