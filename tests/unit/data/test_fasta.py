"""FASTA reading: cleaning, and the errors for rejected input."""

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow
import pytest

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import decode
from d2plm.data.fasta import read_fasta, read_fasta_blocks, read_template_fasta, write_fasta
from tests.conftest import MonkeyPatch

TWO = b">a\nMK\n>b\nAC\n"


def _file(folder: Path, content: bytes, name: str = "proteins.fasta") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


LETTERS = bytes.maketrans(b"0123456789abcdef", b"ACDEFGHIKLMNPQRS")
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": partial(gzip.compress, mtime=0),  # the same in every process that collects the tests
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": partial(pyarrow.compress, codec="zstd", asbytes=True),
}


def _read(path: Path) -> list[tuple[str, str]]:
    return [(record.name, decode(record.tokens)) for record in read_fasta(path)]


def _refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        list(read_fasta(path))
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


EVERY = pytest.mark.parametrize("compress", COMPRESSIONS.values(), ids=COMPRESSIONS)


@EVERY
def test_compressed_streams_are_read(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    packed = compress(TWO) + compress(b"") + compress(b">c\nWY\n")
    assert _read(_file(tmp_path, packed)) == [("a", "MK"), ("b", "AC"), ("c", "WY")]
    assert _read(_file(tmp_path, TWO, "y.fasta.gz")) == [("a", "MK"), ("b", "AC")]


@EVERY
def test_damaged_streams_are_refused(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    whole = compress(b">a\n" + os.urandom(50_000).hex().encode().translate(LETTERS) + b"M")
    second = whole + b"\x01" + compress(b"\n>b\nAC\n")[1:]
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:8], second):
        assert "truncated or corrupt compressed file" in _refusal(_file(tmp_path, damaged))


def test_written_records_are_read_back_from_lines_of_60(tmp_path: Path) -> None:
    records = [("a", "M"), ("b", "MK" * 30), ("c|1", "ACDEFGHIKLMNPQRSTVWYXBUZO" * 9)]
    write_fasta(tmp_path / "out.fasta", records)
    assert _read(tmp_path / "out.fasta") == records
    lines = (tmp_path / "out.fasta").read_text().splitlines()
    assert max(len(line) for line in lines) == 60


def test_places_are_right_in_every_block(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("d2plm.data.fasta._BLOCK_BYTES", 16)
    content = b"\n \r\n" * 9 + b"".join(b">p%d\nMK\nAC%d\n\n" % (i, i) for i in range(30))
    path = _file(tmp_path, content)
    lines = content.splitlines()
    for records in read_fasta_blocks(path):
        for index, (name, text) in enumerate(zip(records.names, records.sequences, strict=True)):
            line = lines.index(b">" + name) + 1
            assert records.where(index, None) == f"{path}, line {line}"
            assert records.where(index, text.index(b"K")) == f"{path}, line {line + 1}"
            assert records.where(index, text.index(name[1:])) == f"{path}, line {line + 2}"


def test_a_header_of_several_proteins_gives_the_names_of_all(tmp_path: Path) -> None:
    path = _file(tmp_path, b">P1 one [a b]\x01P2 two\x01 P3\nMK\n")
    assert [block.names for block in read_fasta_blocks(path)] == [[b"P1\x01P2\x01P3"]]
    assert _read(path) == [("P1", "MK")]  # what people see


def test_templates_are_read_as_they_stand(tmp_path: Path) -> None:
    path = _file(tmp_path, b">a b\nMK__\n v?*\n>\n\n")
    lines = [f"{path}, line {number}" for number in (1, 4)]
    assert [*read_template_fasta(path)] == [("a", "MK__v?*", lines[0]), ("", "", lines[1])]


def test_writing_leaves_nothing_behind_when_the_records_fail(tmp_path: Path) -> None:
    path = _file(tmp_path, b"before")
    with pytest.raises(ZeroDivisionError):
        write_fasta(path, (("a", bytes(1 // n)) for n in (1, 0)))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"before"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((b"", "is empty"), (b"\n \n", "is empty"), (gzip.compress(b"", mtime=0), "is empty")),
        *((b"MKV\n>a\nMK\n", "not FASTA"), (b"\n" * 99 + b"x\n", "not FASTA")),
        (b">a\n>b\nMK\n", "line 1: record 'a'"),
        (b">z\nMK\n>a\n", "line 3: record 'a'"),
        (b">a\n--\n*\n>b\nMK", "line 1: record 'a'"),
    ],
)
def test_what_is_not_fasta_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in _refusal(_file(tmp_path, content))


@pytest.mark.parametrize("line", [b"M" * 300_000, b"MKV\n" * 100_000], ids=["a line", "many"])
def test_a_giant_record_is_refused(tmp_path: Path, monkeypatch: MonkeyPatch, line: bytes) -> None:
    monkeypatch.setattr("d2plm.data.fasta._MAX_RECORD_BYTES", 100_000)
    monkeypatch.setattr("d2plm.data.fasta._BLOCK_BYTES", 10_000)
    path = tmp_path / "bomb.fasta.gz"
    path.write_bytes(gzip.compress(b">fine\nMK\n>chromosome 1\n" + line))
    with pytest.raises(DataError, match="record 'chromosome 1' has more than"):
        list(read_fasta(path))
