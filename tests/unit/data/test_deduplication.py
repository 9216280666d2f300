"""The external sort: each sequence once, in the order of digests, with all names and records."""

import hashlib
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from d2plm.core.vocabulary import PROTEIN, Tokenised, encode
from d2plm.data.deduplication import Deduplicator

Record = tuple[bytes, str]
Sorted = list[tuple[bytes, bytes, list[int]]]  # names, tokens and numbers of the cut records


def _owners(place: int) -> list[int]:
    """Two thirds of the sequences are pieces of one of five records."""
    return [place % 5] if place % 3 else []


def _add(sorter: Deduplicator, names: list[bytes], found: Tokenised, first: int = 0) -> None:
    owners = [np.array(_owners(first + i), np.int64).tobytes() for i in range(len(names))]
    sorter.add(names, found.tokens, found.starts, found.lengths, owners)


def _sort(folder: Path, records: list[Record], buffer_bytes: int, batch: int) -> tuple[Sorted, int]:
    """The distinct sequences in order, and how many were left out."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("d2plm.data.deduplication._BUFFER_BYTES", buffer_bytes)
        sorter = Deduplicator(folder)
        for first in range(0, len(records), batch):
            some = records[first : first + batch]
            found = PROTEIN.tokenise([sequence.encode() for _, sequence in some])
            _add(sorter, [name for name, _ in some], found, first)
        parts = list(sorter.sorted())
    rows = [
        (name, sequence, np.frombuffer(owners, np.int64).tolist())
        for part in parts
        for name, sequence, owners in zip(part.names, part.sequences, part.records, strict=True)
    ]
    return rows, sum(part.duplicates for part in parts)


def _sort_in_memory(records: list[Record]) -> Sorted:
    names, owners = defaultdict[bytes, set[bytes]](set), defaultdict[bytes, set[int]](set)
    for place, (name, sequence) in enumerate(records):
        tokens = encode(sequence).tobytes()
        names[tokens].update(name.split(b"\x01"))
        owners[tokens].update(_owners(place))
    return [
        (b"\x01".join(sorted(names[tokens])), tokens, sorted(owners[tokens]))
        for tokens in sorted(names, key=lambda tokens: hashlib.sha256(tokens).digest())
    ]


@given(
    records=st.lists(
        st.tuples(
            st.sampled_from([b"a", b"b", b"c", b"", b"d\x01e"]),
            st.text("MKV", min_size=1, max_size=3),
        ),
        max_size=40,
    ),
    buffer_bytes=st.sampled_from([1, 600, 2000, 1 << 20]),
    batch=st.integers(1, 9),
)
@example(records=[], buffer_bytes=1, batch=1)
@example(records=[(b"a", "M")] * 5, buffer_bytes=1, batch=1)
@example(records=[(b"a", "".join(w)) for w in product("MKV", repeat=7)], buffer_bytes=9000, batch=9)
def test_sorts_as_a_set_sorted_by_digest_in_memory(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record], buffer_bytes: int, batch: int
) -> None:
    folder = tmp_path_factory.mktemp("sort") / "runs"
    rows, duplicates = _sort(folder, records, buffer_bytes, batch)
    assert rows == _sort_in_memory(records)
    assert len(rows) + duplicates == len(records)


def test_duplicates_are_merged_before_they_are_written(tmp_path: Path) -> None:
    sorter = Deduplicator(tmp_path)
    cleaned = PROTEIN.tokenise([b"MKV" * 1000] * 1000)
    for part in range(10):
        names = [b"p%d" % (1000 * part + i) for i in range(1000)]
        _add(sorter, names, cleaned)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 200_000
    (records,) = sorter.sorted()
    assert (len(records.sequences), records.duplicates) == (1, 9_999)
    assert records.names[0].count(b"\x01") == 9_999
