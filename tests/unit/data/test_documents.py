"""Texts: every form gives the same documents, long ones come in parts, and nothing is lost."""

import gzip
import json
import re
from collections import defaultdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import DNA, vocabulary
from d2plm.data.ingest import ingest
from d2plm.data.sources import read_sources, resolve_inputs
from d2plm.data.store import SequenceStore
from d2plm.settings.data import Reading
from tests.conftest import MonkeyPatch

BYTES = vocabulary("bytes")
TEXT = "In the beginning\nwas the Wörd.\n\n \t\nAnd the word\r\nwas “with” God;\n\n\nand\n" * 40
DOCUMENTS = [("a", "Döcument one,\nof two lines\n"), ("b", "\ttwo"), ("c", "“three” \U0001f600")]


def _write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _read(path: Path, *, in_parts: bool = False, **reading: Any) -> list[tuple[str, str]]:
    """(name, text) of each document, its parts joined."""
    parts = [
        (name.decode(), text, block.part)
        for block in read_sources(resolve_inputs(path), Reading(**reading), BYTES, in_parts)
        for name, text in zip(block.names, block.sequences, strict=True)
    ]
    joined: list[tuple[str, bytes]] = []
    for name, text, part in parts:
        text.decode()  # no part ends within a character
        if part:
            assert joined[-1][0] == name
            joined[-1] = name, joined[-1][1] + text
        else:
            joined.append((name, text))
    return [(name, text.decode()) for name, text in joined]


def _expected(text: str, form: str) -> list[tuple[str, str]]:
    """As `_read`, line by line."""
    if form == "text":
        return [("a.txt", text)]
    numbered = list(enumerate(text.split("\n"), start=1))
    if form == "lines":
        return [(f"a.txt:{n}", line.rstrip("\r")) for n, line in numbered if line.strip()]
    groups = groupby(numbered, lambda one: bool(one[1].strip()))
    documents = [list(group) for filled, group in groups if filled]
    return [(f"a.txt:{group[0][0]}", "\n".join(line for _, line in group)) for group in documents]


@pytest.mark.parametrize("part", [7, 64, 1 << 20])
@pytest.mark.parametrize("form", ["text", "lines", "paragraphs"])
def test_a_plain_text_is_read_whole_in_parts_of_any_size(
    tmp_path: Path, monkeypatch: MonkeyPatch, form: str, part: int
) -> None:
    monkeypatch.setattr("d2plm.data.documents._PART_BYTES", part)
    monkeypatch.setattr("d2plm.data.documents._BLOCK_BYTES", part)
    path = _write(tmp_path / "a.txt", "\ufeff" + TEXT)
    assert _read(path, in_parts=True, format=form) == _expected(TEXT, form)


@pytest.mark.parametrize("ending", ["jsonl", "json", "ndjson"])
def test_json_lines_are_documents(tmp_path: Path, ending: str) -> None:
    lines = [json.dumps({"meta": {}, "text": text, "id": name}) for name, text in DOCUMENTS]
    content = gzip.compress(("\ufeff" + "\n\n".join(lines)).encode())
    assert _read(_write(tmp_path / f"a.{ending}.gz", content)) == DOCUMENTS
    # Those without a name are called after file and line.
    path = _write(tmp_path / f"b.{ending}", '{"content": "one"}\n\n{"content": "2", "text": "3"}\n')
    assert _read(path) == [(f"b.{ending}:1", "one"), (f"b.{ending}:3", "2")]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "b.parquet")
    assert _read(tmp_path / "b.parquet") == [("b.parquet:1", "one"), ("b.parquet:2", "two")]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"text": "a"}\n{"text": \n', ", line 2: not JSON"),
        ('\n["a"]\n', ", line 2: list"),
        ('{"text": "a"}\n{"text": 3}\n', ", line 2: 'text' is int"),
        ('{"text": "a", "id": {}}\n', ", line 1: a name that is dict"),
        ('{"body": "a"}\n', ", line 1: .* body"),
        ('{"text": "a"}\n{"text": null}\n', ", line 2: record"),
        ("", ": is empty"),
        (b'{"text": "\xff"}\n', ", line 1: not JSON"),
        ('{"text": ' + "[" * 100_000 + "\n", ", line 1: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes | str, place: str) -> None:
    path = _write(tmp_path / "a.jsonl", content)
    with pytest.raises(DataError, match=f"{path}{place}") as caught:
        ingest(path, tmp_path / "out", vocabulary=BYTES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("a.fa", b">a\nMKV\n"), ("a.FASTA.gz", gzip.compress(b"\n>a\nMKV\n", mtime=0))),
        *(("a.idx", b"MMIDIDX\0\0"), ("a.bin", b"\1\0")),
    ],
)
def test_a_file_of_another_form_is_no_text_unasked(
    tmp_path: Path, name: str, content: bytes
) -> None:
    path = _write(tmp_path / name, content)
    with pytest.raises(DataError, match=f"{path}: .*format=text"):
        ingest(path, tmp_path / "out", vocabulary=BYTES)
    ingest(path, tmp_path / "out", vocabulary=BYTES, reading=Reading(format="text"))
    ingest(_write(tmp_path / "persian.fa", "سلام"), tmp_path / "persian", vocabulary=BYTES)


