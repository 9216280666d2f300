"""Every form of input gives the same proteins, and every kind of bad input one clear line."""

import bz2
import gzip
import hashlib
import io
import json
import logging
import lzma
import os
import pickle
import shlex
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from d2plm.core.errors import ConfigError, DataError
from d2plm.core.vocabulary import PROTEIN
from d2plm.data.ingest import ingest, source_digest
from d2plm.data.sources import input_files, read_sequences, read_sources, resolve_inputs
from d2plm.data.store import SequenceStore
from d2plm.settings.data import Reading
from tests.conftest import Logged, MonkeyPatch

ROOT = Path(__file__).parents[3]
PROTEINS = ROOT / "examples" / "data" / "uniprot_20k.fasta.gz"
HUGGING_FACE = ROOT / "tests" / "data" / "hf_dataset"  # saved by `datasets` 5.2.0

Record = tuple[str, str]
Items = Iterable[tuple[bytes, bytes]]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """(first word of the header, sequence) of every protein of the example file."""
    with gzip.open(PROTEINS, "rt") as stream:
        texts = stream.read()[1:].split("\n>")
    parts = [text.partition("\n") for text in texts]
    return [(header.split()[0], body.replace("\n", "")) for header, _, body in parts]


@pytest.fixture(scope="module")
def few(records: list[Record]) -> list[Record]:
    """The first dozen."""
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
    with (
        lmdb.open(str(path), map_size=1 << 28, subdir=subdir, sync=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        for key, value in items:
            transaction.put(key, value)
    return path


def _items(records: list[Record], value: Callable[[str, str], bytes]) -> Items:
    return [(name.encode(), value(name, sequence)) for name, sequence in records]


def _numbered(records: list[Record], value: Callable[[str, str], bytes]) -> Items:
    """As data sets of other makers often are: keys 0, 1, …, and the number of proteins."""
    items = [(b"%d" % index, value(*record)) for index, record in enumerate(records)]
    return [*items, (b"num_examples", pickle.dumps(len(records)))]


def _json(name: str, sequence: str) -> bytes:
    return json.dumps({"length": len(sequence), "id": name, "sequence": sequence}).encode()


def _parquet(path: Path, records: list[Record], **options: Any) -> Path:
    pyarrow.parquet.write_table(_table(records), path, **options)
    return path


def _arrow(path: Path, records: list[Record]) -> Path:
    table = _table(records)
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table, max_chunksize=1000)
    return path


def _hugging_face(folder: Path, records: list[Record], shards: int = 2) -> Path:
    """A folder as `Dataset.save_to_disk` writes it."""
    folder.mkdir()
    files = [f"data-{shard:05}-of-{shards:05}.arrow" for shard in range(shards)]
    size = -(-len(records) // shards)
    for shard, file in enumerate(files):
        _arrow(folder / file, records[shard * size : (shard + 1) * size])
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": f} for f in files]})
    )
    (folder / "dataset_info.json").write_text("{}")
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


FORMS: dict[str, Callable[[Path, list[Record]], Path]] = {
    "fasta": lambda p, r: _write(p / "a.fasta", _fasta(r)),
    "fasta.gz": lambda p, r: _write(p / "a.fasta.gz", gzip.compress(_fasta(r))),
    "fasta.xz": lambda p, r: _write(p / "a.fasta.xz", lzma.compress(_fasta(r))),
    "fasta.zst": lambda p, r: _write(p / "a.fasta.zst", _zstd(_fasta(r))),
    "fasta.bz2": lambda p, r: _write(p / "a.fasta.bz2", bz2.compress(_fasta(r))),
    "lmdb of JSON": lambda p, r: _lmdb(p / "l", _numbered(r, _json)),
    "lmdb of letters": lambda p, r: _lmdb(p / "l", _items(r, lambda name, text: text.encode())),
    "lmdb in a file": lambda p, r: _lmdb(p / "l.lmdb", _numbered(r, _json), subdir=False),
    "lmdb of JSON strings": lambda p, r: _lmdb(
        p / "l", _items(r, lambda name, text: json.dumps(text).encode())
    ),
    "parquet": lambda p, r: _parquet(p / "a.parquet", r, row_group_size=5),
    "parquet without suffix": lambda p, r: _parquet(p / "a", r),
    "csv": lambda p, r: _write(p / "a.csv", _csv(r)),
    "csv with semicolons": lambda p, r: _write(p / "a.csv", _csv(r, ";")),
    "csv of Windows": lambda p, r: _write(
        p / "a.CSV", b"\xef\xbb\xbf" + _csv(r).replace(b"\n", b"\r\n")
    ),
    "csv with quotes": lambda p, r: _write(
        p / "a.csv", _csv(r).replace(b"any", b'"one, ""two""\nand three"')
    ),
    "tsv": lambda p, r: _write(p / "a.tsv", _csv(r, "\t")),
    "tsv with a lone quotation mark": lambda p, r: _write(
        p / "a.tsv", _csv(r, "\t").replace(b"any", b'"5-methyl')
    ),
    "tsv with quotes": lambda p, r: _write(
        p / "a.tsv", b'"' + _csv(r, "\t").replace(b"\t", b'"\t"').replace(b"\n", b'"\n"')[:-1]
    ),
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


def _outcome(path: Path) -> str:
    """How many records are read, or what is said instead."""
    try:
        return f"{sum(len(block.names) for block in read_sources([path]))} records"
    except DataError as error:
        return str(error)


def _refusal(path: Path | str, output: Path, **reading: Any) -> str:
    """What ingest says to an input that is bad; nothing may be left behind."""
    with pytest.raises(DataError) as caught:
        ingest(path, output, reading=Reading(**reading))
    assert not output.exists()
    assert not output.with_name(f"partial.{output.name}").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_names_and_sequences(
    tmp_path: Path, few: list[Record], form: str
) -> None:
    read = _read(FORMS[form](tmp_path, few))
    # An LMDB is read in the order of its keys, everything else in its own.
    assert sorted(read) == sorted(few) if form.startswith("lmdb") else read == few


def test_a_dataset_that_hugging_face_saved(few: list[Record]) -> None:
    assert _read(HUGGING_FACE) == few


@pytest.mark.parametrize(
    "form",
    [*("fasta.gz", "lmdb of letters", "lmdb of JSON"), *("parquet", "csv", "Hugging Face dataset")],
)
def test_the_whole_example_gives_the_same_store_by_every_route(
    tmp_path: Path,
    records: list[Record],
    proteins: list[NDArray[np.uint8]],
    monkeypatch: MonkeyPatch,
    form: str,
) -> None:
    names = defaultdict(list)
    for (name, _), tokens in zip(records, proteins, strict=True):
        names[tokens.tobytes()].append(name.encode())
    ordered = sorted(names, key=lambda tokens: hashlib.sha256(tokens).digest())
    of_sequences, of_names = hashlib.sha256(), hashlib.sha256()
    for first in range(0, len(ordered), 1024):
        block = ordered[first : first + 1024]
        of_sequences.update(b"".join(len(tokens).to_bytes(4, "big") for tokens in block))
        of_sequences.update(b"".join(block))
        of_names.update(b"".join(b"\x01".join(sorted(names[t])) + b"\n" for t in block))

    monkeypatch.setattr("d2plm.data.deduplication._BUFFER_BYTES", 2 << 20)
    path = PROTEINS if form == "fasta.gz" else FORMS[form](tmp_path, records)
    manifest = ingest(path, tmp_path / "store")
    assert manifest["digests"] == {
        "sequences": of_sequences.hexdigest(),
        "names": of_names.hexdigest(),
    }
    assert manifest["sequences"] == len(ordered)
    assert manifest["provenance"]["records"] == len(records) == 20_000


def test_several_inputs_of_several_forms_are_read_one_after_another(
    tmp_path: Path, few: list[Record]
) -> None:
    paths = [
        FORMS["fasta.xz"](tmp_path, few[:3]),
        FORMS["parquet"](tmp_path, few[3:6]),
        FORMS["csv"](tmp_path, few[6:]),
    ]
    assert _read(paths) == few
    done = [block.done for block in read_sources(paths)]
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] == 1


def test_patterns_stand_for_the_files_that_match_in_order(tmp_path: Path) -> None:
    for name in ("b.fasta", "a.fasta", "c.txt", "[x].fasta"):
        (tmp_path / name).touch()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.fasta").touch()

    def names(*inputs: str) -> list[str]:
        return [path.name for path in resolve_inputs([str(tmp_path / one) for one in inputs])]

    assert names("*.fasta") == ["[x].fasta", "a.fasta", "b.fasta"]
    assert names("c.txt", "[x].fasta", "**/d.fasta") == ["c.txt", "[x].fasta", "d.fasta"]
    assert resolve_inputs("-") == [Path("-")]
    assert resolve_inputs(tmp_path / "a.fasta") == [tmp_path / "a.fasta"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("none.fasta", "none.fasta: no such file"),
        ("*.none", "no file matches it"),
        ("x" * 300, "no such file"),
        ("a\0b", "no such file"),
        ([], "no input"),
    ],
)
def test_inputs_that_stand_for_nothing(inputs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve_inputs(inputs)


def test_a_pipe_is_read_once_and_whole(tmp_path: Path, few: list[Record]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert source_digest(pipe) is None  # nothing may be taken from it
    writer = threading.Thread(target=lambda: pipe.write_bytes(_fasta(few)))
    writer.start()
    assert _read(pipe) == few
    writer.join()


def test_the_digest_of_an_input_is_of_its_bytes(tmp_path: Path, few: list[Record]) -> None:
    one = FORMS["Hugging Face splits"](tmp_path, few)
    digest = source_digest(one)
    assert digest == source_digest(one.rename(tmp_path / "moved"))
    with open(tmp_path / "moved" / "train" / "dataset_info.json", "a") as file:
        file.write(" ")
    assert digest != source_digest(tmp_path / "moved")
    with pytest.raises(DataError, match="no such file"):
        source_digest(tmp_path / "none")


def test_a_large_lmdb_is_read_in_several_passes(
    tmp_path: Path, records: list[Record], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("d2plm.data.sources._LMDB_PASS_BYTES", 5000)
    monkeypatch.setattr("d2plm.data.sources._ROWS", 7)
    some = records[:200]
    read = _read(FORMS["lmdb of letters"](tmp_path, some))
    assert read == sorted(some)


def test_rows_of_a_table_without_names_are_numbered(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", b"seq\nMK\nAC\n")
    assert _read(path) == [("row1", "MK"), ("row2", "AC")]


def test_rows_without_a_sequence_are_left_out_and_counted(tmp_path: Path, caplog: Logged) -> None:
    caplog.set_level("INFO")
    words = ["NA", "nan", "None", "null", "TRUE", "", "#N/A"]
    rows = "".join(f"n{word},{word}\n" for word in words)
    path = _write(tmp_path / "a.csv", f"id,sequence\na,MK\n{rows}nan,NAG\n".encode())
    assert _read(path) == [("a", "MK"), ("nan", "NAG")]
    assert caplog.messages == [
        f"{path}: 7 rows without a sequence left out (lines 3, 4, 5, 6, 7, 8, 9)"
    ]
    assert [name for name, _ in _read(path, format="csv")] == ["a", "nan"]


@pytest.mark.parametrize("column", ["protein", "gene", "Protein"])
def test_a_column_is_taken_for_sequences_by_its_content(
    tmp_path: Path, column: str, caplog: Logged
) -> None:
    caplog.set_level("INFO")
    sequences = ["MKTAYIAKQRQISFVKSHFSRQLEE", "MKRTLVWGADENQSYPIHCFMKLLVV"]
    content = f"{column},chain\nKRAS,{sequences[0]}\nNRAS,{sequences[1]}\n".encode()
    path = _write(tmp_path / "a.csv", content)
    assert [text for _, text in _read(path)] == sequences
    assert caplog.messages == [f"{path}: the sequences are taken from column 'chain'"]
    _write(path, content.replace(b"chain", b"protein" if column == "gene" else b"sequence"))
    assert [text for _, text in _read(path)] == sequences
    names = _write(tmp_path / "b.csv", b"protein,x\nKRAS,1\nNRAS,2\n")
    said = "which column holds the sequence? "
    _refused(names, tmp_path / "out", said + "Set sequence_field to one of protein, x")
    with pytest.raises(DataError, match=r"sequence\? Name it sequence; the columns are prot"):
        list(read_sequences(names, PROTEIN))  # of commands that have no such setting


def test_whole_numbers_may_be_names(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(
        pyarrow.table({"id": [7, None], "sequence": ["MK", "AC"]}), tmp_path / "a.parquet"
    )
    assert _read(tmp_path / "a.parquet") == [("7", "MK"), ("", "AC")]


def test_dictionary_encoded_and_large_text_is_text(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "id": pyarrow.array(["a", "b"], pyarrow.large_string()),
            "sequence": pyarrow.array(["MK", "AC"]).dictionary_encode(),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert _read(tmp_path / "a.parquet") == [("a", "MK"), ("b", "AC")]


def test_a_table_with_thousands_of_columns(tmp_path: Path) -> None:
    header = ",".join(f"feature_{number}" for number in range(3000))
    path = _write(tmp_path / "a.csv", f"{header},sequence\n{'1,' * 3000}MK\n".encode())
    assert _read(path) == [("row1", "MK")]
    assert "feature_19, …" in _refusal(path, tmp_path / "out", sequence_field="none")


def test_the_fields_may_be_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv", b"sequence,heavy,light,clone\nMMM,MK,AC,x\n")
    assert _read(path, sequence_field="light", name_field="clone") == [("x", "AC")]
    assert _read(path, sequence_field="heavy", name_field="heavy") == [("MK", "MK")]
    value = json.dumps({"1": "MK", "clone": "x"}).encode()
    store = _lmdb(tmp_path / "l", [(b"k", value)])
    assert _read(store, sequence_field="1", name_field="clone") == [("x", "MK")]


def test_the_format_may_be_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "table", b"id,sequence\na,MK\n")
    assert _read(path, format="csv") == [("a", "MK")]
    with pytest.raises(ConfigError, match=r"format='fast'.*did you mean 'fasta'"):
        Reading(format="fast")
    with pytest.raises(ConfigError, match=r"on_illegal='dorp'.*did you mean 'drop'"):
        Reading(on_illegal="dorp")


def test_names_are_one_line_whatever_they_contain(tmp_path: Path) -> None:
    path = _lmdb(
        tmp_path / "l",
        [
            (b"1", json.dumps({"id": "two\nlines\x01more", "seq": "MK"}).encode()),
            (b"2", json.dumps({"id": "\ud800", "seq": "AC"}).encode()),
            (b"3", json.dumps({"id": None, "seq": "WY"}).encode()),
        ],
    )
    ingest(path, tmp_path / "out")
    store = SequenceStore(tmp_path / "out")
    assert sorted(store.names(index) for index in range(3)) == [["3"], ["?"], ["two lines more"]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"\x80", "is a pickle"),
        (pickle.dumps({"primary": "MK"}), "python examples/lmdb_of_pickles.py"),
        (b'{"id": [["a"]], "sequence": "MK"}', "a name that is list, not text"),
        (b'{"primary": 3}', "holds int, not a sequence"),
        (b'{"aaa": "MK", "bbb": 1}', "Set sequence_field to one of aaa, bbb"),
        (b"{}", "Set sequence_field to one of none"),
        (b'{"a\\nb": "MK"}', r"Set sequence_field to one of 'a\nb'"),
        (b'{"sequence": "MK"', "a value that cannot be read (JSONDecodeError"),
        (b'{"sequence": ' + b"[" * 100_000, "a value that cannot be read (RecursionError"),
        (b'{"sequence": ["MK"]}', "holds list, not a sequence"),
        (b'{"sequence": null}', "record 'k' has no sequence"),
        (b'{"sequence": "M1"}', "record 'k' holds '1'"),
        (b"", "record 'k' has no sequence"),
        (b"\x00\x01", r"record 'k' holds '\x00'"),
    ],
)
def test_a_bad_value_of_an_lmdb_is_named_by_its_key(
    tmp_path: Path, value: bytes, message: str
) -> None:
    path = _lmdb(tmp_path / "l", [(b"k", value)])
    refusal = _refusal(path, tmp_path / "out")
    assert refusal.startswith(f"{path}, key 'k': ")
    assert message in refusal


@settings(deadline=None)
@given(
    value=st.one_of(
        st.binary(max_size=40),
        st.binary(max_size=40).map(b"\x80\x04".__add__),
        st.binary(max_size=40).map(b"{".__add__),
        st.integers(0, 60).map(lambda cut: _json("a", "MK")[:cut] + _json("a", "MK")[cut + 1 :]),
    )
)
def test_any_value_of_an_lmdb_is_read_or_rejected_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, value: bytes
) -> None:
    path = _lmdb(tmp_path_factory.mktemp("lmdb") / "l", [(b"k", value)])
    outcome = _outcome(path)
    assert outcome == "1 records" or (str(path) in outcome and "\n" not in outcome)


def _cut(path: Path, size: int) -> Path:
    os.truncate(path, path.stat().st_size + size if size < 0 else size)
    return path


def _refused(path: Path, output: Path, message: str, **reading: Any) -> None:
    refusal = _refusal(path, output, **reading)
    assert message in refusal
    if "no sequence to write" not in message and path != Path("-"):
        assert refusal.startswith(str(path))


TORN = "truncated or corrupt compressed file"
NO_FASTA = "name the files, as in 'folder/*.fasta.gz'"
NOT_PARQUET, NOT_ARROW = "not a readable Parquet file", "not a readable Arrow file"
NOT_WHOLE = "not a whole Hugging Face dataset folder"


@pytest.mark.parametrize(
    ("form", "size", "message"),
    [
        *((form, -9, TORN) for form in ("fasta.gz", "fasta.xz", "fasta.zst", "fasta.bz2")),
        ("csv.gz", -9, TORN),
        ("parquet", -9, NOT_PARQUET),
        ("arrow", -9, "truncated Arrow file"),
        ("arrow", 100, NOT_ARROW),
        ("lmdb in a file", 12_288, "truncated LMDB; copy it again"),
        ("lmdb in a file", 100, "not a readable LMDB"),
    ],
)
def test_a_truncated_file_is_rejected(
    tmp_path: Path, few: list[Record], form: str, size: int, message: str
) -> None:
    _refused(_cut(FORMS[form](tmp_path, few), size), tmp_path / "out", message)


def test_a_stream_of_which_whole_batches_are_missing_is_rejected(
    tmp_path: Path, few: list[Record]
) -> None:
    """Nothing in it is damaged."""
    table, content = _table(few), io.BytesIO()
    with pyarrow.ipc.new_stream(content, table.schema) as stream:
        stream.write_table(table)
        size = content.tell()
        stream.write_table(table)
        first = content.getvalue()[:size]
    _refused(_write(tmp_path / "a.arrow", first), tmp_path / "out", "truncated Arrow file")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.fasta", b"", "is empty"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"\n \n", "is empty"),
        ("a.csv", b"id,sequence\n", "no sequence to write"),
        ("a.arrow", b"", NOT_ARROW),
        ("a.csv", b"id,sequence\na,MK\nb,MK,W\n", "line 3: has 3 cells where the header has 2"),
        ("a.csv", b"id,sequence\na,MK\nb\n", "line 3: has 1 cells where the header has 2"),
        ("a.csv", b"id,sequence,sequence\na,MK,AC\n", "has several columns 'sequence'"),
        ("a.h5", b"\x89HDF\r\n\x1a\n" * 9, "is an HDF5 file"),
    ],
)
def test_a_bad_file_is_rejected(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    _refused(_write(tmp_path / name, content), tmp_path / "out", message)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sequence": pyarrow.array([], pyarrow.string())}, "no sequence to write"),
        ({"one": ["MK"], "two": ["AC"]}, "which column holds the sequence? Set sequence_field to"),
        ({"sequence": [1.5]}, "column 'sequence' holds double, not text"),
        ({"sequence": [["MK"]]}, "column 'sequence' holds list<element: string>, not text"),
        ({"id": [["a"]], "sequence": ["MK"]}, "column 'id' holds list<element: string>, not text"),
        ({"sequence": [15]}, "row 1: record 'row1' holds '1'"),
        ({"id": ["a", "b"], "sequence": ["MK", None]}, "row 2: record 'b' has no sequence"),
        ({"sequence": pyarrow.nulls(2)}, "row 1: record 'row1' has no sequence"),
    ],
)
def test_columns_without_sequences_are_rejected(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    _refused(tmp_path / "a.parquet", tmp_path / "out", message)


def test_two_columns_of_one_name_are_rejected(tmp_path: Path) -> None:
    array = pyarrow.array(["MK"])
    table = pyarrow.Table.from_arrays([array, array], names=["sequence", "sequence"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    _refused(tmp_path / "a.parquet", tmp_path / "out", "has several columns 'sequence'")


@pytest.mark.parametrize(
    ("form", "field", "column", "message"),
    [
        ("parquet", "sequence_field", "sequnce", "'sequence'?); set sequence_field to one of len"),
        ("csv", "name_field", "notes", "'note'?); set name_field to one of id, note, sequence"),
        ("lmdb of JSON", "sequence_field", "sequences", "'sequence'?); set sequence_field to one"),
    ],
)
def test_a_missing_column_is_rejected_with_the_nearest(
    tmp_path: Path, few: list[Record], form: str, field: str, column: str, message: str
) -> None:
    said = f"has no column '{column}' (did you mean {message}"
    _refused(FORMS[form](tmp_path, few), tmp_path / "out", said, **{field: column})


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("auto", "a folder that is no LMDB"),
        ("huggingface", "no folder with Parquet or Arrow files"),
        ("lmdb", "not a readable LMDB"),
        ("fasta", "is a folder"),
        ("csv", "is a folder"),
        ("parquet", NOT_PARQUET),
    ],
)
def test_an_empty_folder_is_rejected(tmp_path: Path, format: str, message: str) -> None:
    (tmp_path / "f").mkdir()
    _refused(tmp_path / "f", tmp_path / "out", message, format=format)


@pytest.mark.parametrize("state", ['{"_data_files": [{}', "[]"])
def test_a_dataset_of_a_damaged_state_is_rejected(
    tmp_path: Path, few: list[Record], state: str
) -> None:
    path = _hugging_face(tmp_path / "h", few)
    (path / "state.json").write_text(state)
    _refused(path, tmp_path / "out", NOT_WHOLE)
    (path / "state.json").write_text('{"_indices_files": [1], "_data_files": []}')
    _refused(path, tmp_path / "out", "call flatten_indices()")


@pytest.mark.parametrize(
    ("lost", "message"),
    [("train/*.arrow", "no such file"), ("train/*", "train: no folder with Parquet or Arrow")],
)
def test_a_dataset_without_its_files_is_rejected(
    tmp_path: Path, few: list[Record], lost: str, message: str
) -> None:
    path = _hugging_face_splits(tmp_path / "h", few)
    for file in path.glob(lost):
        file.unlink()
    _refused(path, tmp_path / "out", message)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["train.parquet", "test.parquet"], ["train.parquet", "test.parquet"]),
        (["a/train-0.parquet", "a/train-1.parquet", "a/validation-0.parquet"], ["a/train-*", None]),
        (["valid/x.arrow", "train/x.parquet", "train/y.arrow"], [None, "train/*"]),
        (["dev_1.parquet", "extra.parquet"], [None, "extra.parquet"]),
    ],
)
def test_splits_are_named_and_never_merged(
    files: list[str], wanted: list[str | None], tmp_path: Path, few: list[Record]
) -> None:
    folder = tmp_path / "h"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (_arrow if file.endswith("arrow") else _parquet)(folder / file, few[:2])
    said = _refusal(folder, tmp_path / "out")
    assert said.startswith(f"{folder}: has several splits; give one of them, ")
    for one in filter(None, wanted):
        pattern = next(
            word for word in shlex.split(said.replace(";", " ")) if word.endswith(one[-9:])
        )
        assert _read([*resolve_inputs(pattern)])[:2] == few[:2]


