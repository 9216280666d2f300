"""PackedLoader: resumable at every batch, the same on any number of ranks and workers."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from d2plm.alphabet import CLS, EOS
from d2plm.batch import PackedBatch
from d2plm.data.loader import GlobalBatch, PackedLoader, Position, framed
from d2plm.data.prefetch import prefetch
from d2plm.data.store import SequenceStore
from d2plm.errors import ConfigError

MAX_LENGTH, BUDGET = 128, 512

Segments = dict[int, tuple[int, bytes]]


def loader(store: SequenceStore, **changes: Any) -> PackedLoader:
    settings: dict[str, Any] = {"token_budget": BUDGET, "max_length": MAX_LENGTH, **changes}
    return PackedLoader(store, **settings)


def content(batch: GlobalBatch) -> list[list[bytes]]:
    return [
        [
            tensor.numpy().tobytes()
            for tensor in vars(packed).values()
            if isinstance(tensor, torch.Tensor)
        ]
        for packed in batch.micro_batches
    ]


def segments(batches: list[PackedBatch]) -> Segments:
    """Draw id → (sequence, its tokens), of every sequence of a global batch."""
    found: Segments = {}
    for packed in batches:
        for place, row in enumerate(packed.split()):
            draw = int(packed.draw_ids[place])
            assert draw not in found
            found[draw] = (int(packed.sequence_ids[place]), row.numpy().tobytes())
    return found


def epoch(stream: Iterator[GlobalBatch], number: int) -> list[GlobalBatch]:
    """The batches of epoch `number` of a stream that starts at it."""
    batches = []
    for batch in stream:
        batches.append(batch)
        if batch.following.epoch > number:
            return batches
    raise AssertionError("a stream has no end")


def test_a_resumed_stream_goes_on_where_the_unbroken_one_was(tiny_store: SequenceStore) -> None:
    count = loader(tiny_store, micro_batches=2).batches_in_epoch(0)
    unbroken = list(islice(loader(tiny_store, micro_batches=2).stream(Position()), 2 * count + 3))
    for done in (1, 2, count - 1, count, count + 1, 2 * count):
        start = unbroken[done - 1].following
        resumed = loader(tiny_store, micro_batches=2).stream(start)
        for expected, found in zip(unbroken[done:], resumed, strict=False):
            assert content(found) == content(expected)
            assert found.following == expected.following


def test_positions_count_batches_and_start_each_epoch_at_zero(tiny_store: SequenceStore) -> None:
    first = loader(tiny_store)
    count = first.batches_in_epoch(0)
    following = [batch.following for batch in islice(first.stream(Position()), count + 1)]
    assert following[: count - 1] == [Position(0, i) for i in range(1, count)]
    assert following[count - 1 :] == [Position(1, 0), Position(1, 1)]


def test_an_epoch_gives_each_sequence_once_framed_or_cropped_inside_it(
    tiny_store: SequenceStore,
) -> None:
    windows = []
    for number in (0, 1):
        seen: dict[int, int] = {}
        for batch in epoch(loader(tiny_store).stream(Position(number, 0)), number):
            for index, raw in segments(batch.micro_batches).values():
                row = np.frombuffer(raw, dtype=np.uint8)
                whole = np.array([CLS, *tiny_store[index], EOS], dtype=np.uint8)
                assert len(row) == min(len(whole), MAX_LENGTH)
                views = np.lib.stride_tricks.sliding_window_view(whole, len(row))
                starts = np.flatnonzero((views == row).all(axis=1))
                assert len(starts) > 0
                assert index not in seen
                seen[index] = int(starts[0])
        assert sorted(seen) == list(range(len(tiny_store)))
        windows.append(seen)
    cropped = [i for i in range(len(tiny_store)) if tiny_store.lengths[i] + 2 > MAX_LENGTH]
    assert len(cropped) > 50
    moved = [i for i in cropped if windows[0][i] != windows[1][i]]
    assert len(moved) > 0.9 * len(cropped)


def test_windows_reach_both_ends_of_a_long_protein(
    make_store: Callable[[list[np.ndarray]], SequenceStore],
) -> None:
    protein = np.arange(4, 24, dtype=np.uint8)  # 22 tokens, windows of 20: starts 0, 1, 2
    store = make_store([protein])
    stream = loader(store, max_length=20, token_budget=20).stream(Position())
    rows = [bytes(batch.micro_batches[0].split()[0].tolist()) for batch in islice(stream, 90)]
    whole = bytes([CLS, *protein, EOS])
    counts = [rows.count(whole[start : start + 20]) for start in range(3)]
    assert sum(counts) == 90
    assert min(counts) > 15


@pytest.mark.parametrize(("world_size", "micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_ranks_partition_the_same_global_batch(
    tiny_store: SequenceStore, world_size: int, micro_batches: int
) -> None:
    reference = loader(tiny_store, micro_batches=4).stream(Position())
    ranks = [
        loader(tiny_store, micro_batches=micro_batches, rank=rank, world_size=world_size).stream(
            Position()
        )
        for rank in range(world_size)
    ]
    for _ in range(8):
        expected = next(reference)
        parts = [next(rank) for rank in ranks]
        together = [packed for part in parts for packed in part.micro_batches]
        assert len(together) == 4
        assert segments(together) == segments(expected.micro_batches)
        assert {part.following for part in parts} == {expected.following}
        sizes = {packed.global_sequences for packed in together}
        assert sizes == {len(segments(together))}


def test_every_batch_has_the_same_shapes(tiny_store: SequenceStore) -> None:
    shapes = {
        (packed.tokens.shape, packed.cu_seqlens.shape, packed.sequence_ids.shape, packed.max_seqlen)
        for batch in islice(loader(tiny_store, micro_batches=3).stream(Position()), 40)
        for packed in batch.micro_batches
    }
    assert len(shapes) == 1


def test_a_worker_process_changes_nothing(tiny_store: SequenceStore) -> None:
    here = loader(tiny_store).stream(Position(0, 2))
    there = loader(tiny_store, num_workers=1).stream(Position(0, 2))
    for _ in range(5):
        assert content(next(here)) == content(next(there))


def test_prefetching_on_a_cpu_passes_the_batches_through(tiny_store: SequenceStore) -> None:
    plain = loader(tiny_store).stream(Position())
    fetched = prefetch(loader(tiny_store).stream(Position()), torch.device("cpu"))
    for _ in range(3):
        assert content(next(plain)) == content(next(fetched))


def test_framing_adds_both_ends_and_cuts_a_window_of_the_whole() -> None:
    residues = np.arange(4, 10, dtype=np.uint8)
    assert framed(residues).tolist() == [CLS, 4, 5, 6, 7, 8, 9, EOS]
    assert framed(residues, 0, 4).tolist() == [CLS, 4, 5, 6]
    assert framed(residues, 4, 4).tolist() == [7, 8, 9, EOS]
    assert framed(residues, 1, 4).tolist() == [4, 5, 6, 7]


def test_a_negative_number_of_workers_is_refused_by_name(tiny_store: SequenceStore) -> None:
    with pytest.raises(ConfigError, match=r"data\.num_workers"):
        loader(tiny_store, num_workers=-1)
