"""FASTA reading: what is cleaned, what is refused and with which words."""

import gzip
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2plm.alphabet import RESIDUES
from d2plm.data.fasta import FastaRecord, read_fasta, write_fasta
from d2plm.errors import ConfigError, DataError

PROTEINS = Path(__file__).parents[3] / "examples" / "data" / "uniprot_20k.fasta.gz"


def _file(folder: Path, content: bytes, name: str = "proteins.fasta") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def _refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        list(read_fasta(path))
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_lower_case_whitespace_gaps_and_one_stop_are_cleaned(tmp_path: Path) -> None:
    path = _file(tmp_path, b"\n>sp|P1 a protein\r\nmk v\r\n-L.\tU\r\nOBZX*\r\n\r\n>two\nAC")
    assert list(read_fasta(path)) == [
        FastaRecord("sp|P1", b"MKVLUOBZX"),
        FastaRecord("two", b"AC"),
    ]


def test_gzip_is_told_by_its_bytes_not_by_its_name(tmp_path: Path) -> None:
    packed = _file(tmp_path, gzip.compress(b">a\nMK\n") + gzip.compress(b">b\nAC\n"), "x.fasta")
    plain = _file(tmp_path, b">a\nMK\n>b\nAC\n", "y.fasta.gz")
    expected = [FastaRecord("a", b"MK"), FastaRecord("b", b"AC")]
    assert list(read_fasta(packed)) == list(read_fasta(plain)) == expected


def test_real_proteins_are_read_lazily() -> None:
    records = read_fasta(PROTEINS)
    first = next(records)
    assert first.name
    assert set(first.sequence.decode()) <= set(RESIDUES)
    records.close()  # type: ignore[attr-defined]  # an iterator that is a generator


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1),
            st.text(RESIDUES, min_size=1, max_size=200),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_written_records_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("fasta") / "out.fasta"
    write_fasta(path, records)
    assert [(r.name, r.sequence.decode()) for r in read_fasta(path)] == records
    assert max(len(line) for line in path.read_text().splitlines() if line[0] != ">") <= 60


def test_writing_leaves_nothing_behind_when_the_records_fail(tmp_path: Path) -> None:
    path = _file(tmp_path, b"before")

    def failing() -> object:
        yield "a", b"MK"
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_fasta(path, failing())  # type: ignore[arg-type]  # a generator that breaks off
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"before"


def test_writing_into_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        write_fasta(tmp_path / "no" / "out.fasta", [("a", b"MK")])


def test_missing_file(tmp_path: Path) -> None:
    assert "no such FASTA file" in _refusal(tmp_path / "none.fasta")


def test_folder(tmp_path: Path) -> None:
    assert "is a folder" in _refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n \n", gzip.compress(b"")])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    assert "is empty" in _refusal(_file(tmp_path, content))


@pytest.mark.parametrize("content", [b"MKV\n>a\nMK\n", b"\x00\x01\xff" * 99, b"\n" * 99 + b"x\n"])
def test_text_before_the_first_record(tmp_path: Path, content: bytes) -> None:
    assert "not FASTA" in _refusal(_file(tmp_path, content))


@pytest.mark.parametrize("content", [b">a\n>b\nMK\n", b">z\nMK\n>a\n", b">a\n--\n*\n>b\nMK"])
def test_record_without_sequence(tmp_path: Path, content: bytes) -> None:
    message = _refusal(_file(tmp_path, content))
    assert "'a' has no sequence" in message
    assert f"line {content[: content.index(b'>a')].count(10) + 1}:" in message


@pytest.mark.parametrize("letter", ["J", "1", "@", "\xe9"])
def test_illegal_letter_is_named_with_record_and_line(tmp_path: Path, letter: str) -> None:
    content = b">good\nMK\n>bad one\nMKV\nAC" + letter.encode("latin-1") + b"D\n"
    message = _refusal(_file(tmp_path, content))
    assert "line 5" in message
    assert "'bad'" in message
    assert repr(letter) in message


def test_stop_inside_a_sequence_is_illegal(tmp_path: Path) -> None:
    message = _refusal(_file(tmp_path, b">a\nMK\nV*A\nC*\n"))
    assert "line 3" in message
    assert "'*'" in message


def test_truncated_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(b">a\nMKVLAC\n" * 1000)
    assert "truncated or corrupt gzip" in _refusal(_file(tmp_path, whole[:-12]))


@pytest.mark.parametrize("position", [15, -6])
def test_corrupt_gzip(tmp_path: Path, position: int) -> None:
    damaged = bytearray(gzip.compress(os.urandom(2000).hex().encode().join([b">a\n", b"\n"])))
    damaged[position] ^= 0xFF
    message = _refusal(_file(tmp_path, bytes(damaged)))
    assert "truncated or corrupt gzip" in message or "not FASTA" in message


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, b">a\nMK\n")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)  # root may read everything, so ask no real file
    with pytest.raises(DataError, match="not readable by this user"):
        list(read_fasta(path))


def test_bad_records_are_dropped_and_counted_on_request(tmp_path: Path) -> None:
    path = _file(tmp_path, b">a\nMK\n>b\nM!K\n>c\n>d\nJJ\n>e\nAC\n")
    dropped: Counter[str] = Counter()
    assert [r.name for r in read_fasta(path, on_illegal="drop", dropped=dropped)] == ["a", "e"]
    assert dropped == {"illegal letter": 2, "no sequence": 1}


def test_unknown_on_illegal_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"on_illegal='dorp'.*did you mean 'drop'"):
        list(read_fasta(tmp_path, on_illegal="dorp"))
