"""DistinctSorter: any number of sequences, each once, in the order of their content's digests.

The order is a function of the set of sequences, not of the input's order, so everything built on it
is, too. The sort is external: runs of bounded size go to disk sorted, and come back one range of
digests at a time. Names of equal sequences are kept together, so that none is lost.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.data.records import ALIAS_SEPARATOR, CleanSequences

_RUN_BYTES = 16 << 20
_RUNS_OF_A_SIZE = 64
_RECORD_BYTES = 200  # what a record in memory takes beside its residues
_PARTS = ("digests", "lengths", "tokens", "name_lengths", "names")


@dataclass(frozen=True, slots=True)
class DistinctRecords:
    """Some distinct sequences in order, n of them.

    Attributes:
        names: n names; those of equal sequences in one, sorted and joined by \\x01.
        sequences: n texts of residue tokens.
        duplicates: sequences that are left out because they equal one of these.
    """

    names: list[bytes]
    sequences: list[bytes]
    duplicates: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Sequences in memory, in order: n digests (uint64 [n, 2]), their tokens and names."""

    digests: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    tokens: bytes
    names: list[bytes]


class DistinctSorter:
    """Takes sequences by `add` and gives them, sorted and distinct, by `sorted`.

    Args:
        folder: an existing, empty folder for the runs; they take as much room as the sequences.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: list[bytes] = []
        self._lengths: list[NDArray[np.int64]] = []
        self._sequences: list[bytes] = []
        self._names: list[bytes] = []
        self._bytes = 0
        self._runs = 0
        self._count = 0

    def add(self, names: list[bytes], cleaned: CleanSequences, kept: NDArray[np.int64]) -> None:
        """Take the sequences of `cleaned` at `kept` [n], named `names` [n].

        Raises:
            OSError: a run cannot be written.
        """
        # Copies: slices of bytes cost less than views, and let go of the records left out.
        text, starts, lengths = cleaned.text, cleaned.starts[kept], cleaned.lengths[kept]
        sequences = [
            text[start:stop]
            for start, stop in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        ]
        sha256 = hashlib.sha256
        self._digests += [sha256(sequence).digest() for sequence in sequences]
        self._sequences += sequences
        self._lengths.append(lengths)
        self._names += names
        self._bytes += int(lengths.sum()) + sum(map(len, names)) + _RECORD_BYTES * len(names)
        # Every run is read in as many parts as there are runs: their number must not grow with the
        # input, so their size does, by and by (to 256 MiB for UniRef50).
        if self._bytes >= _RUN_BYTES << (self._runs // _RUNS_OF_A_SIZE):
            self._write_run()

    def sorted(self) -> Iterator[DistinctRecords]:
        """The distinct sequences in order; ends the sorter's life.

        Raises:
            OSError: a run cannot be written or read.
        """
        if not self._runs:
            if self._names:
                yield _distinct([self._take_run()])
            return
        self._write_run()
        # Smaller than runs: what comes back is held several times while it is merged.
        cuts = self._cuts(ranges=4 * self._runs)
        for part in range(4 * self._runs):
            yield from self._part(cuts, part)

    def _take_run(self) -> _Run:
        """What has been added since the last run, sorted."""
        digests = np.frombuffer(b"".join(self._digests), dtype=">u8").reshape(-1, 4)[:, :2]
        digests = digests.astype(np.uint64)
        order = np.argsort(digests[:, 0])
        places = order.tolist()
        run = _Run(
            digests[order],
            np.concatenate(self._lengths)[order].astype(np.uint32),
            b"".join([self._sequences[i] for i in places]),
            [self._names[i] for i in places],
        )
        for taken in (self._digests, self._lengths, self._sequences, self._names):
            taken.clear()
        self._bytes = 0
        return run

    def _write_run(self) -> None:
        if not self._names:
            return
        run = self._take_run()
        name_lengths = np.fromiter(map(len, run.names), dtype=np.uint32, count=len(run.names))
        contents: tuple[Any, ...] = (
            run.digests.data,
            run.lengths.data,
            run.tokens,
            name_lengths.data,
            b"".join(run.names),
        )
        for part, content in zip(_PARTS, contents, strict=True):
            with open(self._folder / part, "ab") as file:
                file.write(content)
        with open(self._folder / "runs", "ab") as file:
            file.write(np.int64(len(run.names)).tobytes())
        self._runs += 1
        self._count += len(run.names)

    def _cuts(self, ranges: int) -> NDArray[np.int64]:
        """int64 [runs, ranges + 1, 3]: (record, token, name byte) where ranges begin in each run.

        The ranges of digests are equal, so that each holds about as many records.
        """
        edges = np.linspace(0, 2.0**64, ranges + 1)[1:-1].astype(np.uint64)
        counts = np.fromfile(self._folder / "runs", dtype=np.int64)
        cuts = np.zeros((self._runs, ranges + 1, 3), dtype=np.int64)
        begin = np.zeros(3, dtype=np.int64)
        for run, count in enumerate(counts.tolist()):
            first = int(begin[0])
            digests = self._array("digests", np.uint64, 2 * first, 2 * count)[::2]
            inner = np.searchsorted(digests, edges)
            records = np.concatenate([[0], inner, [count]])
            cuts[run, :, 0] = first + records
            for column, part in ((1, "lengths"), (2, "name_lengths")):
                sizes = self._array(part, np.uint32, first, count)
                ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
                cuts[run, :, column] = begin[column] + ends[records]
            begin = cuts[run, -1].copy()
        return cuts

    def _part(self, cuts: NDArray[np.int64], part: int) -> Iterator[DistinctRecords]:
        """The distinct sequences of one range of digests, if there are any.

        A generator of its own lets go of everything before the next range is read.
        """
        runs = [self._read(cuts[run, part], cuts[run, part + 1]) for run in range(self._runs)]
        runs = [run for run in runs if run.names]
        if runs:
            yield _distinct(runs)

    def _read(self, start: NDArray[np.int64], stop: NDArray[np.int64]) -> _Run:
        (record, token, name), (records, tokens, names) = start.tolist(), (stop - start).tolist()
        name_ends = np.cumsum(self._array("name_lengths", np.uint32, record, records), dtype=int)
        text = self._array("names", np.uint8, name, names).tobytes()
        ends = name_ends.tolist()
        return _Run(
            self._array("digests", np.uint64, 2 * record, 2 * records).reshape(-1, 2),
            self._array("lengths", np.uint32, record, records),
            self._array("tokens", np.uint8, token, tokens).tobytes(),
            [text[a:b] for a, b in zip([0, *ends], ends, strict=False)],
        )

    def _array(self, part: str, dtype: Any, first: int, count: int) -> NDArray[Any]:
        offset = first * np.dtype(dtype).itemsize
        return np.fromfile(self._folder / part, dtype=dtype, count=count, offset=offset)


def _distinct(runs: list[_Run]) -> DistinctRecords:
    """Merge runs and leave one of each set of equal sequences."""
    digests = np.concatenate([run.digests for run in runs])
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    digests = digests[order]
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (digests[1:] != digests[:-1]).any(axis=1)
    names: list[bytes] = []
    sequences: list[bytes] = []
    for run in runs:
        names += run.names
        ends = np.cumsum(run.lengths, dtype=np.int64).tolist()
        sequences += [run.tokens[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    firsts = np.flatnonzero(is_new)
    places = order.tolist()
    chosen = order[firsts].tolist()
    merged = [names[place] for place in chosen]
    sizes = np.diff(np.append(firsts, len(order)))
    for group in np.flatnonzero(sizes > 1).tolist():
        members = places[firsts[group] : firsts[group] + sizes[group]]
        equal = {alias for place in members for alias in names[place].split(ALIAS_SEPARATOR)}
        merged[group] = ALIAS_SEPARATOR.join(sorted(equal))
    return DistinctRecords(merged, [sequences[place] for place in chosen], len(order) - len(firsts))
