"""External sort that deduplicates any number of sequences and orders them by digest.

The result depends on the set of sequences and not on the input's order. When a buffer is full, its
records are distributed over files by the first byte of their digests; each file is then sorted
separately. Memory is that of the buffer or of a 256th of the distinct sequences, whichever is
larger, plus the names of equal sequences, which are kept together.
"""

import hashlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from d2plm.core.vocabulary import Tokens
from d2plm.data.records import ALIAS_SEPARATOR

_BUFFER_BYTES = 16 << 20
_RECORD_BYTES = 200  # memory of a record in addition to its tokens and name
_FILES = 256


class Records(NamedTuple):
    """n sequences as columns.

    Attributes:
        digests: SHA-256 of each sequence.
        sequences: the tokens of each, as little-endian bytes.
        names: the names of equal sequences are sorted and joined by \\x01.
        copies: number of input sequences equal to each.
        records: int64 as bytes, the records of which each is a piece; empty for whole records.
    """

    digests: list[bytes]
    sequences: list[bytes]
    names: list[bytes]
    copies: list[int]
    records: list[bytes]

    @property
    def duplicates(self) -> int:
        return sum(self.copies) - len(self.copies)


class Deduplicator:
    """Takes sequences by `add` and returns them, sorted and distinct, by `sorted`.

    `folder` must exist and be empty; its temporary files take the size of the sequences, and their
    `OSError`s are passed on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: list[bytes] = []
        self._sequences: list[bytes] = []
        self._names: list[bytes] = []
        self._records: list[bytes] = []
        self._bytes = 0
        self._spilled = False

    def add(
        self,
        names: list[bytes],
        tokens: Tokens,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        records: list[bytes],
    ) -> None:
        """Add n sequences: parts of `tokens` [M] at `starts` [n], of `lengths` [n]."""
        # Copies: slices of bytes cost less than views, and keep no dropped records in memory.
        size, text = tokens.itemsize, tokens.astype(tokens.dtype.newbyteorder("<")).tobytes()
        starts, lengths = size * starts, size * lengths
        sequences = [
            text[start:stop]
            for start, stop in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        ]
        sha256 = hashlib.sha256
        self._digests += [sha256(sequence).digest() for sequence in sequences]
        self._sequences += sequences
        self._names += names
        self._records += records
        self._bytes += int(lengths.sum()) + sum(map(len, names)) + _RECORD_BYTES * len(names)
        if self._bytes >= _BUFFER_BYTES:
            self._spill()

    def sorted(self) -> Iterator[Records]:
        """The distinct sequences in order, part by part; consumes the sorter."""
        if not self._spilled:
            if self._names:
                yield self._buffered()
            return
        if self._names:
            self._spill()
        for number in range(_FILES):
            if self._file(number).exists():
                yield _read(self._file(number))

    def _buffered(self) -> Records:
        once = [1] * len(self._names)
        return _merged(Records(self._digests, self._sequences, self._names, once, self._records))

    def _spill(self) -> None:
        """Append the buffered records to the files of their digests."""
        merged = self._buffered()
        first_bytes = np.frombuffer(b"".join(merged.digests), dtype=np.uint8)[::32]
        bounds = np.searchsorted(first_bytes, np.arange(_FILES + 1)).tolist()
        for number in range(_FILES):
            chosen = slice(bounds[number], bounds[number + 1])
            if merged.digests[chosen]:
                with open(self._file(number), "ab") as file:
                    pickle.dump([column[chosen] for column in merged], file)
        for column in (self._digests, self._sequences, self._names, self._records):
            column.clear()
        self._bytes, self._spilled = 0, True

    def _file(self, number: int) -> Path:
        return self._folder / f"sort{number}"


def _read(file: Path) -> Records:
    """The distinct records in a temporary file, merged after each buffer's worth."""
    columns, unmerged = Records([], [], [], [], []), 0
    with open(file, "rb") as content:
        while content.peek(1):
            part = Records(*pickle.load(content))  # noqa: S301  # written above
            columns.digests.extend(part.digests)
            columns.sequences.extend(part.sequences)
            columns.names.extend(part.names)
            columns.copies.extend(part.copies)
            columns.records.extend(part.records)
            unmerged += sum(map(len, part.sequences))
            if unmerged >= _BUFFER_BYTES:
                columns, unmerged = _merged(columns), 0
    return _merged(columns)


def _merged(columns: Records) -> Records:
    """Merge equal sequences; the result is in the order of the digests."""
    digests, sequences, names, copies, records = columns
    keys = np.frombuffer(b"".join(digests), dtype=">u8").reshape(-1, 4)[:, :2].astype(np.uint64)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    keys = keys[order]
    is_new = np.append(True, (keys[1:] != keys[:-1]).any(axis=1))
    firsts = np.flatnonzero(is_new)
    places, chosen = order.tolist(), order[firsts].tolist()
    all_names, all_copies = [names[place] for place in chosen], [copies[place] for place in chosen]
    all_records = [records[place] for place in chosen]
    sizes = np.diff(np.append(firsts, len(order)))
    for group in np.flatnonzero(sizes > 1).tolist():
        members = places[firsts[group] : firsts[group] + sizes[group]]
        equal = {alias for place in members for alias in names[place].split(ALIAS_SEPARATOR)}
        all_names[group] = ALIAS_SEPARATOR.join(sorted(equal))
        all_copies[group] = sum(copies[place] for place in members)
        owners = np.frombuffer(b"".join(records[place] for place in members), np.int64)
        all_records[group] = np.unique(owners).tobytes()
    return Records(
        [digests[place] for place in chosen],
        [sequences[place] for place in chosen],
        all_names,
        all_copies,
        all_records,
    )
