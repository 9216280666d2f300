"""Tensor parallelism, and parameters of which each rank of a group holds a part.

The heads and the feed-forward's width of a block are shared (Shoeybi et al., arXiv:1909.08053):
layers whose outputs are split receive the tokens of all ranks of the group, layers whose inputs are
split return to each rank its own tokens of the sum. FSDP sees the parts as parameters of their own;
optimizers, checkpoints and exports see whole matrices.

`torch.distributed.tensor.parallel` (2.13) would need the rows of the fused matrices in another
order: its `_StridedShard` of q, k and v is wrong under two FSDP shards, and DCP rejects it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh

from d2plm.model.layers import Attention
from d2plm.training.collectives import gather_tokens, group_name, scatter_sums

# Layers of a block: the dimension that is split, and the number of matrices side by side along it.
LAYERS = {
    "attention.qkv_proj": (0, 3),
    "attention.out_proj": (1, 1),
    "feed_forward.gate_up_proj": (0, 2),
    "feed_forward.up_proj": (0, 1),
    "feed_forward.down_proj": (1, 1),
}


@dataclass(frozen=True)
class Split:
    """How a parameter is split over the ranks of a tensor group or of an expert group.

    Attributes:
        dim: 0 for the rows, a layer's outputs, or the experts of a stack; 1 for the columns, a
            layer's inputs.
        pieces: matrices side by side along `dim`, each of which is split.
        mesh: the group.
    """

    dim: int
    pieces: int
    mesh: DeviceMesh

    @property
    def is_of_experts(self) -> bool:
        """Whether an expert group shares it, whose ranks have rows of their own."""
        return self.mesh.mesh_dim_names == ("expert",)

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole matrix."""
        pieces = whole.unflatten(self.dim, (self.pieces, self.mesh.size(), -1))
        part = pieces.select(self.dim + 1, self.mesh.get_local_rank())
        return part.flatten(self.dim, self.dim + 1).contiguous()

    def join(self, part: Tensor) -> Tensor:
        """The whole matrix; a collective operation of the group."""
        parts = gather_tokens(part[None], group_name(self.mesh))
        pieces = parts.unflatten(self.dim + 1, (self.pieces, -1)).movedim(0, self.dim + 1)
        return pieces.flatten(self.dim, self.dim + 2)

    def whole_shape(self, part: torch.Size) -> torch.Size:
        """The shape of the whole matrix of which a part has the shape `part`."""
        return torch.Size(
            n * (self.mesh.size() if d == self.dim else 1) for d, n in enumerate(part)
        )


def split_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Leave a block the heads and the part of the feed-forward's width of this tensor rank."""
    group = group_name(mesh)
    for name, layer in block.named_modules():
        if name in LAYERS:
            linear, split = cast(nn.Linear, layer), Split(*LAYERS[name], mesh)
            part = nn.Parameter(split.of(linear.weight.detach()), linear.weight.requires_grad)
            linear.weight, linear.split = part, split  # type: ignore[assignment]  # see `splits_of`
            if split.dim == 0:
                linear.register_forward_pre_hook(lambda _, inputs: gather_tokens(inputs[0], group))
            else:
                linear.register_forward_hook(lambda _, _inputs, sums: scatter_sums(sums, group))
    cast(Attention, block.attention).heads //= mesh.size()


def splits_of(model: nn.Module) -> dict[str, Split]:
    """The parameters of which this process has a part, by name."""
    return {
        f"{name}.{parameter}": split
        for name, layer in model.named_modules()
        if (split := getattr(layer, "split", None)) is not None
        for parameter, _ in layer.named_parameters(recurse=False)
    }


class SplitShard(torch.Tensor):
    """Rows of this rank's part of a split parameter, for `torch.distributed.checkpoint`.

    It has the shape of the whole parameter, which is what is stored, so that any other plan can
    load it; nothing can be computed with it.

    Args:
        shard: [rows, columns] of the part, or [experts, rows, columns], in this rank's memory.
        first: the number of its first row in the part.
        part: shape of the part.
    """

    shard: Tensor
    over: Split
    first: int
    part: torch.Size

    def __new__(cls, shard: Tensor, split: Split, first: int, part: torch.Size) -> "SplitShard":
        new = torch.Tensor._make_wrapper_subclass(  # as DTensor is made
            cls, split.whole_shape(part), dtype=shard.dtype, device=shard.device
        )
        new.shard, new.over, new.first, new.part = shard, split, first, part
        return new

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise TypeError(f"{func} of a matrix of which only a part is here")

    def like(self, shard: Tensor) -> "SplitShard":
        """Another tensor of the same place, such as a moment or a copy."""
        return SplitShard(shard, self.over, self.first, self.part)

    def _chunks(self) -> Iterator[tuple[torch.Size, Tensor]]:
        """(place in the whole parameter, view of this rank's memory) of each contiguous piece."""
        dim, pieces, mesh = self.over.dim, self.over.pieces, self.over.mesh
        height, stop = self.part[0] // pieces, self.first + len(self.shard)
        for piece in range(pieces):
            low, high = max(self.first, piece * height), min(stop, (piece + 1) * height)
            if low < high:
                place = [low] + [0] * (self.shard.ndim - 1)
                before = piece * (mesh.size() - 1) + mesh.get_local_rank()  # of other ranks
                place[dim] += before * (self.part[dim] // pieces)
                yield torch.Size(place), self.shard[low - self.first : high - self.first]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(place, view.shape) for place, view in self._chunks()]

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.shard)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        views: dict[Any, Tensor] = dict(self._chunks())
        return views[index.offset]
