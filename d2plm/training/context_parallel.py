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

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from d2plm.core.vocabulary import PAD
from d2plm.model.attention import packed_attention
from d2plm.model.dit import DiT
from d2plm.model.layers import Attention, Layout
from d2plm.training.collectives import exchange, gather_tokens, group_name
from d2plm.training.tensor_parallel import split_block


def apply_context_parallel(model: DiT, mesh: DeviceMesh) -> "ContextParallel":
    """Have the processes of `mesh`, context × tensor, share each row that `model` computes."""
    rows = ContextParallel(mesh)
    model.register_forward_pre_hook(rows.pad)
    model.register_forward_hook(rows.cut)
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(rows.enter if number == 0 else rows.place)
        if mesh["context"].size() > 1:
            cast(Attention, block.attention).kernel = ContextAttention(mesh)
        if mesh["tensor"].size() > 1:
            split_block(block, mesh["tensor"])
    model.head.register_forward_pre_hook(rows.place)
    model.head.register_forward_hook(rows.leave)
    return rows


class ContextParallel:
    """Hooks that give this process its part of a row and gather the logits of all parts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.context, self.tensor = mesh["context"], mesh["tensor"]
        self.ranks = mesh.size()
        self.rank = (
            self.context.get_local_rank() * self.tensor.size() + self.tensor.get_local_rank()
        )
        self.tokens = 0
        self.whole: Layout | None = None

    def pad(self, _model: nn.Module | None, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
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
        own_TD = _part(x_TD, self.rank, self.ranks).clone()  # the others' memory is freed
        return self.place(block, (own_TD, *others))

    def place(self, _layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before each block and the head: where these tokens stand."""
        x_TD, time_SC, layout, *others = inputs
        if layout is not self.whole:
            self.whole, self.own = layout, self._own(layout)
        return (x_TD, time_SC, self.own, *others)

    def leave(self, _head: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
        """After the head: the logits of the whole row, of which every rank computes the same loss.

        The gradient of a part is therefore a part of the gradient, without a sum over the ranks.
        """
        for mesh in (self.tensor, self.context):
            parts = list(gather_tokens(logits.detach(), group_name(mesh)).chunk(mesh.size()))
            parts[mesh.get_local_rank()] = logits
            logits = torch.cat(parts)
        return logits

    def cut(self, _model: nn.Module | None, _inputs: object, logits: Tensor) -> Tensor:
        """The logits of the tokens that were given."""
        return logits[: self.tokens].clone() if len(logits) > self.tokens else logits

    def _own(self, whole: Layout) -> Layout:
        """The layout of this process's tokens, with the angles of those of its tensor group."""
        segments_T = _part(whole.segments, self.rank, self.ranks)
        start, count = self.rank * len(segments_T), len(segments_T)
        here, contexts = self.context.get_local_rank(), self.context.size()
        return Layout(
            segments_T,
            (whole.bounds - start).clamp(0, count),
            _part(whole.cos, here, contexts),
            _part(whole.sin, here, contexts),
            None if whole.real is None else _part(whole.real, self.rank, self.ranks),
        )


def _part(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """The `rank`-th of `ranks` equal parts of dimension 0."""
    return whole.chunk(ranks)[rank]


class ContextAttention:
    """`packed_attention` of a row whose tokens are spread over the ranks of a context.

    Each rank sends the heads that others compute of its tokens, and receives the other tokens of
    the heads that it computes. The heads must be divisible by the ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks, self.group = mesh["context"].size(), group_name(mesh["context"])

    def __call__(
        self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> Tensor:
        heads = torch.stack([q_THK, k_THK, v_THK], dim=1).unflatten(2, (self.ranks, -1))
        q_THK, k_THK, v_THK = exchange(heads.movedim(2, 0), self.group).flatten(0, 1).unbind(1)
        mixed = packed_attention(q_THK, k_THK, v_THK, cu_seqlens, max_seqlen)
        own = exchange(mixed.unflatten(0, (self.ranks, -1)), self.group)
        return own.movedim(0, 1).flatten(1, 2)
