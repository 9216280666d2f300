"""The external sort: each sequence once, in the order of digests, with the names of all."""

import hashlib
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from d2plm.core.vocabulary import PROTEIN, Tokenised, encode
from d2plm.data.deduplication import Deduplicator
from tests.conftest import MonkeyPatch

Record = tuple[bytes, str]


def _add(sorter: Deduplicator, names: list[bytes], found: Tokenised, kept: list[int]) -> None:
    whole = [b""] * len(names)
    sorter.add(names, found.tokens, found.starts[kept], found.lengths[kept], whole)


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
def test_equal_pieces_have_the_numbers_of_all_their_records(
    tmp_path: Path, monkeypatch: MonkeyPatch, buffer_bytes: int
) -> None:
    monkeypatch.setattr("d2plm.data.deduplication._BUFFER_BYTES", buffer_bytes)
    sorter, draw = Deduplicator(tmp_path), random.Random(0)
    expected = defaultdict[bytes, set[int]](set)
    for _ in range(200):
        text, record = draw.choice([b"M", b"MK", b"V", b"AV"]), draw.randrange(-1, 300)
        found = PROTEIN.tokenise([text])
        own = [] if record < 0 else [record]
        expected[found[0].tobytes()].update(own)
        owners = np.array(own, np.int64).tobytes()
        sorter.add([b"same"], found.tokens, found.starts, found.lengths, [owners])
    for part in sorter.sorted():
        for sequence, owners in zip(part.sequences, part.records, strict=True):
            assert np.frombuffer(owners, np.int64).tolist() == sorted(expected.pop(sequence))
    assert not expected


def _sort(
    folder: Path, records: list[Record], buffer_bytes: int, batch: int
) -> tuple[list[tuple[bytes, bytes]], int]:
    """(name, tokens) of the distinct sequences in order, and how many were left out."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("d2plm.data.deduplication._BUFFER_BYTES", buffer_bytes)
        sorter = Deduplicator(folder)
        for first in range(0, len(records), batch):
            some = records[first : first + batch]
            cleaned = PROTEIN.tokenise([sequence.encode() for _, sequence in some])
            _add(sorter, [name for name, _ in some], cleaned, list(range(len(some))))
        parts = list(sorter.sorted())
    pairs = [pair for part in parts for pair in zip(part.names, part.sequences, strict=True)]
    return pairs, sum(part.duplicates for part in parts)


def _sort_in_memory(records: list[Record]) -> list[tuple[bytes, bytes]]:
    names = defaultdict(set)
    for name, sequence in records:
        names[encode(sequence).tobytes()].update(name.split(b"\x01"))
    return [
        (b"\x01".join(sorted(names[tokens])), tokens)
        for tokens in sorted(set(names), key=lambda tokens: hashlib.sha256(tokens).digest())
    ]


@settings(deadline=None)
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
def test_sorts_as_a_set_sorted_by_digest_in_memory(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record], buffer_bytes: int, batch: int
) -> None:
    folder = tmp_path_factory.mktemp("sort") / "runs"
    pairs, duplicates = _sort(folder, records, buffer_bytes, batch)
    assert pairs == _sort_in_memory(records)
    assert len(pairs) + duplicates == len(records)


def test_duplicates_are_merged_before_they_are_written(tmp_path: Path) -> None:
    sorter = Deduplicator(tmp_path)
    cleaned = PROTEIN.tokenise([b"MKV" * 1000] * 1000)
    for part in range(10):
        names = [b"p%d" % (1000 * part + i) for i in range(1000)]
        _add(sorter, names, cleaned, list(range(1000)))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 200_000
    (records,) = sorter.sorted()
    assert (len(records.sequences), records.duplicates) == (1, 9_999)
    assert records.names[0].count(b"\x01") == 9_999
