"""SequenceStore: round trips, sharing between processes, and every kind of damage."""

import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from d2plm.alphabet import TOKENS, encode
from d2plm.data.store import SequenceStore, SequenceStoreWriter
from d2plm.errors import DataError

SEQUENCES = [encode("MKV"), encode("ACDEFGHIKLMNPQRSTVWY"), encode("XBUZO"), encode("L" * 6000)]


def _write(path: Path, sequences: list[np.ndarray] = SEQUENCES, **provenance: object) -> Path:
    with SequenceStoreWriter(path, kind="raw", provenance=provenance) as writer:
        for index, tokens in enumerate(sequences):
            writer.append(f"protein{index}", tokens)
    return path


def _change_manifest(path: Path, **changes: object) -> None:
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        SequenceStore(path)[0]
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    assert store.manifest["alphabet"] == list(TOKENS)
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


def test_digest_is_of_lengths_and_tokens_in_order(tmp_path: Path) -> None:
    expected = hashlib.sha256(
        b"".join(len(s).to_bytes(8, "big") + s.tobytes() for s in SEQUENCES)
    ).hexdigest()
    assert SequenceStore(_write(tmp_path / "a")).digest == expected
    assert SequenceStore(_write(tmp_path / "b", SEQUENCES[::-1])).digest != expected


def test_clusters_are_kept(tmp_path: Path) -> None:
    with SequenceStoreWriter(tmp_path / "s", kind="train") as writer:
        for tokens in SEQUENCES:
            writer.append("p", tokens)
        writer.set_clusters([7, 7, 1, 2])
    clusters = SequenceStore(tmp_path / "s").clusters
    assert clusters is not None
    assert clusters.dtype == np.int32
    assert clusters.tolist() == [7, 7, 1, 2]


def test_wrong_number_of_clusters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 clusters for 4"):  # noqa: SIM117
        with SequenceStoreWriter(tmp_path / "s", kind="train") as writer:
            for tokens in SEQUENCES:
                writer.append("p", tokens)
            writer.set_clusters([7])
    assert not any(tmp_path.iterdir())


def test_the_map_grows_and_the_file_does_not_exceed_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d2plm.data.store._FIRST_MAP_BYTES", 1 << 16)
    monkeypatch.setattr("d2plm.data.store._BATCH_RECORDS", 50)
    sequences = [np.full(2000, 4 + i % 20, dtype=np.uint8) for i in range(500)]
    store = SequenceStore(_write(tmp_path / "s", sequences))
    store.verify()
    assert (tmp_path / "s" / "data.mdb").stat().st_size < 2 * store.residues + (1 << 17)
    assert sorted(p.name for p in store.path.iterdir()) == [
        *("data.mdb", "lengths.npy", "manifest.json")
    ]


def test_two_stores_of_one_folder_are_open_together(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    one, two = SequenceStore(path), SequenceStore(path)
    np.testing.assert_array_equal(one[1], two[1])


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
    child.start()
    assert receiving.poll(30)
    mine, other, pid = receiving.recv()
    child.join()
    assert pid != os.getpid()
    assert mine == other == store[1].tolist()


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


def test_an_exception_leaves_the_previous_store_and_no_partial_one(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    with pytest.raises(RuntimeError), SequenceStoreWriter(path, kind="raw") as writer:
        writer.append("p", SEQUENCES[0])
        raise RuntimeError("stop")
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert len(SequenceStore(path)) == 4


def test_a_killed_writer_leaves_nothing_that_opens_and_can_be_run_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    script = (
        "import os, signal, numpy as np\n"
        "from d2plm.data import store\n"
        "store._BATCH_RECORDS = 1\n"
        f"with store.SequenceStoreWriter({str(path)!r}, kind='raw') as writer:\n"
        "    writer.append('p', np.full(9, 4, dtype=np.uint8))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[3]
    killed = subprocess.run([sys.executable, "-c", script], cwd=root, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert "no such sequence store" in _refusal(path)
    assert "broken off" in _refusal(tmp_path / "s.partial")
    SequenceStore(_write(path)).verify()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_no_room_on_the_disk_is_one_line(tmp_path: Path) -> None:
    script = (
        "import resource, signal, numpy as np\n"
        "from d2plm.data.store import SequenceStoreWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        f"with SequenceStoreWriter({str(tmp_path / 's')!r}, kind='raw') as writer:\n"
        "    for i in range(100):\n"
        "        writer.append('p', np.full(9000, 4, dtype=np.uint8))\n"
    )
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.stderr.splitlines()[-1].startswith("d2plm.errors.DataError: ")
    assert "the store cannot be written" in run.stderr
    assert not any(tmp_path.iterdir())


def test_a_store_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        _write(tmp_path / "file" / "s")


def test_a_folder_that_is_no_store_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="not overwritten"):
        _write(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_an_empty_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no sequence to write"):
        _write(tmp_path / "s", [])


@pytest.mark.parametrize("tokens", [np.zeros(0, np.uint8), np.zeros(3, np.int64)])
def test_tokens_of_another_kind_are_refused(tmp_path: Path, tokens: np.ndarray) -> None:
    with pytest.raises(DataError, match="non-empty uint8 array"):
        _write(tmp_path / "s", [tokens])


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


@pytest.mark.parametrize("file", ["data.mdb", "lengths.npy", "manifest.json"])
def test_missing_file(tmp_path: Path, file: str) -> None:
    path = _write(tmp_path / "s")
    (path / file).unlink()
    assert file in _refusal(path)


@pytest.mark.parametrize("file", ["data.mdb", "lengths.npy", "manifest.json"])
def test_truncated_file(tmp_path: Path, file: str) -> None:
    path = _write(tmp_path / "s")
    os.truncate(path / file, (path / file).stat().st_size // 2)
    assert file in _refusal(path)


def test_foreign_lmdb(tmp_path: Path) -> None:
    path = _write(tmp_path / "s")
    size = (path / "data.mdb").stat().st_size
    (path / "data.mdb").write_bytes(os.urandom(size))
    assert "damaged or not written by D2PLM" in _refusal(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 99}, "format version 99"),
        ({"format": "other"}, "not the manifest of a sequence store"),
        ({"alphabet": ["A"]}, "another alphabet"),
        ({"sequences": 5}, "lengths.npy"),
        ({"residues": None}, "damaged"),
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
    np.save(path / "lengths.npy", np.array([4, 19, 5, 6000], dtype=np.int32))
    with pytest.raises(DataError, match=r"sequence 0 has 3 residues where lengths\.npy says 4"):
        SequenceStore(path).verify()
