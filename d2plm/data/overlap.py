"""Exact search for documents that share n-grams with held-out ones.

The n-grams of the held-out documents are kept in memory as sorted 64-bit hashes, and the other
documents are read once. A document shorter than an n-gram overlaps only with equal ones.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from d2plm.core.vocabulary import Tokens
from d2plm.data.ngrams import ngram_hashes
from d2plm.data.split import Mask
from d2plm.data.store import SequenceStore

_SLOTS_PER_NGRAM, _LARGEST_TABLE = 5, 31  # log2


class NgramIndex:
    """The n-grams (of `ngram` tokens) of D documents (tokens [L]), and the documents with each."""

    def __init__(self, documents: Iterable[Tokens], ngram: int) -> None:
        self.ngram = ngram
        distinct = [np.unique(ngram_hashes(tokens, ngram)) for tokens in documents]
        self._sizes = np.array([len(hashes) for hashes in distinct])
        hashes = np.concatenate([np.empty(0, dtype=np.uint64), *distinct])
        del distinct
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        owners = np.repeat(np.arange(len(self._sizes), dtype=np.int32), self._sizes)
        self._owners = owners[order]
        # Most n-grams of other documents are not in the index: one bit of this table excludes them.
        slots = min(len(hashes).bit_length() + _SLOTS_PER_NGRAM, _LARGEST_TABLE)
        self._shift = np.uint64(64 - slots)
        self._table = np.zeros(1 << (slots - 3), dtype=np.uint8)
        np.bitwise_or.at(self._table, *self._bits(self._hashes))

    def overlaps(self, tokens: Tokens, share: float) -> NDArray[np.bool_]:
        """bool [overlaps]: the overlaps of a document [L], and whether each is large on both sides.

        It overlaps with each document of the index of which it has at least the fraction `share` (0
        < share ≤ 1) of the n-grams. If at least that fraction of its own n-grams is in the index,
        in any documents, it also overlaps with the document that contains most of them.
        """
        hashes = ngram_hashes(tokens, self.ngram)
        count = len(hashes)
        places, bits = self._bits(hashes)
        hashes = hashes[(self._table[places] & bits) != 0]
        starts = np.searchsorted(self._hashes, hashes)
        known = self._hashes[np.minimum(starts, len(self._hashes) - 1)] == hashes
        if not known.any():
            return np.empty(0, dtype=np.bool_)
        starts = np.unique(starts[known])
        numbers = np.searchsorted(self._hashes, self._hashes[starts], side="right") - starts
        places = np.repeat(starts - np.cumsum(numbers) + numbers, numbers)
        owners, shared = np.unique(
            self._owners[places + np.arange(len(places))], return_counts=True
        )
        of_theirs, of_its_own = shared >= share * self._sizes[owners], shared >= share * count
        if known.sum() >= share * count:
            of_its_own[shared.argmax()] = True
        return (of_theirs & of_its_own)[of_theirs | of_its_own]

    def _bits(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """Bytes of the table that contain the bits of hashes, and the bits in these."""
        slots = hashes >> self._shift
        return slots >> np.uint64(3), np.uint8(1) << (slots & np.uint64(7)).astype(np.uint8)


def find_overlaps(
    store: SequenceStore, pool: Mask, index: NgramIndex, share: float
) -> NDArray[np.int64]:
    """int64 [pairs, 2]: the overlaps of a pool's documents, bool [N], with those of an index.

    Each row has the index of its document in the pool, and whether the overlap is large on both
    sides, 0 or 1.
    """
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for place, tokens in enumerate(store.chosen(pool)):
        found = index.overlaps(tokens, share)
        if len(found):
            pairs.append(np.column_stack([np.full(len(found), place), found]))
    return np.concatenate(pairs)
