"""Every form of input gives the same proteins, and every kind of bad input one clear line."""

import gzip
import io
import json
import logging
import os
import pickle
import shlex
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from d2plm.core.errors import DataError
from d2plm.data.ingest import ingest, source_digest
from d2plm.data.sources import input_files, read_sources, resolve_inputs
from d2plm.data.store import SequenceStore
from d2plm.settings.data import Reading
from tests.conftest import FASTA, Logged, MonkeyPatch

ROOT = Path(__file__).parents[3]
HUGGING_FACE = ROOT / "tests" / "data" / "hf_dataset"  # saved by `datasets` 5.2.0

Record = tuple[str, str]
Items = Iterable[tuple[bytes, bytes]]
Build = Callable[[Path, list[Record]], Path]  # writes records into a folder


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """(first word of the header, sequence) of the first proteins of the example file."""
    with gzip.open(FASTA, "rt") as stream:
        texts = stream.read(200_000)[1:].split("\n>")
    parts = [text.partition("\n") for text in texts[:200]]
    return [(header.split()[0], body.replace("\n", "")) for header, _, body in parts]


@pytest.fixture(scope="module")
def few(records: list[Record]) -> list[Record]:
    return records[:12]


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _fasta(records: Iterable[Record]) -> bytes:
    return "".join(f">{name} described\n{sequence}\n" for name, sequence in records).encode()


def _table(records: list[Record]) -> pyarrow.Table:
    names, sequences = zip(*records, strict=True)
    return pyarrow.table({"length": list(map(len, sequences)), "id": names, "sequence": sequences})


def _csv(records: list[Record], delimiter: str = ",") -> bytes:
    rows = [("id", "note", "sequence"), *((name, "any", text) for name, text in records)]
    return "".join(f"{delimiter.join(row)}\n" for row in rows).encode()


_zstd = partial(pyarrow.compress, codec="zstd", asbytes=True)


def _lmdb(path: Path, items: Items, subdir: bool = True) -> Path:
    with lmdb.open(str(path), 1 << 28, subdir) as opened, opened.begin(write=True) as transaction:
        for key, value in items:
            transaction.put(key, value)
    return path


def _numbered(records: list[Record]) -> Items:
    """As data sets of other makers often are: keys 0, 1, …, and the number of proteins."""
    values = [{"length": len(text), "id": name, "sequence": text} for name, text in records]
    items = [(b"%d" % index, json.dumps(value).encode()) for index, value in enumerate(values)]
    return [*items, (b"num_examples", pickle.dumps(len(records)))]


def _parquet(path: Path, records: list[Record], **options: Any) -> Path:
    pyarrow.parquet.write_table(_table(records), path, **options)
    return path


def _arrow(path: Path, records: list[Record]) -> Path:
    table = _table(records)
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    return path


def _hugging_face(folder: Path, records: list[Record]) -> Path:
    """A folder as `Dataset.save_to_disk` writes it."""
    folder.mkdir()
    files = [f"data-{shard:05}-of-00002.arrow" for shard in range(2)]
    for file, own in zip(files, (records[:7], records[7:]), strict=True):
        _arrow(folder / file, own)
    state = {"_data_files": [{"filename": file} for file in files]}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def _hugging_face_splits(folder: Path, records: list[Record]) -> Path:
    """A folder as `DatasetDict.save_to_disk` writes it."""
    folder.mkdir()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    _hugging_face(folder / "train", records)
    return folder


def _parquet_shards(folder: Path, records: list[Record]) -> Path:
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("about")
    _parquet(folder / "data" / "train-0.parquet", records[:5])
    _parquet(folder / "data" / "train-1.parquet", records[5:])
    return folder


