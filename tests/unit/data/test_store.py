"""SequenceStore: round trips, sharing between processes, and every kind of damage."""

import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import ESM2_TOKENS, encode
from d2plm.data.store import MAX_RESIDUES, SequenceStore, Windows
from d2plm.data.store_writer import SequenceStoreWriter
from tests.conftest import Logged, MonkeyPatch, write_store

ROOT = Path(__file__).parents[3]
BLOCK = 1024  # sequences in a value of the database, part of the format
SEQUENCES = [encode("MKV"), encode("ACDEFGHIKLMNPQRSTVWY"), encode("XBUZO"), encode("L" * 6000)]
FILES = ["data.mdb", "lengths.npy", "offsets.npy", "clusters.npy", "manifest.json"]


def _write(path: Path, sequences: list[np.ndarray] = SEQUENCES, **provenance: object) -> Path:
    with SequenceStoreWriter(path, kind="raw", provenance=provenance) as writer:
        names = [b"protein%d" % index for index in range(len(sequences))]
        writer.extend(names, [tokens.tobytes() for tokens in sequences])
    return path


def _write_with_clusters(path: Path) -> Path:
    return write_store(path, SEQUENCES, [7, 7, 1, 2]).path


def _change_manifest(path: Path, **changes: object) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        SequenceStore(path)[0]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _many() -> list[np.ndarray]:
    """Different sequences, enough for two blocks and a part of a third."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 300, 2 * BLOCK + 452)
    return np.split(draw.integers(4, 24, lengths.sum(), dtype=np.uint8), lengths.cumsum()[:-1])


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> SequenceStore:
    """A store of several blocks."""
    return SequenceStore(_write(tmp_path_factory.mktemp("several") / "s", _many()))


def test_round_trip(several: SequenceStore, tmp_path: Path) -> None:
    store = SequenceStore(_write(tmp_path / "s", source="here"))
    assert [tokens.tolist() for tokens in store] == [tokens.tolist() for tokens in SEQUENCES]
    store[-1][:] = 0  # a copy
    np.testing.assert_array_equal(store[-1], SEQUENCES[-1])
    for index in (4, -5):
        with pytest.raises(IndexError):
            store[index]
    assert (store.lengths.dtype.name, store.lengths.tolist()) == ("int32", [3, 20, 5, 6000])
    assert (store.clusters, store.residues, store.manifest["kind"]) == (None, 6028, "raw")
    assert store.manifest["alphabet"] == list(ESM2_TOKENS)
    assert store.manifest["provenance"] == {"source": "here"}
    clusters = SequenceStore(_write_with_clusters(tmp_path / "t")).clusters
    assert clusters is not None
    assert (clusters.dtype.name, clusters.tolist()) == ("int32", [7, 7, 1, 2])
    # Several blocks, the last one partial or full.
    full = SequenceStore(_write(tmp_path / "full", _many()[:BLOCK]))
    full.verify()
    assert [len(block) for block in full.blocks()] == [BLOCK]
    expected, done = _many(), list[int]()
    for index in (0, BLOCK - 1, BLOCK, 2 * BLOCK, len(expected) - 1, -1, -BLOCK):
        np.testing.assert_array_equal(several[index], expected[index])
        assert several.name(index) == f"protein{index % len(expected)}"
    for block in several.blocks():
        own = expected[block.first : block.first + len(block)]
        assert all(np.array_equal(a, b) for a, b in zip(block, own, strict=True))
        assert np.array_equal(block.tokens, np.concatenate(own))
        assert block.bounds.tolist() == np.cumsum([0, *map(len, own)]).tolist()
    assert [*chain(*several.name_blocks())] == [b"protein%d" % i for i in range(len(expected))]
    several.verify(done.append)
    assert done == [BLOCK, 2 * BLOCK, len(several)]


# Which sequence, where in it a window begins and how much of the rest it has, and a gap before it.
SHARE, PLACE = st.floats(0, 1), st.floats(0, 1, exclude_max=True)
WINDOW = st.tuples(st.integers(0, 2 * BLOCK + 451), SHARE, SHARE, st.integers(0, 3))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(WINDOW, max_size=20))
def test_windows_are_copied_as_slices_would_be(
    several: SequenceStore, drawn: list[tuple[int, float, float, int]]
) -> None:
    expected, windows, place = _many(), list[tuple[int, int, int, int]](), 0
    row, wanted = np.zeros((2, 10_000), dtype=np.uint8)
    for index, begin, share, gap in drawn:
        start = round(begin * len(expected[index]))
        count, place = round(share * (len(expected[index]) - start)), place + gap
        wanted[place : place + count] = expected[index][start : start + count]
        windows.append((index, start, count, place))
        place += count
    several.copy_into(row, Windows(*np.array(windows, dtype=np.int64).reshape(-1, 4).T))
    np.testing.assert_array_equal(row, wanted)


def test_digests_are_of_lengths_tokens_and_names_block_by_block(tmp_path: Path) -> None:
    sequences = _many()
    tokens, names = hashlib.sha256(), hashlib.sha256()
    for first in range(0, len(sequences), BLOCK):
        block = sequences[first : first + BLOCK]
        tokens.update(b"".join(len(s).to_bytes(4, "big") for s in block))
        tokens.update(b"".join(s.tobytes() for s in block))
        names.update(b"".join(b"protein%d\n" % (first + i) for i in range(len(block))))
    store = SequenceStore(_write(tmp_path / "a", sequences))
    assert store.digest == store.manifest["digests"]["sequences"] == tokens.hexdigest()
    assert store.manifest["digests"]["names"] == names.hexdigest()
    assert SequenceStore(_write(tmp_path / "b", sequences[::-1])).digest != store.digest


def test_a_sequence_may_have_the_names_of_its_duplicates(tmp_path: Path) -> None:
    with SequenceStoreWriter(tmp_path / "s", kind="raw") as writer:
        writer.extend([b"P1\x01P2\x01P3", b"", b"nam\xe9"], [bytes(9)] * 3)
    store = SequenceStore(tmp_path / "s")
    assert [store.names(index) for index in range(3)] == [["P1", "P2", "P3"], [""], ["nam\ufffd"]]
    assert [store.name(index) for index in range(3)] == ["P1", "", "nam\ufffd"]
    assert list(store.name_blocks()) == [[b"P1\x01P2\x01P3", b"", b"nam\xe9"]]


def test_the_map_grows_and_the_file_stays_small(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("d2plm.data.store_writer._FIRST_MAP_BYTES", 1 << 16)
    monkeypatch.setattr("d2plm.data.store_writer._COMMIT_BYTES", 1 << 18)
    sequences = [np.full(200, 4 + i % 20, dtype=np.uint8) for i in range(9 * BLOCK)]
    store = SequenceStore(_write(tmp_path / "s", sequences))
    store.verify()
    assert (tmp_path / "s" / "data.mdb").stat().st_size < 1.01 * store.residues + (1 << 17)
    assert sorted(p.name for p in store.path.iterdir()) == [
        *("data.mdb", "lengths.npy", "manifest.json", "offsets.npy")
    ]


def _check_whole_store(store: SequenceStore) -> None:
    for tokens, expected in zip(store, _many(), strict=True):
        np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_passes_over_its_parents_open_store(several: SequenceStore, method: str) -> None:
    passing = several.blocks()
    next(passing)
    child = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]  # typeshed
        target=_check_whole_store, args=(several,)
    )
    with several._open().lock:  # which another thread may hold when this one forks
        child.start()
    child.join(120)
    assert child.exitcode == 0
    assert [block.first for block in passing] == [BLOCK, 2 * BLOCK]


@pytest.mark.parametrize(
    ("names", "tokens", "clusters", "named"),
    [
        ([], [], [], "no sequence"),
        ([b"two\nlines"], [bytes(9)], [7], "a line break"),
        ([b"right", b"wrong"], [bytes(9), b""], [7, 7], "'wrong' has 0"),
        ([b"right", b"wrong"], [bytes(9), bytes(MAX_RESIDUES + 1)], [7, 7], "'wrong' has 1,000"),
        ([b"right"], [bytes(9)], [7, 7], "2 clusters for 1"),
    ],
)
def test_what_no_store_takes_leaves_nothing(
    tmp_path: Path, names: list[bytes], tokens: list[bytes], clusters: list[int], named: str
) -> None:
    refused = pytest.raises(DataError, match=named)
    with refused, SequenceStoreWriter(tmp_path / "s", kind="raw") as writer:
        writer.extend(names, tokens)
        writer.set_clusters(clusters)
    assert not any(tmp_path.iterdir())


def test_a_file_system_without_locks_is_reported_once_and_used(
    tmp_path: Path, monkeypatch: MonkeyPatch, caplog: Logged
) -> None:
    refused = OSError(errno.ENOLCK, "Operation not supported")
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=refused))
    SequenceStore(_write(tmp_path / "s")).verify()
    assert len(caplog.records) == 1


def test_threads_read_at_random_while_others_pass_over_the_store(
    several: SequenceStore, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("d2plm.data.store._PASS_BYTES", 1)
    expected = _many()

    def read(seed: int) -> None:
        draw = np.random.default_rng(seed)
        while not all(turn.done() for turn in turns):
            index = int(draw.integers(len(expected)))
            np.testing.assert_array_equal(several[index], expected[index])
            assert several.name(index) == f"protein{index}"
            row = np.zeros(len(expected[index]), dtype=np.uint8)
            several.copy_into(row, Windows(*np.array([[index, 0, len(row), 0]]).T))
            np.testing.assert_array_equal(row, expected[index])

    with ThreadPoolExecutor(9) as pool:
        turns = [pool.submit(several.verify) for _ in range(6)]
        for one in [*turns, *(pool.submit(read, seed) for seed in range(3))]:
            one.result()


def test_a_store_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    old = SequenceStore(path)
    with pytest.raises(RuntimeError), SequenceStoreWriter(path, kind="raw") as writer:
        writer.extend([b"p"], [bytes(9)])
        raise RuntimeError("stop")
    assert len(SequenceStore(path)) == 4
    np.testing.assert_array_equal(old[0], SEQUENCES[0])
    _write(path, SEQUENCES[2:])
    np.testing.assert_array_equal(SequenceStore(path)[0], SEQUENCES[2])
    np.testing.assert_array_equal(old[0], SEQUENCES[0])
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    with pytest.raises(DataError, match="was replaced"):
        list(old)


WAITING = """
import signal, sys
from pathlib import Path
from d2plm.data import store_writer
store_writer._COMMIT_BYTES = 1
with store_writer.SequenceStoreWriter(Path(sys.argv[1]), kind="raw") as writer:
    for _ in range(2048):
        writer.extend([b"p"], [bytes(9)])
    print("writing", flush=True)
    signal.pause()
