"""PackedLoader: the endless training stream, from a store to micro-batches.

NumPy copies token bytes from the store into a packed row. This takes less of the training process's
time than receiving a batch from another process, so loader processes only help if the disk is slow.
The stream's state is (epoch, bins done): a resumed loader continues at the next global batch.
"""

import atexit
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from d2plm.core.batch import PackedBatch, Relatives
from d2plm.core.errors import DataError, require_number
from d2plm.core.vocabulary import CLS, EOS, PAD, Tokens, Vocabulary
from d2plm.data.packing import Bin, EpochPlan, PackingSampler
from d2plm.data.relatives import IDENTITIES, LONGEST_RELATIVE, RelativesIndex, aligned_part
from d2plm.data.sampling import Draws, Part
from d2plm.data.store import Windows

_WORKERS: WeakSet[BaseProcess] = WeakSet()  # of all streams
_WINDOWS, _RELATIVES = 1, 2  # last elements of the draws' seeds
# Probability of drawing no relatives, so that the model also learns to predict without them.
# Otherwise they are below one of `IDENTITIES`, to learn from close and distant ones.
WITHOUT_RELATIVES = 0.2


class Sequences(Protocol):
    """The part of the `SequenceStore` interface used in training."""

    @property
    def digest(self) -> str: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def lengths(self) -> NDArray[np.int32]: ...
    @property
    def clusters(self) -> NDArray[np.int32] | None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Tokens: ...
    def copy_into(self, row: Tokens, windows: Windows) -> None: ...


@dataclass(frozen=True)
class Collection:
    """Sequences to train on, and how often they are drawn.

    Attributes:
        weight: relative frequency of draws from this collection; None draws each sequence once per
            epoch. Set for all collections or for none.
        by_cluster: draw a cluster, then a random member of it, instead of a sequence.
        relatives: relatives of each sequence in the same collection; None if unknown.
    """

    sequences: Sequences
    weight: float | None = None
    by_cluster: bool = False
    relatives: RelativesIndex | None = None


@dataclass(frozen=True)
class DrawnRelatives:
    """Draws relatives of the sequences of a bin.

    Attributes:
        parts: relatives of the sequences of each collection.
        firsts: int64, index of the first sequence of each collection.
        most: maximum number of relatives drawn per sequence.
    """

    parts: Sequence[RelativesIndex]
    firsts: NDArray[np.int64]
    most: int

    def draw(self, packed: Bin, seed: int) -> list[NDArray[np.integer]]:
        """Indices of the relatives of each sequence, keyed by the bin's place in the plan."""
        key = [seed, packed.epoch, packed.place, _RELATIVES]
        draws = np.random.default_rng(key).random((len(packed.sequences), 3))
        parts = np.searchsorted(self.firsts, packed.sequences, side="right") - 1
        within = packed.sequences - self.firsts[parts]
        chosen: list[NDArray[np.integer]] = []
        columns = (parts.tolist(), within.tolist(), draws.tolist())
        for part, sequence, (alone, identity, number) in zip(*columns, strict=True):
            # With probability 1/2 the maximum number, otherwise uniform from 1 to the maximum.
            most = self.most if number < 0.5 else 1 + int((2 * number - 1) * self.most)
            below = IDENTITIES[int(identity * len(IDENTITIES))]
            found = self.parts[part].below(sequence, below)
            chosen.append(self.firsts[part] + found[: 0 if alone < WITHOUT_RELATIVES else most])
        return chosen


