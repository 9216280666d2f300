"""Near-duplicates among documents, by MinHash (Broder 1997) and locality-sensitive hashing.

A document is represented by the least hashes of its n-grams under random permutations. The fraction
of equal hashes of two documents estimates the Jaccard similarity of their sets of n-grams.
Documents that agree in a band of permutations are candidates, and are compared in all of them.
datasketch computes the hashes and chooses the bands; its index, Python objects of some kilobytes
per document, is replaced by a sort of each band: memory is 512 bytes per document.
"""

import numpy as np
from numpy.typing import NDArray

from d2plm.data.joined_clusters import installed, merged
from d2plm.data.ngrams import ngram_hashes
from d2plm.data.split import Mask
from d2plm.data.store import SequenceStore

PERMUTATIONS = 128

_WEIGHTS = (0.05, 0.95)  # a false candidate costs one comparison, a missed one a near-duplicate
_HASHES = 512  # permuted at a time: a matrix that stays in the processor's cache
_PAIRS = 1 << 14  # compared at a time


def cluster_near_duplicates(
    store: SequenceStore, selected: Mask, ngram: int, similarity: float
) -> NDArray[np.int32]:
    """int32 [selected]: clusters of near-duplicates (connected components), by their first members.

    Each document is compared with the first and with the previous one that agree with it in a band,
    so a thousand copies take a thousand comparisons. Members are indices among the selected.

    Args:
        selected: bool [N], the documents to cluster.
        ngram: tokens of an n-gram.
        similarity: least estimated Jaccard similarity of near-duplicates, 0 … 1.
    """
    with installed("datasketch"):
        from datasketch import MinHashLSH

    minima = _minima(store, selected, ngram)
    bands = MinHashLSH(similarity, PERMUTATIONS, weights=_WEIGHTS)
    clusters = np.arange(len(minima), dtype=np.int32)
    for first in range(0, bands.b * bands.r, bands.r):
        pairs = _agreeing(minima[:, first : first + bands.r])
        pairs = pairs[clusters[pairs[:, 0]] != clusters[pairs[:, 1]]]
        similar = [
            (minima[part[:, 0]] == minima[part[:, 1]]).mean(axis=1) >= similarity
            for part in np.split(pairs, range(_PAIRS, len(pairs), _PAIRS))
        ]
        clusters = merged(clusters, pairs[np.concatenate(similar)])
    return clusters


def _minima(store: SequenceStore, selected: Mask, ngram: int) -> NDArray[np.uint32]:
    """uint32 [selected, PERMUTATIONS]."""
    from datasketch import MinHash

    # Pass an array of hashes as one "value": datasketch would hash each n-gram in Python.
    empty = MinHash(PERMUTATIONS, hashfunc=lambda hashes: hashes, scheme="affine32")
    minima = np.empty((int(selected.sum()), PERMUTATIONS), dtype=np.uint32)
    for row, tokens in zip(minima, store.chosen(selected), strict=True):
        sketch = empty.copy()
        hashes = (ngram_hashes(tokens, ngram) >> np.uint64(32)).astype(np.uint32)
        for first in range(0, len(hashes), _HASHES):
            sketch.update_batch([hashes[first : first + _HASHES]])
        row[:] = sketch.hashvalues
    return minima


def _agreeing(band: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Pairs [P, 2] of documents with equal rows: each with the first and with the previous one."""
    order = np.lexsort(band.T)
    band = band[order]
    equal = np.append(False, (band[1:] == band[:-1]).all(axis=1))
    places = np.arange(len(order))
    firsts = np.maximum.accumulate(np.where(equal, 0, places))
    after, later = places[equal], places[equal & (firsts < places - 1)]
    before = np.concatenate([after - 1, firsts[later]])
    return np.column_stack([order[before], order[np.concatenate([after, later])]])
