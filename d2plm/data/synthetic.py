"""SyntheticSequences: random residues with given lengths, where a benchmark wants no disk."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from d2plm.alphabet import CANONICAL_START, CANONICAL_STOP

_POOL = 1 << 20


class SyntheticSequences:
    """Stands in for a `SequenceStore`: as many sequences, as long, of random residues.

    Sequence i is a window of one pool of random residues, so that reading it costs a copy and
    nothing else.

    Args:
        lengths: int32 [N], residues of each sequence, as a real collection has them.
        clusters: int32 [N], as a real collection has them; None if not known.
        seed: of the residues.
    """

    def __init__(
        self,
        lengths: NDArray[np.int32],
        clusters: NDArray[np.int32] | None = None,
        seed: int = 0,
    ) -> None:
        self.lengths, self.clusters = lengths, clusters
        self.digest = f"synthetic-{seed}-{hashlib.sha256(lengths.tobytes()).hexdigest()}"
        random = np.random.default_rng(seed)
        size = _POOL + int(lengths.max())
        self._pool = random.integers(CANONICAL_START, CANONICAL_STOP, size, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        start = self._start(np.array([index]))[0]
        return self._pool[start : start + self.lengths[index]].copy()

    def copy_into(
        self,
        row: NDArray[np.uint8],
        indices: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> None:
        """As `SequenceStore.copy_into`."""
        first = (self._start(indices) + starts).tolist()
        for source, count, place in zip(first, counts.tolist(), places.tolist(), strict=True):
            row[place : place + count] = self._pool[source : source + count]

    @staticmethod
    def _start(indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices * 7919 % _POOL
