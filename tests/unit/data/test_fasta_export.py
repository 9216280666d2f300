"""A store as FASTA: it ingests to the same store, and a file is whole or not there."""

from pathlib import Path

import numpy as np
import pytest

from d2plm.core.errors import ConfigError, DataError
from d2plm.core.vocabulary import encode
from d2plm.data.fasta import read_fasta_blocks
from d2plm.data.fasta_export import export_sequences
from d2plm.data.ingest import ingest
from d2plm.data.store import SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter
from tests.conftest import write_store

AWKWARD = (
    b">plain\nMKV\n>also plain, with more words\nmkv*\n>\xff\xfe\nAC\n>\nGGG\n"
    b">nr1\x01nr2 an nr header\nLLLL\n>>greater\n" + b"W" * 60 + b"\n>over\n" + b"W" * 61 + b"\n"
)


def _store(path: Path, names: list[str]) -> SequenceStore:
    with SequenceStoreWriter(path, kind="raw") as writer:
        sequences = [encode("M" * count).tobytes() for count in range(1, len(names) + 1)]
        writer.extend([name.encode() for name in names], sequences)
    return SequenceStore(path)


def test_an_export_ingests_to_its_store(tmp_path: Path) -> None:
    source = tmp_path / "in.fasta"
    source.write_bytes(AWKWARD)
    ingest(source, tmp_path / "first")
    store = SequenceStore(tmp_path / "first")
    assert store.manifest["provenance"]["duplicates"] > 0
    output = tmp_path / "new" / "out.fasta"
    seen: list[int] = []
    assert export_sequences(store, output, seen.append) == 0
    assert seen == [len(store)]
    ingest(output, tmp_path / "second")
    assert SequenceStore(tmp_path / "second").manifest["digests"] == store.manifest["digests"]


def test_blanks_in_names_are_written_so_that_no_name_is_lost(tmp_path: Path) -> None:
    store = _store(tmp_path / "s", ["one protein\x01another one", "plain"])
    assert export_sequences(store, tmp_path / "out.fasta") == 1
    (records,) = read_fasta_blocks(tmp_path / "out.fasta")
    assert records.names == [b"one_protein\x01another_one", b"plain"]


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    store, file = _store(tmp_path / "s", ["a"]), tmp_path / "file"
    file.write_text("in the way")
    for output in (tmp_path / "s", Path("/dev/null"), file / "out.fasta", tmp_path / "a.fasta.xz"):
        with pytest.raises((DataError, ConfigError), match=str(output)):
            export_sequences(store, output)
    other = write_store(tmp_path / "t", [np.array([4, 30], dtype=np.uint8)])
    (tmp_path / "out.fasta").write_text("old")
    with pytest.raises(DataError, match="not residues"):
        export_sequences(other, tmp_path / "out.fasta")
    assert (tmp_path / "out.fasta").read_text() == "old"
    assert {file.name for file in tmp_path.iterdir()} == {"s", "file", "t", "out.fasta"}