"""


def test_a_writer_in_another_process_is_waited_for_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, str(path)], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        for unfinished in (path, tmp_path / "partial.s"):
            assert str(unfinished) in _refusal(unfinished)
        threading.Timer(0.1, process.kill).start()
        SequenceStore(_write(path)).verify()
        assert process.wait() == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


# The database outgrows it; the lengths do, before that.
@pytest.mark.parametrize(("limit", "length"), [(200_000, 9000), (30_000, 1)])
def test_no_room_on_the_disk(tmp_path: Path, limit: int, length: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        refused = pytest.raises(DataError, match="cannot be written")
        with refused, SequenceStoreWriter(tmp_path / "s", kind="raw") as writer:
            for _ in range(20):
                writer.extend([b"p"] * BLOCK, [bytes(length)] * BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


def test_a_place_that_no_store_may_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "thesis.txt" / "s", tmp_path / ("x" * 300)):
        with pytest.raises(DataError, match="written"):
            _write(place)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    for place in (tmp_path / "none", tmp_path / ("x" * 300)):
        assert str(place) in _refusal(place)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    *((lambda path, file=file: (path / file).unlink(), file) for file in FILES),
    *((lambda path, file=file: _cut(path / file, 0), file) for file in FILES),
    *((lambda path, file=file: _cut(path / file, 0.98), file) for file in FILES),
    (lambda path: _change_manifest(path, format_version=99), "version"),
    (lambda path: _change_manifest(path, format="other"), "manifest"),
    (lambda path: _change_manifest(path, alphabet=["A"]), "alphabet"),
    (lambda path: _change_manifest(path, sequences=5), "lengths.npy"),
    (lambda path: _change_manifest(path, residues=None), "damaged"),
    (lambda path: _change_manifest(path, digests={}), "damaged"),
]


def _cut(file: Path, share: float) -> None:
    os.truncate(file, int(share * file.stat().st_size))


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], object], named: str) -> None:
    path = _write_with_clusters(tmp_path / "s")
    damage(path)
    assert named in _refusal(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES[1:]), place=PLACE, change=st.binary(min_size=1, max_size=8))
@example(file="lengths.npy", place=0, change=b"PK\x03\x04")
def test_changed_bytes_do_no_harm(tmp_path: Path, file: str, place: float, change: bytes) -> None:
    path = tmp_path / "s"
    if not path.exists():
        _write_with_clusters(path)
    whole = (path / file).read_bytes()
    position = int(place * len(whole))
    damaged = whole[:position] + change + whole[position + len(change) :]
    (path / file).write_bytes(damaged)
    with suppress(DataError):
        store = SequenceStore(path)
        store.verify()
        for tokens, expected in zip(store, SEQUENCES, strict=True):
            np.testing.assert_array_equal(tokens, expected)
    (path / file).write_bytes(whole)


def _flip(path: Path, at: bytes, beyond: int) -> None:
    data = bytearray((path / "data.mdb").read_bytes())
    data[data.index(at) + beyond] ^= 1
    (path / "data.mdb").write_bytes(data)


def _save(path: Path, file: str, values: list[int]) -> None:
    np.save(path / file, np.array(values, dtype=np.int32))


def _digest(path: Path, what: str) -> None:
    digests = SequenceStore(path).manifest["digests"]
    _change_manifest(path, digests=digests | {what: "0" * 64})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: _flip(path, SEQUENCES[1].tobytes(), 0), "sequences are not those"),
        (lambda path: _flip(path, b"\x78\x01", 9), "damaged"),  # within zlib's stream of names
        (lambda path: (path / "data.mdb").write_bytes(os.urandom(1 << 15)), "damaged"),
        (lambda path: _save(path, "lengths.npy", [4, 20, 5, 6000]), "lengths.npy"),
        (lambda path: _save(path, "lengths.npy", [4, 19, 5, 6000]), "offsets.npy"),
        (lambda path: _save(path, "clusters.npy", [7, 7, 1, 1]), "clusters are not those"),
        (lambda path: _change_manifest(path, residues=6029), "counts"),
        *(
            (lambda path, what=what: _digest(path, what), f"{what} are not those")
            for what in ("sequences", "names", "clusters")
        ),
    ],
)
def test_verify_finds(tmp_path: Path, damage: Callable[[Path], object], named: str) -> None:
    path = _write_with_clusters(tmp_path / "s")
    damage(path)
    with pytest.raises(DataError, match=named):
        SequenceStore(path).verify()


def test_a_window_beyond_the_data_is_rejected(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    np.save(path / "offsets.npy", np.array([0, 3, 23, 6027], dtype=np.uint32))
    store, one = SequenceStore(path), np.array([[3, 0, 6000, 0]]).T
    with pytest.raises(DataError, match="damaged"):
        store.copy_into(np.zeros(9000, dtype=np.uint8), Windows(*one))
    with pytest.raises(DataError, match="damaged"):
        store[3]


def test_a_pickled_store_has_no_open_file_and_a_replaced_one_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    read = SequenceStore(path)
    np.testing.assert_array_equal(read[3], SEQUENCES[3])
    carried = pickle.dumps(read)
    assert len(carried) < 500
    np.testing.assert_array_equal(pickle.loads(carried)[3], SEQUENCES[3])
    _write(path, SEQUENCES[::-1])
    with pytest.raises(DataError, match="was replaced"):
        pickle.loads(carried)