@dataclass(frozen=True)
class Position:
    """Position of a stream: `bins` bins of `epoch` are done, over all ranks."""

    epoch: int = 0
    bins: int = 0


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of one optimizer step, and the stream's position after it.

    `segment_lengths` are the numbers of tokens of all sequences, on the host.
    """

    micro_batches: list[PackedBatch]
    following: Position
    segment_lengths: list[int]


@dataclass(eq=False)
class PackedDataset(Dataset[PackedBatch]):
    """Turns planned `Bin`s into one `PackedBatch`; safe in forked and spawned workers."""

    sequences: "Sequences | _Joined"
    token_budget: int
    max_segments: int
    max_length: int
    seed: int
    relatives: DrawnRelatives | None = None

    def __getitem__(self, bins: Sequence[Bin]) -> PackedBatch:  # type: ignore[override]  # keyed by a plan, not an index
        # A segment is a window of <cls> residues <eos>: `tokens` tokens from `starts` on.
        ids = np.concatenate([packed.sequences for packed in bins])
        whole = self.sequences.lengths[ids].astype(np.int64) + 2
        tokens = np.minimum(whole, self.max_length)
        surplus = whole - tokens
        starts = self._window_starts(bins, surplus)
        draw_ids = np.concatenate([packed.draw_ids for packed in bins])
        order = np.arange(len(ids))
        if len(bins) > 1:  # a single bin already has its longest first; see `packed_attention`
            order = np.argsort(-tokens, kind="stable")
            ids, tokens, surplus = ids[order], tokens[order], surplus[order]
            starts, draw_ids = starts[order], draw_ids[order]
        has_cls, has_eos = starts == 0, starts == surplus
        ends = np.cumsum(tokens)
        places = ends - tokens
        row = np.full(len(bins) * self.token_budget, PAD, dtype=self.sequences.vocabulary.dtype)
        row[places], row[ends - 1] = CLS, EOS  # in crops without them, residues overwrite them
        residues = tokens - has_cls - has_eos
        self.sequences.copy_into(
            row, Windows(ids, np.maximum(starts - 1, 0), residues, places + has_cls)
        )
        return PackedBatch.of_row(
            row,
            tokens,
            sequence_ids=ids,
            draw_ids=draw_ids,
            global_sequences=bins[0].global_sequences,
            max_segments=len(bins) * self.max_segments,
            max_seqlen=self.max_length,
            relatives=None if self.relatives is None else self._drawn_relatives(bins, order),
        )

    def _drawn_relatives(self, bins: Sequence[Bin], order: NDArray[np.int64]) -> Relatives:
        assert self.relatives is not None
        drawn = [ids for packed in bins for ids in self.relatives.draw(packed, self.seed)]
        by_segment = [drawn[i] for i in order]
        ids = np.concatenate([np.empty(0, dtype=np.int64), *by_segment])
        counts = np.minimum(self.sequences.lengths[ids].astype(np.int64), LONGEST_RELATIVE)
        bounds = np.cumsum(np.concatenate([[0], counts]), dtype=np.int64)
        tokens = np.empty(bounds[-1], dtype=self.sequences.vocabulary.dtype)
        windows = Windows(ids.astype(np.int64), np.zeros_like(counts), counts, bounds[:-1])
        self.sequences.copy_into(tokens, windows)
        segments = np.repeat(np.arange(len(by_segment)), [len(each) for each in by_segment])
        return Relatives(tokens, bounds, segments)

    def _window_starts(self, bins: Sequence[Bin], surplus: NDArray[np.int64]) -> NDArray[np.int64]:
        """Start of each window, 0 … surplus; keyed by its bin's place in the epoch's plan."""
        if not surplus.any():
            return surplus
        ends = np.cumsum([len(packed.sequences) for packed in bins])
        return np.concatenate(
            [
                np.random.default_rng([self.seed, packed.epoch, packed.place, _WINDOWS]).integers(
                    room, endpoint=True
                )
                for packed, room in zip(bins, np.split(surplus, ends[:-1]), strict=True)
            ]
        )


@dataclass(frozen=True)
class _ErrorsAsValues(Dataset[PackedBatch | DataError]):
    """Returns errors from a worker as values: torch would put the traceback into their message."""

    dataset: Dataset[PackedBatch]

    def __getitem__(self, bins: Sequence[Bin]) -> PackedBatch | DataError:  # type: ignore[override]  # as above
        try:
            return self.dataset[bins]  # type: ignore[index]  # keyed by a plan
        except DataError as error:
            return error


def _raised(batch: PackedBatch | DataError) -> PackedBatch:
    if isinstance(batch, DataError):
        raise batch
    return batch


class PackedLoader:
    """Micro-batches of one rank, global batch after global batch, epoch after epoch.

    Args:
        token_budget: tokens of a bin, the unit of packing.
        max_length: longest segment in tokens; longer sequences are cropped to a random window, a
            new one each epoch, with `<cls>` and `<eos>` only at true ends.
        micro_batches: micro-batches of a rank in a global batch (gradient accumulation).
        bins_per_micro_batch: bins in one row.
        repeat_batches: number of global batches that are repeated endlessly; None uses all.
        rank, world_size: this process among the data-parallel ones.
        seed: seed of the order and the windows.
        num_workers: loader processes; 0 loads in the training process.
        prefetch_factor: batches that each loader process holds ready.
        pin_memory: whether batches are in page-locked memory.
        collate: `PackedDataset`, or another class with its arguments.
        max_relatives: maximum number of relatives drawn per sequence; 0 for none.

    Raises:
        ConfigError: a setting is impossible.
        DataError: a collection is empty, or lacks the clusters or relatives that the settings need.
    """

    def __init__(
        self,
        collections: Sequence[Collection],
        *,
        token_budget: int,
        max_length: int,
        micro_batches: int = 1,
        bins_per_micro_batch: int = 1,
        repeat_batches: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        num_workers: int = 0,
        prefetch_factor: int = 4,
        pin_memory: bool = False,
        collate: Callable[..., PackedDataset] = PackedDataset,
        max_relatives: int = 0,
    ) -> None:
        require_number("micro_batches", micro_batches, integer=True, low=1)
        require_number("bins_per_micro_batch", bins_per_micro_batch, integer=True, low=1)
        require_number("repeat_batches", repeat_batches, optional=True, integer=True, low=1)
        require_number("num_workers", num_workers, integer=True, low=0)
        require_number("prefetch_factor", prefetch_factor, integer=True, low=1)
        require_number("max_relatives", max_relatives, integer=True, low=0)
        parts = [collection.sequences for collection in collections]
        sequences = parts[0] if len(parts) == 1 else _Joined(parts)
        self.sampler = PackingSampler(
            sequences.lengths,
            token_budget=token_budget,
            max_length=max_length,
            draws=Draws([_part(collection) for collection in collections], seed),
        )
        self.dataset = collate(
            *(sequences, token_budget, self.sampler.max_segments, max_length, seed),
            **({"relatives": _drawn(collections, max_relatives)} if max_relatives else {}),
        )
        self.rank, self.world_size, self.micro_batches = rank, world_size, micro_batches
        self.bins_per_micro_batch = bins_per_micro_batch
        self.bins_per_batch = bins_per_micro_batch * micro_batches * world_size
        self.repeat_batches = repeat_batches
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.prefetch_factor = prefetch_factor
        self._bin_counts: dict[int, int] = {}

    def stream(self, start: Position) -> Iterator[GlobalBatch]:
        """The global batches from `start` on, endlessly; `DataError` on a damaged collection."""
        micro_batches, position = self._micro_batches(start), start
        while True:
            position = replace(position, bins=position.bins + self.bins_per_batch)
            if position.bins >= self._bins_in_epoch(position.epoch):
                position = Position(position.epoch + 1)
            batches = [next(micro_batches) for _ in range(self.micro_batches)]
            lengths = [length for packed in batches for length in packed.sequence_lengths()]
            yield GlobalBatch(batches, position, lengths)

    def _micro_batches(self, start: Position) -> Iterator[PackedBatch]:
        bins = self._bins(start)
        if not self.num_workers:  # DataLoader itself would take a fifth of the time
            loaded = map(self.dataset.__getitem__, bins)
            return map(PackedBatch.pin_memory, loaded) if self.pin_memory else loaded
        batches = iter(
            DataLoader(
                _ErrorsAsValues(self.dataset),
                batch_size=None,
                sampler=bins,  # type: ignore[arg-type]  # any iterable serves
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                prefetch_factor=self.prefetch_factor,
                worker_init_fn=_leave_signals_to_the_trainer,
            )
        )
        _WORKERS.update(batches._workers)  # type: ignore[attr-defined]  # of its kind with workers
        return map(_raised, batches)

    def _bins(self, start: Position) -> Iterator[list[Bin]]:
        epoch, first = start.epoch, start.bins
        while True:
            batches = self._plan(epoch).batches(self.bins_per_batch, first)
            left = self.batches_in_epoch(epoch) - first // self.bins_per_batch
            for global_batch in islice(batches, left):
                own = global_batch[self.rank :: self.world_size]
                for begin in range(0, len(own), self.bins_per_micro_batch):
                    yield own[begin : begin + self.bins_per_micro_batch]
            epoch, first = epoch + 1, 0

    def _plan(self, epoch: int) -> EpochPlan:
        return self.sampler.plan(epoch if self.repeat_batches is None else 0)

    def batches_in_epoch(self, epoch: int) -> int:
        """Number of global batches (optimizer steps) in an epoch."""
        return -(-self._bins_in_epoch(epoch) // self.bins_per_batch)

    def epochs_done(self, position: Position) -> float:
        """Number of epochs before a position, with a fraction."""
        return position.epoch + position.bins / self._bins_in_epoch(position.epoch)

    def _bins_in_epoch(self, epoch: int) -> int:
        # Workers receive bins ahead of the stream, so requests for two epochs alternate.
        if epoch not in self._bin_counts:
            bins = len(self._plan(epoch))
            if self.repeat_batches is not None:
                bins = min(bins, self.repeat_batches * self.bins_per_batch)
            self._bin_counts[epoch] = bins
        return self._bin_counts[epoch]


def _leave_signals_to_the_trainer(_worker: int) -> None:
    """Ignore stop signals to the process group, so that the trainer can finish its last step."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """Kill running workers: the interpreter would send a SIGTERM and wait forever."""
    for worker in _WORKERS:
        if worker.is_alive():
            worker.kill()


class _Joined:
    """Several collections as one, with consecutive indices."""

    def __init__(self, parts: Sequence[Sequences]) -> None:
        self.parts, self.vocabulary = parts, parts[0].vocabulary
        if any(part.vocabulary != self.vocabulary for part in parts):
            raise DataError("the collections have different alphabets; prepare all with the same")
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.firsts = np.cumsum([0, *(len(part.lengths) for part in parts[:-1])])

    def __reduce__(self) -> tuple[Any, ...]:
        return _Joined, (self.parts,)  # a spawned worker maps the lengths itself

    def copy_into(self, row: Tokens, windows: Windows) -> None:
        which = np.searchsorted(self.firsts, windows.indices, side="right") - 1
        for number, (part, first) in enumerate(zip(self.parts, self.firsts, strict=True)):
            own = Windows(*(column[which == number] for column in windows))
            part.copy_into(row, own._replace(indices=own.indices - first))


def _drawn(collections: Sequence[Collection], most: int) -> DrawnRelatives:
    known = [c.relatives for c in collections if c.relatives is not None]
    if len(known) < len(collections):
        raise DataError(
            "the relatives of the training proteins are not known; prepare them with "
            "relatives_sensitivity=1, or train with max_relatives=0"
        )
    sizes = [len(collection.sequences.lengths) for collection in collections]
    return DrawnRelatives(known, np.cumsum([0, *sizes[:-1]]), most)


def _part(collection: Collection) -> Part:
    clusters = collection.sequences.clusters if collection.by_cluster else None
    if collection.by_cluster and clusters is None:
        raise DataError(
            "the training store has no clusters to sample by; prepare it with d2plm prepare, or "
            "use sampling=sequence"
        )
    return Part(len(collection.sequences.lengths), clusters, collection.weight)


def pack_all(
    sequences: Sequence[Tokens],
    token_budget: int,
    max_length: int,
    relatives: Sequence[Sequence[NDArray[np.uint8]]] | None = None,
) -> list[PackedBatch]:
    """Pack every sequence once, in batches of one shape; draws are keyed by a sequence's index.

    Raises `DataError` if there are no sequences.

    Args:
        sequences: tokens; sequences too long for `max_length` are cut at their end.
        token_budget: tokens of a batch; raised to `max_length`, reduced to the total.
        max_length: tokens of a sequence, `<cls>` and `<eos>` included.
        relatives: residue tokens of the relatives of each sequence, cut by `aligned_part`; None for
            batches without.
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
            max_seqlen=max_length,
            relatives=None
            if relatives is None
            else Relatives.pack(
                [
                    [aligned_part(own, tokens[int(i)]) for own in relatives[i]]
                    for i in packed.sequences
                ]
            ),
        )
        for (packed,) in sampler.plan(0).batches(1)
    ]


def framed(tokens: Tokens) -> Tokens:
    """`<cls>` tokens `<eos>`."""
    return np.concatenate([[CLS], tokens, [EOS]], dtype=tokens.dtype, casting="unsafe")