FORMS: dict[str, Build] = {
    "fasta": lambda p, r: _write(p / "a.fasta", _fasta(r)),
    "fasta.zst": lambda p, r: _write(p / "a.fasta.zst", _zstd(_fasta(r))),
    "lmdb of JSON": lambda p, r: _lmdb(p / "l", _numbered(r)),
    "lmdb of letters": lambda p, r: _lmdb(p / "l", [(n.encode(), t.encode()) for n, t in r]),
    "lmdb in a file": lambda p, r: _lmdb(p / "l.lmdb", _numbered(r), subdir=False),
    "lmdb of strings": lambda p, r: _lmdb(p / "l", [(n.encode(), f'"{t}"'.encode()) for n, t in r]),
    "parquet": lambda p, r: _parquet(p / "a.parquet", r, row_group_size=5),
    "parquet without suffix": lambda p, r: _parquet(p / "a", r),
    "csv": lambda p, r: _write(p / "a.csv", _csv(r)),
    "tsv": lambda p, r: _write(p / "a.TSV", _csv(r, "\t")),
    "csv.gz": lambda p, r: _write(p / "a.csv.gz", gzip.compress(_csv(r))),
    "arrow": lambda p, r: _arrow(p / "a.arrow", r),
    "Hugging Face dataset": lambda p, r: _hugging_face(p / "h", r),
    "Hugging Face splits": lambda p, r: _hugging_face_splits(p / "h", r),
    "folder of parquet": lambda p, r: _parquet_shards(p / "h", r),
}


def _read(path: Path | list[Path], **reading: Any) -> list[Record]:
    """(name, letters) of each record."""
    paths = [path] if isinstance(path, Path) else path
    return [
        (name.decode(), b"".join(text.split()).decode())
        for block in read_sources(paths, Reading(**reading))
        for name, text in zip(block.names, block.sequences, strict=True)
    ]


def _refusal(path: Path, output: Path, **reading: Any) -> str:
    """What ingest says to an input that is bad; nothing may be left behind."""
    with pytest.raises(DataError) as caught:
        ingest(path, output, reading=Reading(**reading))
    assert not output.exists()
    assert not output.with_name(f"partial.{output.name}").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_records(tmp_path: Path, few: list[Record], form: str) -> None:
    read = _read(FORMS[form](tmp_path, few))
    # An LMDB is read in the order of its keys, everything else in its own.
    assert sorted(read) == sorted(few) if form.startswith("lmdb") else read == few


def test_several_inputs_are_read_one_after_another(
    tmp_path: Path, few: list[Record], monkeypatch: MonkeyPatch
) -> None:
    parts = {"fasta.zst": few[:3], "parquet": few[3:6], "csv": few[6:]}
    paths = [FORMS[form](tmp_path, own) for form, own in parts.items()]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        for path in paths[:2]:
            with pytest.raises(DataError, match=rf"{path}: .*pip install pyarrow"):
                list(read_sources([path]))
    assert _read(paths) == few == _read(HUGGING_FACE)
    done = [block.done for block in read_sources(paths)]
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] == 1


def test_patterns_stand_for_the_files_that_match_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.fasta", "a.fasta", "c.txt", "[x].fasta", "deep/d.fasta"):
        (tmp_path / name).touch()

    def names(*inputs: str) -> list[str]:
        return [path.name for path in resolve_inputs([str(tmp_path / one) for one in inputs])]

    assert names("*.fasta") == ["[x].fasta", "a.fasta", "b.fasta"]
    assert names("c.txt", "[x].fasta", "**/d.fasta") == ["c.txt", "[x].fasta", "d.fasta"]
    assert resolve_inputs("-") == [Path("-")]
    assert resolve_inputs(tmp_path / "a.fasta") == [tmp_path / "a.fasta"]
    for nothing in ("none.fasta", "*.none", "x" * 300, "a\0b", []):
        with pytest.raises(DataError):
            resolve_inputs(nothing)


def test_the_digest_of_an_input_is_of_its_bytes(tmp_path: Path, few: list[Record]) -> None:
    one = FORMS["Hugging Face splits"](tmp_path, few)
    digest = source_digest(one)
    assert digest == source_digest(one.rename(tmp_path / "moved"))
    with open(tmp_path / "moved" / "train" / "dataset_info.json", "a") as file:
        file.write(" ")
    assert digest != source_digest(tmp_path / "moved")
    with pytest.raises(DataError, match="no such file"):
        source_digest(tmp_path / "none")