def test_the_splits_of_a_saved_dataset_are_named(tmp_path: Path, few: list[Record]) -> None:
    path = _hugging_face_splits(tmp_path / "h", few)
    _hugging_face(path / "test", few)
    (path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    said = f"give one of them, train: {path / 'train'}; test: {path / 'test'}"
    _refused(path, tmp_path / "out", said)
    assert _read(path / "test") == few


@pytest.mark.parametrize("folder", [".ipynb_checkpoints", ".cache/huggingface", ".git", "x/.y"])
def test_hidden_files_are_skipped(folder: str, tmp_path: Path, few: list[Record]) -> None:
    path = _parquet_shards(tmp_path / ".kept" / "h", few)  # hidden by what is around it alone
    digest = source_digest(path)
    (path / folder).mkdir(parents=True)
    _parquet(path / folder / "data.parquet", few)
    _arrow(path / ".data.arrow", few)
    assert _read(path) == few
    assert source_digest(path) == digest
    assert not [one for one in input_files(path) if "/.kept/h/." in str(one)]


def test_other_bad_inputs_are_rejected(tmp_path: Path, few: list[Record]) -> None:
    out = tmp_path / "out"
    _refused(tmp_path / "none.fasta", out, "no such file")
    _refused(tmp_path / "none.parquet", out, "no such file", format="parquet")
    (tmp_path / "link.csv").symlink_to("nowhere")
    _refused(tmp_path / "link.csv", out, "no such file")
    _refused(_write(tmp_path / "a", b""), out, NOT_PARQUET, format="parquet")
    _refused(_lmdb(tmp_path / "l", []), out, "no sequence to write")
    dropped = _write(tmp_path / "a.csv", b"id,sequence\na,J\nb,\n")
    _refused(dropped, out, "no sequence to write; check the input and its", on_illegal="drop")
    for form in ("parquet", "lmdb"):
        said = f"standard input: cannot be read as {form}"
        _refused(Path("-"), out, said, format=form)
    (tmp_path / "f").mkdir()
    FORMS["fasta"](tmp_path / "f", few)
    _refused(tmp_path / "f", out, NO_FASTA)


@pytest.mark.parametrize("form", ["csv", "csv.gz", "tsv", "parquet", "arrow"])
def test_damaged_tables_are_read_or_rejected_in_one_line(
    tmp_path: Path, few: list[Record], form: str
) -> None:
    path = FORMS[form](tmp_path, few)
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(whole)
        for position in draw.integers(len(whole), size=3):
            damaged[position] ^= int(draw.integers(1, 256))
        path.write_bytes(damaged)
        outcome = _outcome(path)
        assert outcome.endswith(" records") or (str(path) in outcome and "\n" not in outcome)


def test_an_offset_that_points_elsewhere_does_not_end_the_process(
    tmp_path: Path, few: list[Record]
) -> None:
    path = FORMS["arrow"](tmp_path, few)
    content = bytearray(path.read_bytes())
    lengths = np.cumsum([0, *(len(sequence) for _, sequence in few)], dtype="<i4")
    place = content.index(lengths.tobytes())
    content[place + 4 : place + 8] = b"\xff\xff\xff\x7f"
    path.write_bytes(content)
    assert "not a readable Arrow file" in _refusal(path, tmp_path / "out")


@pytest.mark.parametrize("form", ["proteins.fasta.zst", "proteins.parquet"])
def test_an_input_that_needs_pyarrow_reports_it_where_there_is_none(
    form: str, few: list[Record], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    path = tmp_path / form
    if form.endswith("parquet"):
        pyarrow.parquet.write_table(_table(few), path)
    else:
        path.write_bytes(_zstd(_fasta(few)))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=rf"{form}: .*pip install pyarrow"):
        list(read_sources([path]))


RESIDUES_OF_A_PROTEIN = "MKTAYIAKQRQISFVKSHFSRQLEERLG"


@pytest.mark.parametrize(
    ("header", "row", "taken"),
    [
        ("sequence,protein", ("SEQA", RESIDUES_OF_A_PROTEIN), "protein"),
        ("sequence,translation", ("P12345", RESIDUES_OF_A_PROTEIN), "translation"),
        ("seq,note,aa", ("s1", "x", RESIDUES_OF_A_PROTEIN), "aa"),
        ("sequence,note", ("PEPTIDE", "short"), None),
        ("sequence,aa", (RESIDUES_OF_A_PROTEIN[:24], RESIDUES_OF_A_PROTEIN), None),
    ],
)
def test_content_decides_where_a_column_named_sequence_holds_names(
    tmp_path: Path, caplog: Logged, header: str, row: tuple[str, ...], taken: str | None
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"{header}\n{','.join(row)}\n")
    caplog.set_level(logging.INFO)
    [(_, letters)] = _read(path)
    assert letters == row[header.split(",").index(taken or "sequence")]
    assert (f"taken from column {taken!r}" in caplog.text) is (taken is not None)


@pytest.mark.parametrize("rows", ["a,{0}\nb,{0}\n", "{0}\n{0}\n", "{0}\ta\n"])
def test_a_table_of_proteins_without_a_header_is_refused(tmp_path: Path, rows: str) -> None:
    path = tmp_path / ("table.tsv" if "\t" in rows else "table.csv")
    path.write_text(rows.format(RESIDUES_OF_A_PROTEIN))
    with pytest.raises(DataError, match="has no header row"):
        _read(path)
