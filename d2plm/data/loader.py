"""PackedLoader: the training stream, from a store to micro-batches, without end.

Token bytes go from the store into a packed row by NumPy copies alone. The stream's state is
(epoch, position): a resumed loader starts at the very global batch where the last one stopped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from d2plm.alphabet import CLS, EOS
from d2plm.batch import PackedBatch
from d2plm.data.packing import Bin, PackingSampler
from d2plm.data.store import SequenceStore
from d2plm.errors import DataError, require_number


@dataclass(frozen=True)
class Position:
    """Where a stream stands: `batch` global batches of `epoch` are done."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of one optimizer step, and where the stream goes on after it.

    Attributes:
        micro_batches: the batches.
        following: the position after them.
        segment_lengths: tokens of every sequence in them; on the host, whatever the device.
    """

    micro_batches: list[PackedBatch]
    following: Position
    segment_lengths: list[int]


class PackedDataset(Dataset[PackedBatch]):
    """Turns a planned `Bin` into a `PackedBatch`; safe in forked and spawned workers."""

    def __init__(self, store: SequenceStore, sampler: PackingSampler, max_length: int) -> None:
        self.store = store
        self.max_length = max_length
        self.token_budget = sampler.token_budget
        self.max_segments = sampler.max_segments
        self.seed = sampler.seed

    def __getitem__(self, packed: Bin) -> PackedBatch:  # type: ignore[override]  # keyed by a plan, not an index
        return PackedBatch.pack(
            [self._segment(int(i), packed.epoch) for i in packed.sequences],
            sequence_ids=packed.sequences,
            draw_ids=packed.draw_ids,
            global_sequences=packed.global_sequences,
            token_budget=self.token_budget,
            max_segments=self.max_segments,
            max_seqlen=self.token_budget,
        )

    def _segment(self, index: int, epoch: int) -> NDArray[np.uint8]:
        residues = self.store[index]
        start = 0
        surplus = len(residues) + 2 - self.max_length
        if surplus > 0:
            start = int(np.random.default_rng([self.seed, epoch, index]).integers(surplus + 1))
        return framed(residues, start, self.max_length)


class PackedLoader:
    """Micro-batches of one rank, global batch after global batch, epoch after epoch.

    Args:
        store: the training sequences.
        token_budget: tokens of a micro-batch.
        max_length: longest segment in tokens; longer sequences give a random window, a fresh one
            each epoch, with `<cls>` and `<eos>` only at true ends.
        micro_batches: micro-batches of a rank in a global batch (gradient accumulation).
        rank, world_size: this process among the data-parallel ones.
        seed: of the order and the windows.
        num_workers: loader processes; 0 loads in this one.
        pin_memory: hand out page-locked batches.
    """

    def __init__(
        self,
        store: SequenceStore,
        *,
        token_budget: int,
        max_length: int,
        micro_batches: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        require_number("data.num_workers", num_workers, integer=True, low=0)
        self.sampler = PackingSampler(
            store.lengths,
            token_budget=token_budget,
            bins_per_batch=micro_batches * world_size,
            max_length=max_length,
            seed=seed,
        )
        self.dataset = PackedDataset(store, self.sampler, max_length)
        self.rank, self.world_size, self.micro_batches = rank, world_size, micro_batches
        self.num_workers, self.pin_memory = num_workers, pin_memory

    def stream(self, start: Position) -> Iterator[GlobalBatch]:
        """The global batches from `start` on, without end."""
        loader = DataLoader(
            self.dataset,
            batch_size=None,
            sampler=self._bins(start),  # type: ignore[arg-type]  # any iterable serves
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            prefetch_factor=4 if self.num_workers else None,
        )
        micro_batches = iter(loader)
        position = start
        while True:
            position = self._after(position)
            batches = [next(micro_batches) for _ in range(self.micro_batches)]
            lengths = [length for packed in batches for length in packed.sequence_lengths()]
            yield GlobalBatch(batches, position, lengths)

    def _bins(self, start: Position) -> Iterator[Bin]:
        epoch, first = start.epoch, start.batch
        while True:
            for global_batch in self.sampler.epoch(epoch)[first:]:
                yield from global_batch[self.rank :: self.world_size]
            epoch, first = epoch + 1, 0

    def _after(self, position: Position) -> Position:
        if position.batch + 1 < self.batches_in_epoch(position.epoch):
            return Position(position.epoch, position.batch + 1)
        return Position(position.epoch + 1, 0)

    def batches_in_epoch(self, epoch: int) -> int:
        """Global batches (optimizer steps) of an epoch."""
        return len(self.sampler.epoch(epoch))


def pack_all(
    sequences: Sequence[NDArray[np.uint8]], token_budget: int, max_length: int
) -> list[PackedBatch]:
    """Every sequence once, in batches of one shape; draws are keyed by a sequence's index.

    Args:
        sequences: uint8 residue tokens; those too long for `max_length` are cut at their end.
        token_budget: tokens of a batch; at least `max_length`, and no more than there are.
        max_length: tokens of a sequence, `<cls>` and `<eos>` included.

    Raises:
        DataError: if there are none.
    """
    if not len(sequences):
        raise DataError("there are no sequences: give at least one")
    tokens = [framed(sequence[: max_length - 2]) for sequence in sequences]
    sampler = PackingSampler(
        np.array([len(row) - 2 for row in tokens]),
        token_budget=max(min(token_budget, sum(map(len, tokens))), max_length),
        max_length=max_length,
    )
    return [
        PackedBatch.pack(
            [tokens[int(i)] for i in packed.sequences],
            sequence_ids=packed.sequences,
            draw_ids=packed.sequences,
            token_budget=sampler.token_budget,
            max_segments=sampler.max_segments,
            max_seqlen=sampler.token_budget,
        )
        for (packed,) in sampler.epoch(0)
    ]


def framed(
    residues: NDArray[np.uint8], start: int = 0, max_length: int | None = None
) -> NDArray[np.uint8]:
    """`<cls>` residues `<eos>`, and of that the window of `max_length` tokens from `start` on."""
    whole = np.empty(len(residues) + 2, dtype=np.uint8)
    whole[0], whole[1:-1], whole[-1] = CLS, residues, EOS
    return whole if max_length is None else whole[start : start + max_length]
