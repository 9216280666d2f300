"""Clusters as connected components of pairs, and of the pieces of each record."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError
from d2plm.data.store import SequenceStore


def merged(clusters: NDArray[np.int32], pairs: NDArray[np.integer]) -> NDArray[np.int32]:
    """The clusters after merging those of the two sequences of each pair, int32 [N].

    Raises `DataError` if pairs are given and SciPy is not installed.

    Args:
        clusters: int32 [N], the first member of each sequence's cluster; -1 for a sequence that is
            left out, whose pairs are ignored.
        pairs: [P, 2], indices of sequences.
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


def with_equal(clusters: NDArray[np.int32], labels: NDArray[np.int32]) -> NDArray[np.int32]:
    """Like `merged`, joining sequences with the same label, int32 [N]."""
    kept = np.flatnonzero(clusters >= 0)
    return merged(clusters, _pairs(labels[kept], kept))


def records_of(store: SequenceStore) -> NDArray[np.int32] | None:
    """int32 [N]: the record of each sequence, as its first piece's index; None if none was cut.

    A sequence that equals pieces of two records joins them into one. Raises `DataError` if the
    store is damaged, or SciPy is needed and not installed.
    """
    if window_of(store) is None:
        return None
    pieces = store.pieces
    return merged(
        np.arange(len(store), dtype=np.int32), _pairs(pieces["record"], pieces["sequence"])
    )


def window_of(store: SequenceStore) -> int | None:
    """The maximum number of tokens of a piece at the ingest; None if no record was cut."""
    return store.manifest["provenance"].get("window")


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


def _pairs(labels: NDArray[np.integer], members: NDArray[np.integer]) -> NDArray[np.integer]:
    """Pairs [P, 2] of consecutive members with the same label."""
    order = np.argsort(labels, kind="stable")
    labels, members = labels[order], members[order]
    same = np.flatnonzero(labels[1:] == labels[:-1])
    return np.column_stack([members[same], members[same + 1]])