def test_a_pipe_is_read_once_and_whole(tmp_path: Path, few: list[Record]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert source_digest(tmp_path / "pipe") is None  # nothing may be taken from it
    with ThreadPoolExecutor() as pool:
        pool.submit((tmp_path / "pipe").write_bytes, gzip.compress(_fasta(few)))
        assert _read(tmp_path / "pipe") == few


def test_a_large_lmdb_is_read_in_several_passes(
    tmp_path: Path, records: list[Record], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("d2plm.data.sources._LMDB_PASS_BYTES", 5000)
    monkeypatch.setattr("d2plm.data.sources._ROWS", 7)
    assert _read(FORMS["lmdb of letters"](tmp_path, records)) == sorted(records)


def test_rows_without_a_sequence_are_left_out_and_counted(tmp_path: Path, caplog: Logged) -> None:
    caplog.set_level("INFO")
    words = ["NA", "nan", "None", "null", "TRUE", "", "#N/A"]
    rows = "".join(f"n{word},{word}\n" for word in words)
    path = _write(tmp_path / "a", f"id,sequence\na,MK\n{rows}nan,NAG\n".encode())
    assert _read(path, format="csv") == [("a", "MK"), ("nan", "NAG")]
    (notice,) = caplog.messages
    assert str(path) in notice
    assert "(lines 3, 4, 5, 6, 7, 8, 9)" in notice


def test_cells_of_a_table_of_any_type_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for ids, names in (
        (pyarrow.array([7, None]), ["7", ""]),
        (pyarrow.array(["a", "b"], pyarrow.large_string()), ["a", "b"]),
        (None, ["row1", "row2"]),
    ):
        columns = {"sequence": pyarrow.array(["MK", "AC"]).dictionary_encode()}
        columns |= {} if ids is None else {"id": ids}
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=1)
        assert _read(path) == [*zip(names, ["MK", "AC"], strict=True)]


def test_the_fields_may_be_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", b"sequence,heavy,light,clone\nMMM,MK,AC,x\n")
    assert _read(path, sequence_field="light", name_field="clone") == [("x", "AC")]
    assert _read(path, sequence_field="heavy", name_field="heavy") == [("MK", "MK")]
    store = _lmdb(tmp_path / "l", [(b"k", b'{"1": "MK", "clone": "x"}')])
    assert _read(store, sequence_field="1", name_field="clone") == [("x", "MK")]


def test_names_are_one_line_whatever_they_contain(tmp_path: Path) -> None:
    named = zip(("two\nlines\x01more", "\ud800", None), ("MK", "AC", "WY"), strict=True)
    values = [json.dumps({"id": name, "seq": text}).encode() for name, text in named]
    ingest(_lmdb(tmp_path / "l", zip((b"1", b"2", b"3"), values, strict=True)), tmp_path / "out")
    store = SequenceStore(tmp_path / "out")
    assert sorted(store.names(index) for index in range(3)) == [["3"], ["?"], ["two lines more"]]


@pytest.mark.parametrize(
    "value",
    [
        *(pickle.dumps({"primary": "MK"}), b"", b"\x00\x01", b"{}", b'{"primary": 3}'),
        *(b'{"id": [["a"]], "sequence": "MK"}', b'{"a\\nb": "MK"}', b'{"sequence": "MK"'),
        *(b'{"sequence": ' + b"[" * 100_000, b'{"sequence": null}', b'{"sequence": "M1"}'),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_bad_value_of_an_lmdb_is_named_by_its_key(tmp_path: Path, value: bytes) -> None:
    path = _lmdb(tmp_path / "l", [(b"k", value)])
    refusal = _refusal(path, tmp_path / "out")
    assert refusal.startswith(f"{path}, key 'k': ")
    assert ("pickle" in refusal) == value.startswith(b"\x80")


def _without_its_end(path: Path, records: list[Record]) -> Path:
    """An Arrow stream in which nothing is damaged."""
    table, content = _table(records), io.BytesIO()
    with pyarrow.ipc.new_stream(content, table.schema) as stream:
        stream.write_table(table)
        return _write(path / "a.arrow", content.getvalue())


def _an_offset_that_points_elsewhere(path: Path, records: list[Record]) -> Path:
    """It would end the process."""
    content = bytearray(_arrow(path / "a.arrow", records).read_bytes())
    lengths = np.cumsum([0, *(len(sequence) for _, sequence in records)], dtype="<i4")
    place = content.index(lengths.tobytes())
    content[place + 4 : place + 8] = b"\xff\xff\xff\x7f"
    return _write(path / "a.arrow", content)


def _bytes(name: str, content: bytes) -> Build:
    return lambda p, r: _write(p / name, content)


def _cut(form: str, size: int) -> Build:
    def build(path: Path, records: list[Record]) -> Path:
        file = FORMS[form](path, records)
        os.truncate(file, file.stat().st_size + size if size < 0 else size)
        return file

    return build


def _columns(*named: tuple[str, list[Any]]) -> Build:
    def build(path: Path, records: list[Record]) -> Path:
        names, columns = zip(*named, strict=True)
        table = pyarrow.Table.from_arrays([*map(pyarrow.array, columns)], names=list(names))
        pyarrow.parquet.write_table(table, path / "a.parquet")
        return path / "a.parquet"

    return build


def _folder(path: Path, records: list[Record]) -> Path:
    (path / "f").mkdir()
    return path / "f"


def _state(state: str) -> Build:
    def build(path: Path, records: list[Record]) -> Path:
        (_hugging_face(path / "h", records) / "state.json").write_text(state)
        return path / "h"

    return build


A_PROTEIN = "MKTAYIAKQRQISFVKSHFSRQLEERLG"
DROP, TWICE = {"on_illegal": "drop"}, b"id,sequence,sequence\na,MK,AC\n"
# The input, a word of the message, settings.
BAD: list[tuple[Build, str, dict[str, str]]] = [
    (_cut("csv.gz", -9), "truncated", {}),
    (_cut("parquet", -9), "Parquet", {}),
    (_cut("arrow", -9), "truncated", {}),
    (_without_its_end, "truncated", {}),
    (_an_offset_that_points_elsewhere, "not a readable Arrow file", {}),
    (_cut("lmdb in a file", 12_288), "truncated LMDB", {}),
    (_bytes("a.csv", b"id,sequence\n"), "no sequence", {}),
    (_bytes("a.csv", b"id,sequence\na,J\nb,\n"), "no sequence", DROP),
    (_bytes("a", b""), "Parquet", {"format": "parquet"}),
    (_bytes("a.csv", f"{A_PROTEIN}\n".encode()), "header", {}),
    (_bytes("a.csv", b"protein,x\nKRAS,1\nNRAS,2\n"), "sequence_field", {}),
    (_bytes("a.csv", TWICE), "several columns", {}),
    (_columns(("sequence", ["MK"]), ("sequence", ["MK"])), "several columns", {}),
    (_columns(("one", ["MK"]), ("two", ["AC"])), "sequence_field", {}),
    (_columns(("sequence", [["MK"]])), "'sequence' holds list", {}),
    (_columns(("id", ["a", "b"]), ("sequence", ["MK", None])), "row 2: record 'b'", {}),
    (FORMS["parquet"], "'sequence'", {"sequence_field": "sequnce"}),
    (FORMS["csv"], "'note'", {"name_field": "notes"}),
    (FORMS["lmdb of JSON"], "'sequence'", {"sequence_field": "sequences"}),
    *((_folder, "f: ", {"format": one}) for one in ("auto", "huggingface", "lmdb", "fasta")),
    (lambda p, r: FORMS["fasta"](_folder(p, r), r).parent, "*.fasta.gz", {}),
    (_state('{"_data_files": [{}'), "not a whole", {}),
    (_state('{"_indices_files": [1], "_data_files": []}'), "flatten_indices()", {}),
    (lambda p, r: p / "none.parquet", "no such file", {"format": "parquet"}),
    (lambda p, r: Path("-"), "parquet", {"format": "parquet"}),
]


@pytest.mark.parametrize(("build", "said", "reading"), BAD)
def test_bad_input_is_rejected(
    tmp_path: Path, few: list[Record], build: Build, said: str, reading: dict[str, str]
) -> None:
    path = build(tmp_path, few)
    refusal = _refusal(path, tmp_path / "out", **reading)
    assert said in refusal
    assert path.name in refusal or said in ("no sequence", "parquet")


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["train.parquet", "test.parquet"], ["train.parquet", "test.parquet"]),
        (["a/train-0.parquet", "a/train-1.parquet", "a/validation-0.parquet"], ["a/train-*"]),
        (["valid/x.arrow", "train/x.parquet", "train/y.arrow"], ["train/*"]),
        (["dev_1.parquet", "extra.parquet"], ["extra.parquet"]),
    ],
)
def test_splits_are_named_and_never_merged(
    files: list[str], wanted: list[str], tmp_path: Path, few: list[Record]
) -> None:
    folder = tmp_path / "h"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (_arrow if file.endswith("arrow") else _parquet)(folder / file, few[:2])
    named = shlex.split(_refusal(folder, tmp_path / "out").replace(";", " "))
    for one in wanted:
        pattern = next(word for word in named if word.endswith(one[-9:]))
        assert _read([*resolve_inputs(pattern)])[:2] == few[:2]


