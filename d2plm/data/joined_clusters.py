"""Clusters as connected components: pairs join them, and so do the pieces of one record."""

import hashlib
import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError
from d2plm.data.records import ALIAS_SEPARATOR
from d2plm.data.store import SequenceStore

_PIECE = re.compile(rb"(.*)/[1-9][0-9]*", re.DOTALL)


def merged(clusters: NDArray[np.int32], pairs: NDArray[np.integer]) -> NDArray[np.int32]:
    """The clusters after those of the two sequences of each pair were made one.

    Args:
        clusters: int32 [N], the first member of each sequence's cluster; -1 for a sequence that is
            left out, whose pairs are ignored.
        pairs: [P, 2], indices of sequences.

    Returns:
        int32 [N], as `clusters`.

    Raises:
        DataError: pairs are given and SciPy is not installed.
    """
    pairs = pairs[(clusters[pairs] >= 0).all(axis=1)]
    if not len(pairs):
        return clusters
    with installed("scipy"):
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

    count, kept = len(clusters), np.flatnonzero(clusters >= 0)
    rows = np.concatenate([kept, pairs[:, 0]])
    columns = np.concatenate([clusters[kept], pairs[:, 1]])
    graph = coo_array((np.ones(len(rows), dtype=np.bool_), (rows, columns)), shape=(count, count))
    _, labels = connected_components(graph, directed=False)
    first_members = np.full(count, count, dtype=np.int32)
    np.minimum.at(first_members, labels[kept], kept.astype(np.int32))
    found = np.full(count, -1, dtype=np.int32)
    found[kept] = first_members[labels[kept]]
    return found


def pairs_of_pieces(store: SequenceStore) -> NDArray[np.int64]:
    """Pairs [P, 2] that join the pieces into which an ingest cut long records.

    A piece that equals one of another record has the names of both, and joins both.
    """
    indices, records = array("q"), array("q")
    if window_of(store) is not None:
        for index, name in enumerate(chain.from_iterable(store.name_blocks())):
            for record in map(record_of, name.split(ALIAS_SEPARATOR)):
                if record is not None:
                    indices.append(index)
                    records.append(_number(record))
    of, pieces = np.asarray(records, dtype=np.int64), np.asarray(indices, dtype=np.int64)
    order = np.argsort(of, kind="stable")
    same = np.flatnonzero(of[order][1:] == of[order][:-1])
    return np.column_stack([pieces[order[same]], pieces[order[same + 1]]])


def with_other_pieces(store: SequenceStore, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The chosen sequences, bool [N], and all other pieces of their records."""
    pairs = pairs_of_pieces(store)
    if not len(pairs):
        return chosen
    records = merged(np.arange(len(store), dtype=np.int32), pairs)
    return np.isin(records, records[chosen])


def window_of(store: SequenceStore) -> int | None:
    """The tokens of the pieces into which an ingest cut longer records; None if it cut none."""
    return store.manifest["provenance"].get("window")


def record_of(name: bytes) -> bytes | None:
    """The name of the record of which `name` is a piece; None if it has not a piece's name."""
    piece = _PIECE.fullmatch(name)
    return piece[1] if piece else None


@contextmanager
def installed(package: str) -> Iterator[None]:
    """Convert failing imports of a package in the block: the image that prepares data lacks it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise DataError(
            f"splitting texts or cut records needs {package}, which is not installed ({error}); "
            "pip install datasketch, which brings SciPy"
        ) from error


def _number(record: bytes) -> int:
    """64 bits of a digest, the same in every process."""
    return int.from_bytes(hashlib.blake2b(record, digest_size=8).digest(), "big", signed=True)
