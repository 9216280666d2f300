"""RelativesIndex: the relatives of each sequence of a collection, as arrays.

A relative is a hit of an MMseqs2 search. The arrays are memory mapped, so a loader chooses
relatives without reading a record, and a collection of any size costs no memory.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError
from d2plm.core.files import written_beside
from d2plm.data.store import mapped_array

FILES = {"bounds": np.int64, "targets": np.int32, "identities": np.float32}
IDENTITIES = (0.5, 0.7, 0.9)  # bounds between close and distant relatives
LONGEST_RELATIVE = 2048  # residues to which a relative is cut, to bound the alignment's memory
DIAGONALS = 64  # neighbouring diagonals counted as one alignment, to allow gaps
MOST_REPEATS = 16  # more frequent words of a relative do not show where it aligns

Tokens = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RelativesIndex:
    """Relatives of N sequences, H in all.

    Attributes:
        bounds: int64 [N + 1], start and end of the relatives of each sequence.
        targets: int32 [H], indices of the relatives in the collection; for each sequence in
            MMseqs2's order, the most significant first.
        identities: float32 [H], identical residues ÷ aligned columns, 0 … 1.
    """

    bounds: NDArray[np.int64]
    targets: NDArray[np.int32]
    identities: NDArray[np.float32]

    @classmethod
    def of_hits(
        cls,
        count: int,
        queries: NDArray[np.integer],
        targets: NDArray[np.integer],
        identities: NDArray[np.floating],
        most: int,
    ) -> "RelativesIndex":
        """The first `most` hits of each of `count` queries, in the given order, without self-hits.

        The limit applies between successive `IDENTITIES`, to keep distant relatives as well.
        """
        kept = np.flatnonzero(queries != targets)
        band = queries[kept] * (len(IDENTITIES) + 1) + np.digitize(identities[kept], IDENTITIES)
        by_band = np.argsort(band, kind="stable")
        rank = np.arange(len(band)) - np.searchsorted(band[by_band], band[by_band])
        kept = np.sort(kept[by_band[rank < most]])
        order = kept[np.argsort(queries[kept], kind="stable")]
        bounds = np.searchsorted(queries[order], np.arange(count + 1))
        return cls(
            bounds.astype(np.int64),
            targets[order].astype(np.int32),
            identities[order].astype(np.float32),
        )

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def below(self, index: int, identity: float) -> NDArray[np.int32]:
        """The relatives of a sequence below an identity, the most significant first."""
        own = slice(int(self.bounds[index]), int(self.bounds[index + 1]))
        return self.targets[own][self.identities[own] < identity]

    @property
    def digest(self) -> str:
        """SHA-256 in hex over the three arrays."""
        digest = hashlib.sha256()
        for name, dtype in FILES.items():
            digest.update(np.ascontiguousarray(getattr(self, name), dtype=dtype).data)
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Write the arrays into a folder, replacing it."""
        with written_beside(folder) as partial:
            partial.mkdir(parents=True)
            for name, dtype in FILES.items():
                np.save(partial / f"{name}.npy", getattr(self, name).astype(dtype))

    @classmethod
    def load(cls, folder: Path) -> "RelativesIndex":
        """Map the arrays of a folder into memory; `DataError` if one is missing or damaged."""
        arrays = {
            name: mapped_array(folder / f"{name}.npy", dtype) for name, dtype in FILES.items()
        }
        bounds, hits = arrays["bounds"], len(arrays["targets"])
        if not len(bounds) or bounds[-1] != hits or len(arrays["identities"]) != hits:
            raise DataError(f"{folder}: its arrays do not fit each other; prepare the data again")
        return cls(**arrays)


def aligned_part(relative: Tokens, protein: Tokens) -> Tokens:
    """Cut a relative to LONGEST_RELATIVE residues around the region that aligns with a protein.

    That is where the two share the most words of three residues on neighbouring diagonals; if they
    share none, the part is the beginning.

    Args:
        relative, protein: residue tokens [L]; those of the protein may be masked.
    """
    if len(relative) <= LONGEST_RELATIVE:
        return relative
    words, own = _words(relative), _words(protein)
    order = np.argsort(words, kind="stable")
    first, last = (np.searchsorted(words[order], own, side) for side in ("left", "right"))
    counts = np.where(last - first > MOST_REPEATS, 0, last - first)
    starts = np.repeat(first - np.cumsum(counts) + counts, counts)
    shared = order[starts + np.arange(len(starts))]  # positions in the relative
    diagonals = shared - np.repeat(np.arange(len(own)), counts) + len(protein)
    if not len(diagonals):
        return relative[:LONGEST_RELATIVE]
    near = np.convolve(np.bincount(diagonals), np.ones(DIAGONALS, dtype=np.int64), "same")
    middle = int(near.argmax()) - len(protein) + len(protein) // 2
    start = min(max(middle - LONGEST_RELATIVE // 2, 0), len(relative) - LONGEST_RELATIVE)
    return relative[start : start + LONGEST_RELATIVE]


def _words(tokens: Tokens) -> NDArray[np.int32]:
    """int32 [max(L - 2, 0)]: each three consecutive tokens as a number."""
    wide = tokens.astype(np.int32)
    return wide[:-2] << 12 | wide[1:-1] << 6 | wide[2:]
