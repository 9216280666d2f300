"""PackedBatch: the batch type that the loader, the model and the loss share.

Sequences are concatenated into one row of a fixed token budget. Padding exists only as trailing
segments, none longer than a sequence may be, and `cu_seqlens` has a fixed length, so every batch of
a run has the same shapes and nothing recompiles.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import PAD

PADDING_ID = -1

T = TypeVar("T")


@dataclass(frozen=True)
class Alignment:
    """Alignments of corrupted proteins to their relatives: N = Σ lengths of the proteins, R pairs.

    Attributes:
        features: float32 [N, F], one row per (position of a protein, relative); the features are
            listed in `d2plm.model.alignment`.
        places: int64 [N], position of each row in the packed row.
        bounds: int64 [R + 1], start and end of each pair's rows.
    """

    features: Tensor
    places: Tensor
    bounds: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "Alignment":
        return Alignment(*map(function, vars(self).values()))


@dataclass(frozen=True)
class Relatives:
    """R relatives of the sequences of a batch, which the model sees but never predicts.

    The arrays stay on the host, where relatives are aligned.

    Attributes:
        tokens: uint8 [M], the concatenated residues, without special tokens.
        bounds: int64 [R + 1], start and end of each relative; none is empty.
        segments: int64 [R], the segment of the batch to which each relative belongs.
        alignment: alignment of the corrupted batch to the relatives, if computed before the step;
            None: the model's forward computes it.
    """

    tokens: NDArray[np.uint8]
    bounds: NDArray[np.int64]
    segments: NDArray[np.int64]
    alignment: Alignment | None = None

    @classmethod
    def pack(cls, by_segment: Sequence[Sequence[NDArray[np.uint8]]]) -> Self:
        """Concatenate the relatives (uint8) of each segment; `DataError` if one has no residues."""
        flat = [tokens for of_segment in by_segment for tokens in of_segment]
        if not all(map(len, flat)):
            raise DataError("a relative has no residues: leave it out")
        counts = [len(of_segment) for of_segment in by_segment]
        return cls._of(flat, np.repeat(np.arange(len(counts)), counts))

    def of_segments(self, kept: NDArray[np.bool_]) -> Self:
        """The relatives of the `kept` segments [S], which are renumbered."""
        chosen = kept[self.segments]
        parts = [self.tokens[start:stop] for start, stop in pairwise(self.bounds.tolist())]
        flat = [part for part, own in zip(parts, chosen, strict=True) if own]
        return self._of(flat, (np.cumsum(kept) - 1)[self.segments[chosen]])

    @classmethod
    def _of(cls, flat: Sequence[NDArray[np.uint8]], segments: NDArray[np.int64]) -> Self:
        tokens = np.concatenate([np.empty(0, dtype=np.uint8), *flat])
        return cls(tokens, np.cumsum([0, *map(len, flat)], dtype=np.int64), segments)


@dataclass(frozen=True)
class PackedBatch:
    """Several sequences in one row.

    Shapes: T tokens (the budget), S segments (sequences, then padding, then empty segments).

    Attributes:
        tokens: [T], in the dtype of the vocabulary: uint8, uint16 or uint32.
        cu_seqlens: int32 [S + 1], where each segment starts and ends; the last value is T.
        sequence_ids: int64 [S], index of each sequence in its store, or in the concatenation of
            several stores; -1 for padding segments.
        draw_ids: int64 [S], index of each sequence in the *global* batch, the key of its random
            draws; -1 for padding segments.
        global_sequences: number of sequences in the global batch, over which times are stratified.
        max_seqlen: upper bound on the length of any segment, constant over a run. The cost of
            CUDA's attention launches grows with S · max_seqlen: keep both small.
        relatives: relatives of the sequences, for a model that takes them; otherwise None.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    sequence_ids: Tensor
    draw_ids: Tensor
    global_sequences: int
    max_seqlen: int
    relatives: Relatives | None = None

    @classmethod
    def pack(
        cls, sequences: Sequence[NDArray[Any]], *, token_budget: int | None = None, **of_row: Any
    ) -> Self:
        """Lay `sequences` (tokens of one dtype, special tokens included) one after another.

        `token_budget` and `max_segments` fix the shapes; without them the batch is as large as its
        content. Other arguments and errors are those of `of_row`.
        """
        lengths = np.array([len(s) for s in sequences], dtype=np.int64)
        used = int(lengths.sum())
        dtype = sequences[0].dtype if sequences else np.dtype(np.uint8)
        row = np.full(used if token_budget is None else token_budget, PAD, dtype=dtype)
        if used <= len(row) and sequences:
            np.concatenate(list(sequences), out=row[:used])
        return cls.of_row(row, lengths, **of_row)

    @classmethod
    def of_row(
        cls,
        row: NDArray[Any],
        lengths: NDArray[np.int64],
        *,
        sequence_ids: Sequence[int] | NDArray[np.int64] | None = None,
        draw_ids: Sequence[int] | NDArray[np.int64] | None = None,
        global_sequences: int | None = None,
        max_segments: int | None = None,
        max_seqlen: int | None = None,
        relatives: Relatives | None = None,
    ) -> Self:
        """Build a batch from the tokens `row` [T], which begins with sequences of `lengths` [n].

        Raises `DataError` if they do not fit into the row, or into `max_segments` of `max_seqlen`.
        """
        count, budget, ends = len(lengths), len(row), np.cumsum(lengths)
        used, longest = int(ends[-1]) if count else 0, int(lengths.max(initial=0))
        if max_seqlen is None:
            max_seqlen = max(longest, budget - used)
        # Ends of the padding segments except the last.
        tail = np.arange(used + max_seqlen, budget, max(max_seqlen, 1))
        needed = count + len(tail) + (used < budget)
        segments = needed if max_segments is None else max_segments
        if used > budget or longest > max_seqlen or needed > segments:
            raise DataError(
                f"{count} sequences of {used} tokens, at most {longest} each, do not fit a batch "
                f"of {budget} tokens and {segments} segments of {max_seqlen}: raise the token "
                "budget"
            )
        cu_seqlens = np.full(segments + 1, budget, dtype=np.int32)
        cu_seqlens[0] = 0
        cu_seqlens[1 : count + 1] = ends
        cu_seqlens[count + 1 : count + 1 + len(tail)] = tail

        def per_segment(values: Sequence[int] | NDArray[np.int64] | None) -> Tensor:
            filled = np.full(segments, PADDING_ID, dtype=np.int64)
            filled[:count] = np.arange(count) if values is None else values
            return torch.from_numpy(filled)

        return cls(
            tokens=torch.from_numpy(row),
            cu_seqlens=torch.from_numpy(cu_seqlens),
            sequence_ids=per_segment(sequence_ids),
            draw_ids=per_segment(draw_ids),
            global_sequences=count if global_sequences is None else global_sequences,
            max_seqlen=max_seqlen,
            relatives=relatives,
        )

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_segments(self) -> int:
        return self.sequence_ids.shape[0]

    def segment_ids(self) -> Tensor:
        """int64 [T]: the segment of each token."""
        return segment_ids(self.cu_seqlens, self.num_tokens)

    def positions(self) -> Tensor:
        """int64 [T]: the position of each token in its segment."""
        return positions(self.cu_seqlens, self.segment_ids())

    def computable(self) -> Tensor:
        """The tokens [T] as uint8 or int32: torch has few operations on uint16 and uint32."""
        return self.tokens if self.tokens.dtype == torch.uint8 else self.tokens.to(torch.int32)

    def real(self) -> Tensor:
        """bool [S]: True at segments that hold a sequence."""
        return self.sequence_ids != PADDING_ID

    def to(self, device: torch.device | str) -> Self:
        """Copy to `device`, without blocking if the source is pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        return self._map(lambda tensor: tensor.pin_memory())

    def sequence_lengths(self) -> list[int]:
        """Number of tokens of each sequence, without padding; synchronises on an accelerator."""
        count = np.count_nonzero(self.sequence_ids.cpu().numpy() != PADDING_ID)
        return np.diff(self.cu_seqlens.cpu().numpy()[: count + 1]).tolist()

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory alive until `stream` has finished its queued work."""

        def record(tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor

        self._map(record)

    def repeated(self, count: int) -> Self:
        """Concatenate `count` copies; `relatives` must already be those of all copies."""
        starts = torch.arange(count, device=self.cu_seqlens.device)[:, None] * self.num_tokens
        ends = (self.cu_seqlens[1:] + starts).flatten().to(torch.int32)
        return replace(
            self,
            tokens=torch.cat([self.tokens] * count),
            cu_seqlens=F.pad(ends, (1, 0)),
            sequence_ids=self.sequence_ids.repeat(count),
            draw_ids=self.draw_ids.repeat(count),
        )

    def split(self) -> list[Tensor]:
        """The sequences, one tensor each, without padding."""
        lengths = self.sequence_lengths()
        return list(self.tokens[: sum(lengths)].split(lengths))

    # Batches are passed between processes by value: each tensor in shared memory costs a file
    # descriptor, room in /dev/shm and many times the time of a copy of this size.
    def __getstate__(self) -> dict[str, Any]:
        arrays = {name: tensor.numpy() for name, tensor in self._tensors().items()}
        return {**vars(self), **arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            tensor = isinstance(value, np.ndarray)
            object.__setattr__(self, name, torch.from_numpy(value) if tensor else value)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        changed: dict[str, Any] = {name: function(one) for name, one in self._tensors().items()}
        if self.relatives is not None and self.relatives.alignment is not None:
            alignment = self.relatives.alignment.map(function)
            changed["relatives"] = replace(self.relatives, alignment=alignment)
        return replace(self, **changed)


def under_budget(items: Iterable[T], size: Callable[[T], int], budget: int) -> Iterator[list[T]]:
    """Group the items in order; each group fits the budget or is a single item."""
    batch: list[T] = []
    used = 0
    for item in items:
        if batch and used + size(item) > budget:
            yield batch
            batch, used = [], 0
        batch.append(item)
        used += size(item)
    if batch:
        yield batch


def of_size(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Group the items in order; each group but the last reaches the size `least`."""
    batch: list[T] = []
    used = 0
    for item in items:
        batch.append(item)
        used += size(item)
        if used >= least:
            yield batch
            batch, used = [], 0
    if batch:
        yield batch


def segment_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """int64 [T]: the segment of each token, without a host synchronisation."""
    index = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(index, cu_seqlens[1:], right=True)


def positions(cu_seqlens: Tensor, segments: Tensor) -> Tensor:
    """int64 [T]: the position of each token in its segment."""
    index = torch.arange(segments.shape[0], device=segments.device)
    return index - cu_seqlens[segments]


def segment_sum(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Sum `values` [T] by segment → [S], in the dtype of `values`."""
    out = torch.zeros(num_segments, dtype=values.dtype, device=values.device)
    return out.index_add_(0, segments, values)