def _pieces(path: Path) -> dict[str, list[str]]:
    """The texts of the pieces of each document, in order."""
    store, found = SequenceStore(path), defaultdict(dict)
    for index, tokens in enumerate(store):
        for name in store.names(index):
            document, _, number = name.rpartition("/")
            found[document][int(number)] = store.vocabulary.decode(tokens)
    assert all(sorted(one) == list(range(1, len(one) + 1)) for one in found.values())
    return {name: [one[number] for number in sorted(one)] for name, one in found.items()}


def test_pieces_of_parts_are_the_text(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    text = TEXT.replace("“", '"').replace("”", '"').replace("ö", "o")
    path = _write(tmp_path / "a.txt", text)
    manifest = ingest(path, tmp_path / "whole", vocabulary=BYTES, window=50)
    monkeypatch.setattr("d2plm.data.documents._PART_BYTES", 1000)
    in_parts = ingest(path, tmp_path / "parts", vocabulary=BYTES, window=50)
    for name in ("whole", "parts"):
        (pieces,) = _pieces(tmp_path / name).values()
        assert "".join(pieces) == text
        assert max(map(len, pieces)) == 50
    assert manifest["provenance"]["pieces"] == -(-len(text) // 50)
    assert in_parts["provenance"]["records"] == manifest["provenance"]["records"] == 1
    monkeypatch.setattr("d2plm.data.documents._WHOLE_BYTES", 100)
    with pytest.raises(DataError, match="line 1: a record of more than 100"):
        ingest(path, tmp_path / "out", vocabulary=BYTES)


@pytest.mark.parametrize("width", [60, 10**6])
def test_long_fasta_records_are_parts(tmp_path: Path, monkeypatch: MonkeyPatch, width: int) -> None:
    records = {"short": "ACGT" * 9, "long": "GATTACA" * 900, "other": "CC" * 6, "late": "TGC" * 900}
    content = "".join(
        f">{name} words\n" + re.sub(f"(.{{{width}}})", r"\1\n", text) + "\n"
        for name, text in records.items()
    )
    path = _write(tmp_path / "a.fasta", content)
    monkeypatch.setattr("d2plm.data.fasta._MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr("d2plm.data.fasta._BLOCK_BYTES", 300)
    manifest = ingest(path, tmp_path / "out", vocabulary=DNA, window=10)
    assert {name: "".join(one) for name, one in _pieces(tmp_path / "out").items()} == records
    assert manifest["provenance"]["records"] == 4
    store, named = SequenceStore(tmp_path / "out"), [*records]
    owners = [(i, name.rpartition("/")[0]) for i in range(len(store)) for name in store.names(i)]
    assert {(index, named[record]) for index, record in store.pieces.tolist()} == {*owners}
    with pytest.raises(DataError, match="'long words' has more than 1,000"):
        ingest(path, tmp_path / "out", vocabulary=DNA)


def test_peptides_of_few_letters_are_proteins_and_nucleotides_none(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.fasta", ">a\nGACGATTACA\n>b\nCATTAG\n")
    assert ingest(path, tmp_path / "short")["sequences"] == 2
    path = _write(tmp_path / "b.fasta", f">a\nMLE{'GATTACA' * 3}\n>b\n{'GATTACA' * 9}\n")
    with pytest.raises(DataError, match="'b' looks like nucleotides, as do 1 of 2"):
        ingest(path, tmp_path / "other")
