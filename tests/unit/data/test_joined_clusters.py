"""Clusters joined by pairs, and the pieces of cut records."""

import sys
from pathlib import Path

import numpy as np
import pytest

from d2plm.core.errors import DataError
from d2plm.data.joined_clusters import merged, pairs_of_pieces, record_of, with_other_pieces
from d2plm.data.store import SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter


@pytest.mark.parametrize("seed", range(5))
def test_pairs_join_the_clusters_that_a_walk_from_each_member_reaches(seed: int) -> None:
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
    for index in near:
        reached, last = {index}, set[int]()
        while reached != last:
            last, reached = reached, set[int]().union(*(near[one] for one in reached))
        assert found[index] == min(reached)
    assert (found[clusters < 0] == -1).all()


def test_clusters_that_are_joined_keep_their_other_members() -> None:
    clusters = np.array([0, 1, 0, 1, 4, -1], dtype=np.int32)
    assert merged(clusters, np.array([[2, 3], [4, 5]])).tolist() == [0, 0, 0, 0, 4, -1]


def test_a_missing_package_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(DataError, match=r"needs scipy.*pip install datasketch"):
        merged(np.arange(2, dtype=np.int32), np.array([[0, 1]]))


def _store(path: Path, names: list[bytes], **provenance: int) -> SequenceStore:
    with SequenceStoreWriter(path, "raw", provenance) as writer:
        writer.extend(names, [bytes([4 + number]) * 3 for number in range(len(names))])
    return SequenceStore(path)


def test_pieces_of_a_record_are_joined_and_so_are_records_with_a_piece_in_common(
    tmp_path: Path,
) -> None:
    names = [b"a/1", b"b/1\x01a/2", b"c", b"b/3", b"c/d/1", b"c/d/2", b"e/01"]
    store = _store(tmp_path / "cut", names, window=3)
    clusters = merged(np.arange(7, dtype=np.int32), pairs_of_pieces(store))
    assert clusters.tolist() == [0, 0, 2, 0, 4, 4, 6]
    chosen = np.arange(7) == 3
    assert np.flatnonzero(with_other_pieces(store, chosen)).tolist() == [0, 1, 3]
    assert record_of(b"c/d/2") == b"c/d"
    assert record_of(b"c/d") is None


def test_pieces_of_a_record_without_a_name_are_joined(tmp_path: Path) -> None:
    store = _store(tmp_path / "cut", [b"/1", b"a", b"/2"], window=3)
    assert merged(np.arange(3, dtype=np.int32), pairs_of_pieces(store)).tolist() == [0, 1, 0]


def test_names_of_records_that_were_not_cut_may_end_in_numbers(tmp_path: Path) -> None:
    store = _store(tmp_path / "whole", [b"site/1", b"site/2"])
    assert pairs_of_pieces(store).shape == (0, 2)
    assert with_other_pieces(store, np.array([True, False])).tolist() == [True, False]
