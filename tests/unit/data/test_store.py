"""SequenceStore: round trips, sharing between processes, and every kind of damage."""

import errno
import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from tests.conftest import write_store

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


@contextmanager
def _one_line() -> Iterator[None]:
    """Checks the message of a `DataError`, if there is one."""
    try:
        yield
    except DataError as error:
        if "\n" in str(error):
            raise AssertionError(str(error)) from error
        raise


def _refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        SequenceStore(path)[0]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _write_named(path: Path, name: bytes, tokens: bytes) -> Path:
    with SequenceStoreWriter(path, kind="raw") as writer:
        writer.extend([name], [tokens])
    return path


def _many() -> list[np.ndarray]:
    """Different sequences, enough for two blocks and a part of a third."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 300, 2 * BLOCK + 452)
    return np.split(draw.integers(4, 24, lengths.sum(), dtype=np.uint8), lengths.cumsum()[:-1])


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> SequenceStore:
    """A store of several blocks."""
    return SequenceStore(_write(tmp_path_factory.mktemp("several") / "s", _many()))


def test_round_trip(tmp_path: Path) -> None:
    store = SequenceStore(_write(tmp_path / "s", source="here"))
    assert len(store) == 4
    for index, (tokens, expected) in enumerate(zip(store, SEQUENCES, strict=True)):
        assert tokens.dtype == np.uint8
        np.testing.assert_array_equal(tokens, expected)
        assert store.name(index) == f"protein{index}"
    np.testing.assert_array_equal(store[-1], SEQUENCES[-1])
    np.testing.assert_array_equal(store.lengths, [3, 20, 5, 6000])
    assert store.lengths.dtype == np.int32
    assert store.clusters is None
    assert store.residues == 6028
    assert store.manifest["kind"] == "raw"
    assert store.manifest["alphabet"] == list(ESM2_TOKENS)
    assert store.manifest["provenance"] == {"source": "here"}
    store.verify()


def test_reading_gives_a_copy(tmp_path: Path) -> None:
    store = SequenceStore(_write(tmp_path / "s"))
    store[0][:] = 0
    np.testing.assert_array_equal(store[0], SEQUENCES[0])


def test_index_out_of_range(tmp_path: Path) -> None:
    store = SequenceStore(_write(tmp_path / "s"))
    for index in (4, -5):
        with pytest.raises(IndexError):
            store[index]


def test_several_blocks_of_sequences_the_last_one_partial(several: SequenceStore) -> None:
    expected = _many()
    assert len(several) == len(expected) == 2 * BLOCK + 452
    np.testing.assert_array_equal(several.lengths, [len(tokens) for tokens in expected])
    for tokens, wanted in zip(several, expected, strict=True):
        np.testing.assert_array_equal(tokens, wanted)
    for index in (0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, len(expected) - 1, -1, -BLOCK):
        np.testing.assert_array_equal(several[index], expected[index])
        assert several.name(index) == f"protein{index % len(expected)}"
    several.verify()


def test_blocks_say_where_their_sequences_begin(several: SequenceStore) -> None:
    expected = _many()
    blocks = list(several.blocks())
    assert [(block.first, len(block)) for block in blocks] == [
        *((0, BLOCK), (BLOCK, BLOCK), (2 * BLOCK, 452))
    ]
    for block in blocks:
        for place, tokens in enumerate(block):
            wanted = expected[block.first + place]
            np.testing.assert_array_equal(tokens, wanted)
            begin, end = block.bounds[place : place + 2]
            np.testing.assert_array_equal(block.tokens[begin:end], wanted)
        assert block.bounds[-1] == len(block.tokens)


def test_names_come_in_the_same_blocks(several: SequenceStore) -> None:
    blocks = list(several.name_blocks())
    assert [len(names) for names in blocks] == [BLOCK, BLOCK, 452]
    assert list(chain(*blocks)) == [b"protein%d" % index for index in range(len(several))]


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_full_and_partial_last_blocks(tmp_path: Path, count: int) -> None:
    store = SequenceStore(_write(tmp_path / "s", _many()[:count]))
    store.verify()
    assert len(store) == sum(len(block) for block in store.blocks()) == count
    np.testing.assert_array_equal(store[count - 1], _many()[count - 1])


def test_the_store_does_not_depend_on_how_sequences_are_handed_over(tmp_path: Path) -> None:
    sequences = _many()
    names = [b"protein%d" % index for index in range(len(sequences))]
    with SequenceStoreWriter(tmp_path / "s", kind="raw") as writer:
        for begin, end in ((0, 1), (1, 1500), (1500, 1500), (1500, 2500)):
            writer.extend(names[begin:end], [tokens.tobytes() for tokens in sequences[begin:end]])
    one_by_one = SequenceStore(_write(tmp_path / "t", sequences))
    assert SequenceStore(tmp_path / "s").manifest["digests"] == one_by_one.manifest["digests"]


def _windows(lengths: list[int]) -> st.SearchStrategy[list[tuple[int, int, int, int]]]:
    """(sequence, first residue, residues, gap before it in the row) of some windows."""

    @st.composite
    def window(draw: st.DrawFn) -> tuple[int, int, int, int]:
        index = draw(st.integers(0, len(lengths) - 1))
        start = draw(st.integers(0, lengths[index]))
        count = draw(st.integers(0, lengths[index] - start))
        return index, start, count, draw(st.integers(0, 3))

    return st.lists(window(), max_size=20)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_windows_are_copied_as_slices_would_be(several: SequenceStore, data: st.DataObject) -> None:
    expected = _many()
    windows = data.draw(_windows([len(tokens) for tokens in expected]))
    places, wanted = [], np.zeros(10_000, dtype=np.uint8)
    place = 0
    for index, start, count, gap in windows:
        place += gap
        places.append(place)
        wanted[place : place + count] = expected[index][start : start + count]
        place += count
    row = np.zeros_like(wanted)
    indices, starts, counts = (
        np.array([window[column] for window in windows], dtype=np.int64) for column in range(3)
    )
    several.copy_into(row, Windows(indices, starts, counts, np.array(places, dtype=np.int64)))
    np.testing.assert_array_equal(row, wanted)


def test_a_window_beyond_the_data_of_a_damaged_store_is_rejected(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    np.save(path / "offsets.npy", np.array([0, 3, 23, 6027], dtype=np.uint32))
    store, row = SequenceStore(path), np.zeros(9000, dtype=np.uint8)
    one = [np.array([value]) for value in (3, 0, 6000, 0)]
    with pytest.raises(DataError, match="damaged"):
        store.copy_into(row, Windows(*one))
    with pytest.raises(DataError, match="damaged"):
        store[3]
    with pytest.raises(DataError, match=r"offsets\.npy and lengths\.npy disagree"):
        store.verify()


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
        writer.extend(
            [b"P1\x01P2\x01P3", b"", b"nam\xe9"], [tokens.tobytes() for tokens in SEQUENCES[:3]]
        )
    store = SequenceStore(tmp_path / "s")
    assert [store.names(index) for index in range(3)] == [["P1", "P2", "P3"], [""], ["nam\ufffd"]]
    assert [store.name(index) for index in range(3)] == ["P1", "", "nam\ufffd"]
    assert list(store.name_blocks()) == [[b"P1\x01P2\x01P3", b"", b"nam\xe9"]]


def test_a_name_with_a_line_break_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a name holds a line break"):
        _write_named(tmp_path / "s", b"two\nlines", b"\x05")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("length", "said"), [(0, "0 residues"), (MAX_RESIDUES + 1, "1,000,001 residues")]
)
def test_a_sequence_that_no_store_takes_is_named(tmp_path: Path, length: int, said: str) -> None:
    with pytest.raises(DataError, match=f"'wrong' has {said}"):  # noqa: SIM117
        with SequenceStoreWriter(tmp_path / "s", kind="raw") as writer:
            writer.extend([b"right", b"wrong"], [bytes(9), bytes(length)])
    assert not any(tmp_path.iterdir())


def test_clusters_are_kept(tmp_path: Path) -> None:
    clusters = SequenceStore(_write_with_clusters(tmp_path / "s")).clusters
    assert clusters is not None
    assert clusters.dtype == np.int32
    assert clusters.tolist() == [7, 7, 1, 2]


def test_wrong_number_of_clusters_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 clusters for 4"):
        write_store(tmp_path / "s", SEQUENCES, [7])
    assert not any(tmp_path.iterdir())


def test_the_map_grows_and_the_file_does_not_exceed_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d2plm.data.store_writer._FIRST_MAP_BYTES", 1 << 16)
    monkeypatch.setattr("d2plm.data.store_writer._COMMIT_BYTES", 1 << 18)
    sequences = [np.full(200, 4 + i % 20, dtype=np.uint8) for i in range(9 * BLOCK)]
    store = SequenceStore(_write(tmp_path / "s", sequences))
    store.verify()
    assert (tmp_path / "s" / "data.mdb").stat().st_size < 1.01 * store.residues + (1 << 17)
    assert sorted(p.name for p in store.path.iterdir()) == [
        *("data.mdb", "lengths.npy", "manifest.json", "offsets.npy")
    ]


def _send_first(store: SequenceStore, connection: object) -> None:
    other = SequenceStore(store.path)
    connection.send((store[1].tolist(), other[1].tolist(), os.getpid()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_open_store_works_in_a_child_process(tmp_path: Path, method: str) -> None:
    store = SequenceStore(_write(tmp_path / "s"))
    _ = store[0]
    context = multiprocessing.get_context(method)
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(  # type: ignore[attr-defined]  # missing in typeshed
        target=_send_first, args=(store, sending)
    )
    with store._open().lock:  # which another thread may hold when this one forks
        child.start()
    assert receiving.poll(30)
    mine, other, pid = receiving.recv()
    child.join()
    assert pid != os.getpid()
    assert mine == other == store[1].tolist()


def test_a_store_that_was_moved_can_be_opened_where_it_is_now(tmp_path: Path) -> None:
    old = SequenceStore(_write(tmp_path / "s"))
    _ = old[0]
    (tmp_path / "s").rename(tmp_path / "t")
    SequenceStore(tmp_path / "t").verify()
    np.testing.assert_array_equal(old[1], SEQUENCES[1])


def _check_whole_store(store: SequenceStore) -> None:
    for tokens, expected in zip(store, _many(), strict=True):
        np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_passes_over_a_store_that_its_parent_is_in_the_middle_of(
    several: SequenceStore, method: str
) -> None:
    passing = several.blocks()
    next(passing)
    child = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]  # typeshed
        target=_check_whole_store, args=(several,)
    )
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert [block.first for block in passing] == [BLOCK, 2 * BLOCK]


def test_passes_and_random_reads_may_be_interleaved(
    several: SequenceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d2plm.data.store._PASS_BYTES", 1)  # the file is mapped anew for each block
    expected = _many()
    one, two, names = iter(several), several.blocks(), several.name_blocks()
    for index, tokens in enumerate(one):
        np.testing.assert_array_equal(tokens, expected[index])
        other = (index * 997) % len(expected)
        np.testing.assert_array_equal(several[other], expected[other])
        if index % 300 == 0:
            assert several.name(other) == f"protein{other}"
        if index % BLOCK == 500:
            block = next(two)
            assert len(next(names)) == len(block)
            np.testing.assert_array_equal(
                block.tokens[-1], expected[block.first + len(block) - 1][-1]
            )


def test_a_pass_that_is_broken_off_leaves_the_store_readable(several: SequenceStore) -> None:
    for _ in several:
        break
    np.testing.assert_array_equal(several[2000], _many()[2000])
    several.verify()


def test_threads_read_at_random_while_others_pass_over_the_store(
    several: SequenceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d2plm.data.store._PASS_BYTES", 1)
    expected = _many()
    stop, wrong = threading.Event(), list[str]()

    @contextmanager
    def told() -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            wrong.append(repr(error))

    def read(seed: int) -> None:
        draw = np.random.default_rng(seed)
        with told():
            while not stop.is_set():
                index = int(draw.integers(len(expected)))
                np.testing.assert_array_equal(several[index], expected[index])
                assert several.name(index) == f"protein{index}"
                row = np.zeros(len(expected[index]), dtype=np.uint8)
                several.copy_into(row, Windows(*(np.array([v]) for v in (index, 0, len(row), 0))))
                np.testing.assert_array_equal(row, expected[index])

    def verify() -> None:
        with told():
            for _ in range(5):
                several.verify()

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    passes = [threading.Thread(target=verify) for _ in range(2)]
    for thread in readers + passes:
        thread.start()
    for thread in passes:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert wrong == []


def test_threads_that_ask_for_names_of_different_blocks_get_their_own(
    several: SequenceStore,
) -> None:
    wrong: list[tuple[int, str]] = []

    def ask(index: int) -> None:
        names = (several.name(index) for _ in range(1000))
        wrong.extend((index, name) for name in names if name != f"protein{index}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=ask, args=(BLOCK * block,)) for block in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_pickling_carries_no_open_file(tmp_path: Path) -> None:
    store = SequenceStore(_write(tmp_path / "s"))
    _ = store[0]
    packed = pickle.dumps(store)
    assert len(packed) < 500
    np.testing.assert_array_equal(pickle.loads(packed)[3], SEQUENCES[3])


def test_replacing_a_store(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    old = SequenceStore(path)
    _ = old[0]
    _write(path, SEQUENCES[2:])
    assert len(SequenceStore(path)) == 2
    np.testing.assert_array_equal(SequenceStore(path)[0], SEQUENCES[2])
    np.testing.assert_array_equal(old[0], SEQUENCES[0])
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    with pytest.raises(DataError, match="was replaced"):
        list(old)


def test_an_exception_leaves_the_previous_store_and_no_partial_one(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    with pytest.raises(RuntimeError), SequenceStoreWriter(path, kind="raw") as writer:
        writer.extend([b"p"], [bytes(9)])
        raise RuntimeError("stop")
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert len(SequenceStore(path)) == 4


def test_a_killed_writer_leaves_nothing_that_opens_and_can_be_run_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    script = (
        "import os, signal\n"
        "from d2plm.data import store, store_writer\n"
        "store_writer._COMMIT_BYTES = 1\n"
        f"with store_writer.SequenceStoreWriter({str(path)!r}, kind='raw') as writer:\n"
        "    for i in range(2 * store.BLOCK_SEQUENCES):\n"
        "        writer.extend([b'p'], [bytes(9)])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert "no such sequence store" in _refusal(path)
    assert "broken off" in _refusal(tmp_path / "partial.s")
    SequenceStore(_write(path)).verify()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


WAITING = """
import os, signal, sys
from pathlib import Path
from d2plm.data.store_writer import SequenceStoreWriter
with SequenceStoreWriter(Path(sys.argv[1]), kind="raw") as writer:
    writer.extend([b"p"], [bytes(9)])
    print("writing", flush=True)
    signal.pause()
