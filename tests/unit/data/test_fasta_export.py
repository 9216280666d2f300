"""A store as FASTA: it ingests to the same store, and a file is whole or not there."""

import gzip
from pathlib import Path

import pytest

from d2plm.core.errors import ConfigError, DataError
from d2plm.core.vocabulary import encode
from d2plm.data import fasta_export as module
from d2plm.data.fasta import read_fasta_blocks
from d2plm.data.fasta_export import export_sequences, first_records
from d2plm.data.ingest import ingest
from d2plm.data.store import BLOCK_SEQUENCES, SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter

EXAMPLE = Path(__file__).parents[3] / "examples" / "data" / "uniprot_500.fasta.gz"
AWKWARD = (
    b">plain\nMKV\n>also plain, with more words\nmkv*\n>\xff\xfe\nAC\n>\nGGG\n"
    b">nr1\x01nr2 an nr header\nLLLL\n>>greater\n" + b"W" * 60 + b"\n>over\n" + b"W" * 61 + b"\n"
)


def _store(path: Path, names: list[str]) -> SequenceStore:
    with SequenceStoreWriter(path, kind="raw") as writer:
        sequences = [encode("M" * count).tobytes() for count in range(1, len(names) + 1)]
        writer.extend([name.encode() for name in names], sequences)
    return SequenceStore(path)


@pytest.mark.parametrize("ending", [".fasta", ".fasta.gz"])
@pytest.mark.parametrize("content", [AWKWARD, None])
def test_an_export_ingests_to_the_same_store(
    content: bytes | None, ending: str, tmp_path: Path
) -> None:
    source = EXAMPLE
    if content is not None:
        source = tmp_path / "in.fasta"
        source.write_bytes(content)
    ingest(source, tmp_path / "first")
    store = SequenceStore(tmp_path / "first")
    assert store.manifest["provenance"]["duplicates"] > 0
    output = tmp_path / "new" / f"out{ending}"
    seen: list[int] = []
    assert export_sequences(store, output, seen.append) == 0
    assert seen == [len(store)]
    assert (output.read_bytes()[:2] == b"\x1f\x8b") == (ending == ".fasta.gz")
    ingest(output, tmp_path / "second")
    assert SequenceStore(tmp_path / "second").manifest["digests"] == store.manifest["digests"]


def test_lines_have_sixty_columns_and_equal_sequences_one_header(tmp_path: Path) -> None:
    (tmp_path / "in.fasta").write_bytes(b">b\n" + b"W" * 61 + b"\n>a\n" + b"W" * 61 + b"\n")
    ingest(tmp_path / "in.fasta", tmp_path / "s")
    export_sequences(SequenceStore(tmp_path / "s"), tmp_path / "out.fasta")
    assert (tmp_path / "out.fasta").read_bytes() == b">a\x01b\n" + b"W" * 60 + b"\nW\n"


def test_blanks_in_names_are_written_so_that_no_name_is_lost(tmp_path: Path) -> None:
    store = _store(tmp_path / "s", ["one protein\x01another one", "plain"])
    assert export_sequences(store, tmp_path / "out.fasta") == 1
    names = [
        name for records in read_fasta_blocks(tmp_path / "out.fasta") for name in records.names
    ]
    assert names == [b"one_protein\x01another_one", b"plain"]


def test_the_first_records_are_those_of_an_export(tmp_path: Path) -> None:
    store = _store(tmp_path / "s", [f"protein{n}" for n in range(BLOCK_SEQUENCES + 5)])
    export_sequences(store, tmp_path / "out.fasta")
    whole = (tmp_path / "out.fasta").read_bytes()
    for number in (1, 3, BLOCK_SEQUENCES + 2):
        head = b"".join(first_records(store, number))
        assert head.count(b">") == number
        assert whole.startswith(head)
    assert b"".join(first_records(store, 10**6)) == whole


def test_equal_stores_give_equal_compressed_files(tmp_path: Path) -> None:
    store = _store(tmp_path / "s", ["a", "b"])
    for name in ("one.fasta.gz", "two.fasta.gz"):
        export_sequences(store, tmp_path / name)
    assert (tmp_path / "one.fasta.gz").read_bytes() == (tmp_path / "two.fasta.gz").read_bytes()
    assert gzip.decompress((tmp_path / "one.fasta.gz").read_bytes()) == b">a\nM\n>b\nMM\n"


@pytest.mark.parametrize("ending", [".fasta", ".fasta.gz"])
def test_a_broken_off_export_leaves_what_was_there(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, output = _store(tmp_path / "s", ["a", "b"]), tmp_path / f"out{ending}"
    output.write_bytes(b"old")

    def interrupt(name: bytes) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_one_word", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_sequences(store, output)
    assert output.read_bytes() == b"old"
    assert {file.name for file in tmp_path.iterdir()} == {"s", output.name}


@pytest.mark.parametrize("ending", [".xz", ".zst", ".bz2"])
def test_another_compression_is_rejected(ending: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.gz"):
        export_sequences(_store(tmp_path / "s", ["a"]), tmp_path / f"out.fasta{ending}")


def test_nothing_but_a_file_is_replaced(tmp_path: Path) -> None:
    store = _store(tmp_path / "s", ["a"])
    for output in (tmp_path / "s", Path("/dev/null")):
        with pytest.raises(DataError, match="exists and is no file"):
            export_sequences(store, output)


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"out\.fasta: cannot be written"):
        export_sequences(_store(tmp_path / "s", ["a"]), tmp_path / "file" / "out.fasta")


def test_a_token_that_is_not_a_residue_is_rejected(tmp_path: Path) -> None:
    with SequenceStoreWriter(tmp_path / "s", kind="raw") as writer:
        writer.extend([b"a"], [bytes([4, 30])])
    with pytest.raises(DataError, match="not residues"):
        export_sequences(SequenceStore(tmp_path / "s"), tmp_path / "out.fasta")
    assert not (tmp_path / "out.fasta").exists()
