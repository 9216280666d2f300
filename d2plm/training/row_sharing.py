"""Context and tensor parallelism: several processes share the tokens of each packed row.

Every process is given the whole row, a few bytes per token. From the first block to the head it
holds only its part of the tokens, and its logits are gathered, so that corruption, loss and bound
see whole rows. Within attention, tokens are exchanged for heads, so that the same kernel sees whole
segments (Ulysses; Jacobs et al., arXiv:2309.14509). Tensor parallelism also splits the heads and
the feed-forward's width, with the tokens shared in between (Korthikanti et al., arXiv:2205.05198).

A parameter that is not split has a gradient of this process's tokens alone, and a split one of the
tokens of its tensor group. What is gained are memory and time of one row; sharding over the same
processes costs less communication as long as a row fits one process.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from d2plm.core.alphabet import PAD
from d2plm.model.attention import packed_attention
from d2plm.model.dit import DiT
from d2plm.model.layers import Attention, Layout
from d2plm.training.row_collectives import exchange, gather_tokens, scatter_sums


def share_rows(model: DiT, mesh: DeviceMesh) -> None:
    """Have the processes of `mesh`, context × tensor, share each row that `model` computes.

    A model whose weights are split keeps their names.
    """
    rows = SharedRows(mesh)
    model.register_forward_pre_hook(rows.pad)
    model.register_forward_hook(rows.cut)
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(rows.enter if number == 0 else rows.place)
        if mesh["context"].size() > 1:
            block.attention.kernel = ContextAttention(mesh)
        if mesh["tensor"].size() > 1:
            split_block(block, mesh)
    model.head.register_forward_pre_hook(rows.place)
    model.head.register_forward_hook(rows.leave)


class SharedRows:
    """Hooks that give this process its part of a row and gather the logits of all parts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.context, self.tensor = mesh["context"], mesh["tensor"]
        self.ranks = mesh.size()
        self.rank = self.context.get_local_rank() * self.tensor.size() + self.tensor.get_local_rank()
        self.tokens = 0
        self.whole: Layout | None = None

    def pad(self, _model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Make the row divisible by the number of processes; the added tokens are a segment."""
        tokens, cu_seqlens, max_seqlen, times = inputs
        self.tokens = len(tokens)
        added = -self.tokens % self.ranks
        if added == 0:
            return inputs
        end = cu_seqlens[-1:] + added
        return (
            F.pad(tokens, (0, added), value=PAD),
            torch.cat([cu_seqlens, end]),
            max(max_seqlen, added),
            F.pad(times, (0, 1)),
        )

    def enter(self, block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the first block: this process's tokens alone."""
        x_TD, *others = inputs
        return self.place(block, (_part(x_TD, self.rank, self.ranks), *others))

    def place(self, _layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before each block and the head: where these tokens stand."""
        x_TD, time_SC, layout, *others = inputs
        if layout is not self.whole:
            self.whole, self.own = layout, self._own(layout)
        return (x_TD, time_SC, self.own, *others)

    def leave(self, _head: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
        """After the head: the logits of the whole row."""
        for mesh in (self.tensor, self.context):
            logits = Gather.apply(logits, mesh)
        return logits

    def cut(self, _model: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
        """The logits of the tokens that were given."""
        return logits[: self.tokens]

    def _own(self, whole: Layout) -> Layout:
        """The layout of this process's tokens, with the angles of those of its tensor group."""
        segments_T = _part(whole.segments_T, self.rank, self.ranks)
        start, count = self.rank * len(segments_T), len(segments_T)
        here, contexts = self.context.get_local_rank(), self.context.size()
        return Layout(
            segments_T,
            (whole.bounds - start).clamp(0, count),
            _part(whole.cos_T1K, here, contexts),
            _part(whole.sin_T1K, here, contexts),
        )


def _part(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """The `rank`-th of `ranks` equal parts of dimension 0."""
    count = whole.shape[0] // ranks
    return whole.narrow(0, rank * count, count)


class Gather(torch.autograd.Function):
    """The parts of all ranks of a mesh → the whole, of which every rank computes the same loss.

    The gradient of a part is therefore a part of the gradient, without a sum over the ranks.
    """

    @staticmethod
    def forward(ctx, part: Tensor, mesh: DeviceMesh) -> Tensor:  # type: ignore[no-untyped-def]  # torch's API
        ctx.mesh = mesh
        return gather_tokens(part, _name(mesh))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]  # torch's API
        return _part(grad, ctx.mesh.get_local_rank(), ctx.mesh.size()), None


class ContextAttention:
    """`packed_attention` of a row whose tokens are spread over the ranks of a context.

    Each rank sends the heads that others compute of its tokens, and receives the other tokens of
    the heads that it computes. The heads must be divisible by the ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks, self.group = mesh["context"].size(), _name(mesh["context"])

    def __call__(
        self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> Tensor:
        heads = torch.stack([q_THK, k_THK, v_THK], dim=1).unflatten(2, (self.ranks, -1))
        q_THK, k_THK, v_THK = exchange(heads.movedim(2, 0), self.group).flatten(0, 1).unbind(1)
        mixed = packed_attention(q_THK, k_THK, v_THK, cu_seqlens, max_seqlen)
        own = exchange(mixed.unflatten(0, (self.ranks, -1)), self.group)
        return own.movedim(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class Split:
    """The part of a matrix that a rank of a tensor group holds.

    Attributes:
        dim: 0 for the rows, a layer's outputs; 1 for the columns, its inputs.
        pieces: matrices that lie side by side along `dim`, each of which is split.
        rank, ranks: this process in its tensor group.
    """

    dim: int
    pieces: int
    rank: int
    ranks: int

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole matrix."""
        pieces = whole.unflatten(self.dim, (self.pieces, self.ranks, -1))
        return pieces.select(self.dim + 1, self.rank).flatten(self.dim, self.dim + 1).contiguous()

    def join(self, parts: list[Tensor]) -> Tensor:
        """The whole matrix of the parts of all ranks."""
        pieces = [part.unflatten(self.dim, (self.pieces, -1)) for part in parts]
        return torch.cat(pieces, dim=self.dim + 1).flatten(self.dim, self.dim + 1)


# Of a block: (the layer, dimension that is split, matrices side by side).
SPLITS = (
    ("attention.qkv_proj", 0, 3),
    ("attention.out_proj", 1, 1),
    ("feed_forward.gate_up_proj", 0, 2),
    ("feed_forward.up_proj", 0, 1),
    ("feed_forward.down_proj", 1, 1),
)


def split_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Leave a block the heads and the part of the feed-forward's width of this tensor rank."""
    tensor, layers = mesh["tensor"], dict(block.named_modules())
    group = _name(tensor)
    for name, dim, pieces in SPLITS:
        if name in layers:
            layer = cast(nn.Linear, layers[name])
            split = Split(dim, pieces, tensor.get_local_rank(), tensor.size())
            weight = nn.Parameter(split.of(layer.weight.detach()))
            layer.weight = weight.requires_grad_(layer.weight.requires_grad)
    attention = cast(Attention, block.attention)
    attention.heads //= tensor.size()


def _name(mesh: DeviceMesh) -> str:
    return str(mesh.get_group().group_name)
