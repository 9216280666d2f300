"""PackedLoader: resumable at every batch, the same on any number of ranks and workers.

And the random residues that stand in for a store.
"""

import json
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from d2plm.core.batch import PackedBatch
from d2plm.core.errors import ConfigError, DataError
from d2plm.core.vocabulary import CANONICAL, CLS, EOS, decode
from d2plm.data.loader import Collection, GlobalBatch, PackedLoader, Position, pack_all
from d2plm.data.store import SequenceStore, Windows
from d2plm.data.synthetic import SyntheticSequences
from tests.commands import python_c
from tests.conftest import write_store

MAX_LENGTH, BUDGET = 128, 512

Segment = tuple[int, bytes]


def loader(*stores: SequenceStore | SyntheticSequences, **changes: Any) -> PackedLoader:
    settings: dict[str, Any] = {"token_budget": BUDGET, "max_length": MAX_LENGTH, **changes}
    return PackedLoader([Collection(store) for store in stores], **settings)


def content(batch: GlobalBatch) -> list[Any]:
    """All of a batch, in a form that compares."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    fields = [{name: plain(one) for name, one in vars(row).items()} for row in batch.micro_batches]
    return [fields, batch.following, batch.segment_lengths]


def segments(batches: list[PackedBatch]) -> dict[int, Segment]:
    """Draw id → (sequence, its tokens), of every sequence of a global batch."""
    found: dict[int, Segment] = {}
    for packed in batches:
        for place, row in enumerate(packed.split()):
            draw = int(packed.draw_ids[place])
            assert draw not in found
            found[draw] = (int(packed.sequence_ids[place]), row.numpy().tobytes())
    return found


def drawn(batches: list[GlobalBatch]) -> list[Segment]:
    """(sequence, its tokens) of every segment."""
    return [segment for batch in batches for segment in segments(batch.micro_batches).values()]


def rest_of_epoch(stream: Iterator[GlobalBatch], epoch: int) -> list[GlobalBatch]:
    """The batches of a stream until `epoch`, in which it starts, is over."""
    batches = []
    for batch in stream:
        batches.append(batch)
        if batch.following.epoch > epoch:
            return batches
    raise AssertionError("a stream has no end")


def test_an_epoch_gives_each_sequence_once_framed_or_cropped(tiny_store: SequenceStore) -> None:
    windows = []
    for epoch in (0, 1):
        seen: dict[int, int] = {}
        for index, raw in drawn(rest_of_epoch(loader(tiny_store).stream(Position(epoch)), epoch)):
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


@pytest.mark.parametrize("max_length", [3, 21, 22])
def test_windows_start_anywhere_with_equal_chances_and_frame_true_ends_alone(
    max_length: int, make_store: Callable[[list[np.ndarray]], SequenceStore]
) -> None:
    protein = np.arange(4, 24, dtype=np.uint8)  # every residue once: a window shows its start
    stream = loader(
        make_store([protein]), max_length=max_length, token_budget=max(max_length, 16)
    ).stream(Position())
    rows = [batch.micro_batches[0].split()[0].tolist() for batch in islice(stream, 200)]
    whole = [CLS, *protein.tolist(), EOS]
    starts = range(len(whole) - max_length + 1)
    counts = [rows.count(whole[start : start + max_length]) for start in starts]
    assert sum(counts) == len(rows)
    assert len(counts) == 1 or chisquare(counts).pvalue > 1e-3


def test_a_long_sequence_shows_another_window_for_each_draw_of_an_epoch_and_each_seed() -> None:
    parts = [SyntheticSequences(np.array(lengths, np.int32)) for lengths in ([5000], [60] * 99)]
    collections = [Collection(one, 1.0) for one in parts]
    windows = list[bytes]()
    for seed in (0, 1):
        ours = PackedLoader(collections, token_budget=256, max_length=64, seed=seed)
        batches = [*islice(ours.stream(Position()), ours.batches_in_epoch(0))]
        windows += [tokens for index, tokens in drawn(batches) if index == 0]
    assert len(windows) == 2 * 50
    assert len({*windows}) > 2 * 40


@given(st.integers(1, 4), st.builds(Position, st.integers(0, 3), st.just(0)), st.integers(0, 120))
def test_a_resumed_stream_continues_where_the_uninterrupted_one_was(
    tiny_store: SequenceStore, micro_batches: int, start: Position, done: int
) -> None:
    unbroken = loader(tiny_store, micro_batches=micro_batches).stream(start)
    position = start
    for batch in islice(unbroken, done):
        position = batch.following
    resumed = loader(tiny_store, micro_batches=micro_batches).stream(position)
    for expected, found in islice(zip(unbroken, resumed, strict=True), 3):
        assert content(found) == content(expected)


def test_positions_count_bins_and_start_each_epoch_at_zero(tiny_store: SequenceStore) -> None:
    first = loader(tiny_store, micro_batches=2)
    count = first.batches_in_epoch(0)
    following = [batch.following for batch in islice(first.stream(Position()), count + 1)]
    bins = [Position(0, 2 * i) for i in range(1, count)]
    assert following == [*bins, Position(1, 0), Position(1, 2)]
    assert first.epochs_done(Position(3, 2)) == pytest.approx(3 + 1 / first.batches_in_epoch(3))


@pytest.mark.parametrize(("world_size", "micro_batches"), [(2, 2), (4, 1)])
def test_ranks_cut_a_batch(tiny_store: SequenceStore, world_size: int, micro_batches: int) -> None:
    reference = loader(tiny_store, micro_batches=4).stream(Position())
    cut = {"micro_batches": micro_batches, "world_size": world_size}
    ranks = [loader(tiny_store, rank=rank, **cut).stream(Position()) for rank in range(world_size)]
    for expected in rest_of_epoch(reference, 0):
        parts = [next(rank) for rank in ranks]
        together = [packed for part in parts for packed in part.micro_batches]
        assert len(together) == 4
        assert segments(together) == segments(expected.micro_batches)
        assert {part.following for part in parts} == {expected.following}
        sizes = {packed.global_sequences for packed in together}
        assert sizes == {len(segments(together))}


@given(
    before=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    done=st.integers(0, 20),
    count=st.integers(1, 120),
)
def test_after_resharding_the_epoch_ends_with_the_sequences_not_yet_seen(
    proteins: list[Any], before: tuple[int, int], after: tuple[int, int], done: int, count: int
) -> None:
    """Ranks and micro-batches change in the middle of an epoch: none is lost, none comes twice."""
    sequences = SyntheticSequences(np.array([len(tokens) for tokens in proteins[:count]]))

    def ranks(cut: tuple[int, int], start: Position) -> list[Iterator[GlobalBatch]]:
        shape = {"world_size": cut[0], "micro_batches": cut[1]}
        return [loader(sequences, rank=rank, **shape).stream(start) for rank in range(cut[0])]

    seen: list[Segment] = []
    position = Position()
    for parts in islice(zip(*ranks(before, position), strict=True), done):
        assert {len(part.micro_batches) for part in parts} == {before[1]}
        seen += drawn(list(parts))
        position = parts[0].following
        if position.epoch > 0:
            break
    if position.epoch == 0:
        rests = [rest_of_epoch(rank, 0) for rank in ranks(after, position)]
        assert len({len(rest) for rest in rests}) == 1
        seen += [segment for rest in rests for segment in drawn(rest)]
    assert sorted(index for index, _ in seen) == list(range(count))
    # The windows, too, are those of the unbroken epoch.
    assert dict(seen) == dict(drawn(rest_of_epoch(loader(sequences).stream(Position()), 0)))


@pytest.mark.parametrize(("method", "num_workers"), [("fork", 2), ("spawn", 1)])
def test_worker_processes_change_nothing(
    tiny_store: SequenceStore, proteins: list[Any], tmp_path: Path, method: str, num_workers: int
) -> None:
    default = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        stores = (tiny_store, write_store(tmp_path / "other", proteins[200:220]))
        ours = loader(*stores, micro_batches=2)
        sent = pickle.dumps(ours.dataset)  # where the stores are, and not their content
        assert tiny_store.lengths.tobytes() not in sent
        start = Position(0, 2 * ours.batches_in_epoch(0) - 6)  # goes on into the next epoch
        here = ours.stream(start)
        there = loader(*stores, micro_batches=2, num_workers=num_workers).stream(start)
        for _ in range(8):
            assert content(next(there)) == content(next(here))
    finally:
        multiprocessing.set_start_method(default, force=True)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_store_that_cannot_be_read_is_named_in_one_line(num_workers: int) -> None:
    class Damaged(SyntheticSequences):
        def copy_into(self, *_: object) -> NoReturn:
            raise DataError("runs/data.mdb: damaged; prepare the data again")

    damaged = Damaged(np.array([30, 40], dtype=np.int32))
    with pytest.raises(DataError, match=r"^runs/data\.mdb: damaged; prepare the data again$"):
        next(loader(damaged, num_workers=num_workers).stream(Position()))


def test_packing_all_gives_each_sequence_under_its_index(proteins: list[np.ndarray]) -> None:
    sequences = proteins[:40]
    batches = pack_all(sequences, token_budget=2048, max_length=300)
    for packed in batches:
        assert torch.equal(packed.draw_ids, packed.sequence_ids)
    whole = [bytes([CLS, *tokens[:298].tolist(), EOS]) for tokens in sequences]
    assert segments(batches) == {i: (i, row) for i, row in enumerate(whole)}
    assert len({packed.num_tokens for packed in batches}) == 1
    with pytest.raises(DataError, match="no sequences"):
        pack_all([], token_budget=2048, max_length=300)


@pytest.mark.parametrize(
    "changes", [{"num_workers": -1}, {"micro_batches": 0}, {"token_budget": 9}]
)
def test_impossible_settings_are_named(tiny_store: SequenceStore, changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        loader(tiny_store, **changes)
    assert caught.value.settings == changes


def test_a_stream_that_is_not_ended_does_not_keep_the_interpreter_from_ending() -> None:
    program = (
        "import builtins, numpy\n"
        "from d2plm.data import loader\n"
        "from d2plm.data.synthetic import SyntheticSequences\n"
        "store = SyntheticSequences(numpy.full(64, 100, dtype=numpy.int32))\n"
        "shape = {'token_budget': 512, 'max_length': 128, 'num_workers': 2}\n"
        "made = loader.PackedLoader([loader.Collection(store)], **shape)\n"
        "builtins.kept = made.stream(loader.Position())\n"
        "next(builtins.kept)\n"
        "print([worker.pid for worker in loader._WORKERS])\n"
    )
    result = python_c(program, seconds=60)
    assert result.returncode == 0
    workers = json.loads(result.stdout)
    assert len(workers) == 2
    for worker in workers:  # ended, whether or not they were joined
        stat = Path(f"/proc/{worker}/stat")
        assert not stat.exists() or stat.read_text().rpartition(") ")[2][0] == "Z"


LENGTHS = np.array([1, 5, 300, 2, 77], dtype=np.int32)


def test_sequences_have_their_lengths_and_residues_are_canonical_and_equally_frequent() -> None:
    lengths = np.array([1, 5, 300, 2, 77, *[500] * 200], dtype=np.int32)
    synthetic = SyntheticSequences(lengths)
    sequences = [synthetic[i] for i in range(len(synthetic))]
    assert [len(tokens) for tokens in sequences] == lengths.tolist()
    counts = np.bincount(np.concatenate(sequences))
    assert {*decode(np.flatnonzero(counts).astype(np.uint8))} == {*CANONICAL}
    assert chisquare(counts[counts > 0]).pvalue > 1e-3
    assert len({tokens.tobytes() for tokens in sequences[5:]}) == 200


def test_residues_and_digest_are_functions_of_seed_and_lengths() -> None:
    first, again = SyntheticSequences(LENGTHS), SyntheticSequences(LENGTHS)
    other, longer = SyntheticSequences(LENGTHS, seed=1), SyntheticSequences(LENGTHS + 1)
    assert all(np.array_equal(first[i], again[i]) for i in range(len(LENGTHS)))
    assert not np.array_equal(first[2], other[2])
    assert first.digest == again.digest
    assert len({first.digest, other.digest, longer.digest}) == 3


def test_windows_are_those_of_the_whole_sequences() -> None:
    synthetic = SyntheticSequences(LENGTHS)
    row = np.zeros(40, dtype=np.uint8)
    windows = ([2, 0, 4], [290, 0, 3], [10, 1, 5], [1, 20, 30])
    synthetic.copy_into(row, Windows(*map(np.array, windows)))
    expected = np.zeros(40, dtype=np.uint8)
    expected[1:11] = synthetic[2][290:]
    expected[20] = synthetic[0][0]
    expected[30:35] = synthetic[4][3:8]
    assert row.tolist() == expected.tolist()