"""


def test_a_writer_in_another_process_is_respected_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, str(path)], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        with pytest.raises(DataError, match="another process is writing this store"):
            _write(path)
        process.kill()
    assert {p.name for p in tmp_path.iterdir()} == {"partial.s", "partial.s.lock"}
    SequenceStore(_write(path)).verify()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_of_writers_that_race_each_is_rejected_or_writes_a_whole_store(tmp_path: Path) -> None:
    outcomes: list[str] = []
    start = threading.Barrier(4)

    def write(rank: int) -> None:
        for _ in range(10):
            start.wait()
            try:
                _write(tmp_path / "s", SEQUENCES[rank:])
                outcomes.append("written")
            except DataError as error:
                outcomes.append(str(error).partition(": ")[2].partition(";")[0])

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 40
    assert set(outcomes) <= {"written", "another process is writing this store"}
    assert outcomes.count("written") >= 10
    SequenceStore(tmp_path / "s").verify()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_reported_once_and_used(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(code, "Operation not supported")))
    SequenceStore(_write(tmp_path / "s")).verify()
    assert [record.message for record in caplog.records] == [
        f"{tmp_path} is on a file system without locks (Operation not supported): let "
        "nothing else write there"
    ]


def test_whatever_a_killed_writer_left_is_taken_away(tmp_path: Path) -> None:
    left = tmp_path / "partial.s"
    (left / "scratch" / "deep").mkdir(parents=True)
    (left / "scratch" / "runs").write_text("left")
    (left / "manifest.json").write_text("{")
    (left / "link").symlink_to(tmp_path)
    SequenceStore(_write(tmp_path / "s")).verify()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize(
    ("limit", "sequence"),
    [(200_000, "9000"), (30_000, "1")],  # the database outgrows it; the lengths do, before that
    ids=["database", "lengths"],
)
def test_no_room_on_the_disk_is_one_line(tmp_path: Path, limit: int, sequence: str) -> None:
    script = (
        "import resource, signal, numpy as np\n"
        "from d2plm.data.store_writer import SequenceStoreWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        f"with SequenceStoreWriter({str(tmp_path / 's')!r}, kind='raw') as writer:\n"
        "    for i in range(20):\n"
        f"        writer.extend([b'p'] * 1024, [bytes({sequence})] * 1024)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stderr.splitlines()[-1].startswith("d2plm.core.errors.DataError: ")
    assert "cannot be written" in run.stderr
    assert not any(tmp_path.iterdir())


def test_a_store_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        _write(tmp_path / "file" / "s")


def test_a_folder_that_is_not_a_store_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="not overwritten"):
        _write(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_an_empty_store_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no sequence to write"):
        _write(tmp_path / "s", [])


def test_missing_folder(tmp_path: Path) -> None:
    assert "no such sequence store" in _refusal(tmp_path / "none")


def test_a_name_that_no_file_system_takes(tmp_path: Path) -> None:
    assert "cannot be read" in _refusal(tmp_path / ("x" * 300))
    with pytest.raises(DataError, match="cannot be written"):
        _write(tmp_path / ("x" * 300))


def test_a_store_that_is_removed_after_it_was_opened(tmp_path: Path) -> None:
    store = SequenceStore(_write(tmp_path / "s"))
    (tmp_path / "s" / "data.mdb").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        store[0]


@pytest.mark.parametrize("file", FILES)
def test_missing_file(tmp_path: Path, file: str) -> None:
    path = _write_with_clusters(tmp_path / "s")
    (path / file).unlink()
    assert file in _refusal(path)


@pytest.mark.parametrize("share", [0, 0.5, 0.98])
@pytest.mark.parametrize("file", FILES)
def test_truncated_file(tmp_path: Path, file: str, share: float) -> None:
    path = _write_with_clusters(tmp_path / "s")
    os.truncate(path / file, int(share * (path / file).stat().st_size))
    assert file in _refusal(path)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    file=st.sampled_from(FILES[1:]),
    place=st.floats(0, 1, exclude_max=True),
    change=st.binary(min_size=1, max_size=8),
)
@example(file="lengths.npy", place=0, change=b"PK\x03\x04")
def test_bytes_that_changed_are_found_or_do_no_harm(
    tmp_path: Path, file: str, place: float, change: bytes
) -> None:
    path = tmp_path / "s"
    if not path.exists():
        _write_with_clusters(path)
    whole = (path / file).read_bytes()
    position = int(place * len(whole))
    damaged = whole[:position] + change + whole[position + len(change) :]
    (path / file).write_bytes(damaged)
    with suppress(DataError), _one_line():
        store = SequenceStore(path)
        store.verify()
        for tokens, expected in zip(store, SEQUENCES, strict=True):
            np.testing.assert_array_equal(tokens, expected)
    (path / file).write_bytes(whole)


def test_foreign_lmdb(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    size = (path / "data.mdb").stat().st_size
    (path / "data.mdb").write_bytes(os.urandom(size))
    assert "damaged or not written by D2PLM" in _refusal(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 99}, "another format version"),
        ({"format": "other"}, "not the manifest of a sequence store"),
        ({"alphabet": ["A"]}, "another alphabet"),
        ({"sequences": 5}, "lengths.npy"),
        ({"residues": None}, "damaged"),
        ({"digests": {}}, "damaged"),
        ({"digests": {"sequences": "0", "names": "0", "clusters": "0"}}, "clusters.npy"),
    ],
)
def test_foreign_manifest(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = _write(tmp_path / "s")
    _change_manifest(path, **changes)
    assert message in _refusal(path)


def test_verify_finds_a_changed_residue(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    data = bytearray((path / "data.mdb").read_bytes())
    data[data.index(SEQUENCES[1].tobytes())] ^= 1
    (path / "data.mdb").write_bytes(data)
    with pytest.raises(DataError, match=r"not those of manifest\.json"):
        SequenceStore(path).verify()


def test_verify_finds_changed_lengths(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    np.save(path / "lengths.npy", np.array([4, 20, 5, 6000], dtype=np.int32))
    with pytest.raises(DataError, match=r"from 0 on have 6028 residues .*lengths\.npy says 6029"):
        SequenceStore(path).verify()
    np.save(path / "lengths.npy", np.array([4, 19, 5, 6000], dtype=np.int32))
    with pytest.raises(DataError, match=r"offsets\.npy and lengths\.npy disagree"):
        SequenceStore(path).verify()


@pytest.mark.parametrize("what", ["sequences", "names", "clusters"])
def test_verify_says_which_digest_is_another(tmp_path: Path, what: str) -> None:
    path = _write_with_clusters(tmp_path / "s")
    digests = SequenceStore(path).manifest["digests"]
    _change_manifest(path, digests=digests | {what: "0" * 64})
    with pytest.raises(DataError, match=rf"the {what} are not those of manifest\.json"):
        SequenceStore(path).verify()


def test_verify_finds_changed_clusters(tmp_path: Path) -> None:
    path = _write_with_clusters(tmp_path / "s")
    np.save(path / "clusters.npy", np.array([7, 7, 1, 1], dtype=np.int32))
    with pytest.raises(DataError, match=r"the clusters are not those of manifest\.json"):
        SequenceStore(path).verify()


def test_verify_finds_changed_counts(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    _change_manifest(path, residues=6029)
    with pytest.raises(DataError, match="the counts are not those"):
        SequenceStore(path).verify()


def test_verify_finds_changed_names(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    data = bytearray((path / "data.mdb").read_bytes())
    data[data.index(b"\x78\x01") + 9] ^= 1  # within zlib's stream of the names
    (path / "data.mdb").write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        SequenceStore(path).verify()
    with pytest.raises(DataError, match="damaged"):
        SequenceStore(path).names(0)


def test_verify_tells_how_far_it_is(several: SequenceStore) -> None:
    done: list[int] = []
    several.verify(done.append)
    assert done == [BLOCK, 2 * BLOCK, len(several)]


def test_a_store_that_was_replaced_before_its_first_read_is_not_read_with_the_old_offsets(
    tmp_path: Path,
) -> None:
    path = _write(tmp_path / "s")
    opened = SequenceStore(path)
    carried = pickle.dumps(opened)
    _write(path, SEQUENCES[::-1])
    with pytest.raises(DataError, match="was replaced"):
        opened[0]
    with pytest.raises(DataError, match="was replaced"):
        pickle.loads(carried)