def test_no_split_or_file_of_a_dataset_is_passed_over(tmp_path: Path, few: list[Record]) -> None:
    path = _hugging_face_splits(tmp_path / "h", few)
    _hugging_face(path / "test", few)
    (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert f"train: {path / 'train'}; test: {path / 'test'}" in _refusal(path, tmp_path / "out")
    assert _read(path / "test") == few
    next((path / "test").glob("*.arrow")).unlink()
    assert "no such file" in _refusal(path / "test", tmp_path / "out")


def test_hidden_files_are_skipped(tmp_path: Path, few: list[Record]) -> None:
    path = _parquet_shards(tmp_path / ".kept" / "h", few)  # hidden by what is around it alone
    digest = source_digest(path)
    for folder in (path / ".cache" / "huggingface", path / "x" / ".y"):
        folder.mkdir(parents=True)
        _parquet(folder / "data.parquet", few)
    _arrow(path / ".data.arrow", few)
    assert _read(path) == few
    assert source_digest(path) == digest
    assert not [one for one in input_files(path) if "/.kept/h/." in str(one)]


@pytest.mark.parametrize(
    ("header", "row", "taken"),
    [
        ("sequence,protein", ("SEQA", A_PROTEIN), "protein"),
        ("sequence,translation", ("P12345", A_PROTEIN), "translation"),
        ("gene,Protein", ("KRAS", A_PROTEIN), None),
        ("seq,note,aa", ("s1", "x", A_PROTEIN), "aa"),
        ("note,sequence", ("short", "PEPTIDE"), None),
        ("aa,sequence", (A_PROTEIN, A_PROTEIN[:24]), None),
    ],
)
def test_content_decides_where_a_usual_column_holds_names(
    tmp_path: Path, caplog: Logged, header: str, row: tuple[str, ...], taken: str | None
) -> None:
    caplog.set_level(logging.INFO)
    path = _write(tmp_path / "table.csv", f"{header}\n{','.join(row)}\n".encode())
    [(_, letters)] = _read(path)
    assert letters == row[header.split(",").index(taken) if taken else -1]
    assert (repr(taken) in caplog.text) is (taken is not None)
