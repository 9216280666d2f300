"""Clusters joined by pairs, and the pieces of cut records."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import decode
from d2plm.data.ingest import ingest
from d2plm.data.joined_clusters import merged, records_of, with_equal
from d2plm.data.split import find_ids
from d2plm.data.store import SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter


def _reached(near: dict[int, set[int]], start: int) -> int:
    """The least of all that a walk over neighbours comes to."""
    reached, last = {start}, set[int]()
    while reached != last:
        last, reached = reached, reached.union(*(near[one] for one in reached))
    return min(reached)


@pytest.mark.parametrize("seed", range(5))
def test_pairs_and_common_pieces_join_what_a_walk_reaches(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    clusters = np.arange(60, dtype=np.int32)
    clusters[draw.random(60) < 0.2] = -1
    pairs = draw.integers(0, 60, (30, 2))
    near = {index: {index} for index in np.flatnonzero(clusters >= 0).tolist()}
    for one, other in pairs.tolist():
        if one in near and other in near:
            near[one].add(other)
            near[other].add(one)
    found = merged(clusters, pairs)
    assert all(found[index] == _reached(near, index) for index in near)
    assert (found[clusters < 0] == -1).all()
    owners = [sorted({*draw.integers(0, 9, draw.integers(0, 3)).tolist()}) for _ in range(20)]
    near = {i: {j for j in range(20) if i == j or {*owners[i]} & {*owners[j]}} for i in range(20)}
    records = records_of(_store(tmp_path / "cut", owners, window=3))
    assert records is not None
    assert records.tolist() == [_reached(near, index) for index in range(20)]


def _store(path: Path, records: list[list[int]], **provenance: int) -> SequenceStore:
    """A store of sequences that are pieces of these records; one of none is a whole record."""
    with SequenceStoreWriter(path, "raw", provenance) as writer:
        for number, own in enumerate(records):
            owners = np.array(own, np.int64).tobytes()
            writer.extend([b"a/1"], [bytes([4 + number]) * 3], [owners])
    return SequenceStore(path)


def test_pieces_that_are_lost_or_of_another_store_are_found(tmp_path: Path) -> None:
    assert records_of(_store(tmp_path / "whole", [[], []])) is None
    store = _store(tmp_path / "cut", [[0], [0]], window=3)
    store.verify()
    other = _store(tmp_path / "other", [[0], [1]], window=3)
    shutil.copy(other.path / "pieces.npy", store.path)
    with pytest.raises(DataError, match="the pieces are not those of manifest"):
        SequenceStore(store.path).verify()
    (store.path / "pieces.npy").unlink()
    for use in (lambda: records_of(store), store.verify):
        with pytest.raises(DataError, match="pieces"):
            use()


def test_pieces_stay_together_if_one_between_them_is_left_out() -> None:
    clusters = np.array([0, -1, 2, 3], dtype=np.int32)
    assert with_equal(clusters, np.array([0, 0, 0, 3])).tolist() == [0, -1, 0, 3]


def test_records_named_like_pieces_are_records_of_their_own(tmp_path: Path) -> None:
    names = ["read/1", "read/2", "read", "read/3", "read/1"]
    texts = ["MKTA", "MKVA", "ACDEFGHIKL", "WWWW", "WYWY"]
    pairs = zip(names, texts, strict=True)
    (tmp_path / "in.fasta").write_text("".join(f">{name}\n{text}\n" for name, text in pairs))
    ingest(tmp_path / "in.fasta", tmp_path / "store", window=5)
    store = SequenceStore(tmp_path / "store")
    records = records_of(store)
    assert records is not None
    of_text = dict(zip(map(decode, store), records.tolist(), strict=True))
    assert of_text["ACDEF"] == of_text["GHIKL"]
    assert len({*of_text.values()}) == 5
    (tmp_path / "ids").write_text("read\n")  # the record and its pieces, no more
    everything = np.ones(len(store), dtype=np.bool_)
    held = np.flatnonzero(find_ids(store, tmp_path / "ids", everything))
    assert {decode(store[int(i)]) for i in held} == {"ACDEF", "GHIKL"}
