"""Substitutes for a store's tokens: shuffled ones as a control, random ones to time training.

A model trained on shuffled proteins has seen every composition but no order, so it must not beat
the composition baseline. Random tokens with the store's lengths time training without the disk.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from d2plm.core.vocabulary import FIRST, PROTEIN, Tokens, Vocabulary
from d2plm.data.store import SequenceStore, Windows

_POOL = 1 << 20


def plausible_lengths(number: int, seed: int = 0) -> NDArray[np.int32]:
    """int32 [number]: protein-like lengths, log-normal with a median of 290 residues."""
    lengths = np.random.default_rng(seed).lognormal(np.log(290), 0.65, number)
    return lengths.clip(30, 4000).astype(np.int32)


class SyntheticSequences:
    """Sequences of random tokens with the lengths of a collection.

    Sequence i is a window of one pool of random tokens, so that reading it costs only a copy.

    Args:
        lengths: int32 [N], tokens of each sequence of the collection.
        clusters: int32 [N], homology cluster of each of them; None if unknown.
        vocabulary: its predicted tokens are drawn.
    """

    def __init__(
        self,
        lengths: NDArray[np.int32],
        clusters: NDArray[np.int32] | None = None,
        seed: int = 0,
        vocabulary: Vocabulary = PROTEIN,
    ) -> None:
        self.lengths, self.clusters, self.vocabulary = lengths, clusters, vocabulary
        self.digest = f"synthetic-{seed}-{hashlib.sha256(lengths.tobytes()).hexdigest()}"
        random = np.random.default_rng(seed)
        size = _POOL + int(lengths.max())
        self._pool = random.integers(FIRST, vocabulary.stop, size, dtype=vocabulary.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tokens:
        start = index * 7919 % _POOL
        return self._pool[start : start + self.lengths[index]].copy()

    def copy_into(self, row: Tokens, windows: Windows) -> None:
        first = windows.indices * 7919 % _POOL + windows.starts
        pool, target = self._pool.data, row.data  # slices of memoryviews cost half as much
        columns = (first.tolist(), windows.places.tolist(), windows.counts.tolist())
        for start, place, count in zip(*columns, strict=True):
            target[place : place + count] = pool[start : start + count]


class ShuffledSequences:
    """The sequences of a store, each with its tokens in a fixed random order given by `seed`."""

    def __init__(self, store: SequenceStore, seed: int = 0) -> None:
        self._store, self._seed = store, seed
        self.lengths, self.clusters = store.lengths, store.clusters
        self.vocabulary = store.vocabulary
        self.digest = f"shuffled-{seed}-{store.digest}"

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> Tokens:
        return np.random.default_rng((self._seed, index)).permutation(self._store[index])

    def copy_into(self, row: Tokens, windows: Windows) -> None:
        columns = (column.tolist() for column in windows)
        for index, start, count, place in zip(*columns, strict=True):
            row[place : place + count] = self[index][start : start + count]
