"""Reading sequences and texts in every supported format, as one stream of raw records.

FASTA, LMDB from other programs, Parquet, CSV, JSON lines, plain text, Hugging Face datasets in
folders, and Megatron-indexed corpora, which are already tokenised. All are streamed: memory is
bounded by a block of records, and records of many megabytes may come in parts. The format of an
input is recognised by its content and its name, unless `format` states it.
"""

import glob
import json
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import lmdb

from d2plm.core.errors import DataError, first_line, require_number
from d2plm.core.files import nearest_path, shipped
from d2plm.core.number_text import counted
from d2plm.core.terminal import first_few
from d2plm.core.vocabulary import CANONICAL, PROTEIN, Vocabulary
from d2plm.data.compressed import STDIN, open_input, without_pyarrow
from d2plm.data.documents import Document, in_blocks, read_documents, skip_byte_order_mark
from d2plm.data.fasta import FastaRecord, read_fasta_blocks, tokenised
from d2plm.data.megatron import DATA, INDEX, is_megatron, read_megatron
from d2plm.data.record_checks import checked
from d2plm.data.records import ALIAS_SEPARATOR, WITHOUT_CONTROL, RawRecords, shown
from d2plm.data.store import MANIFEST, SequenceStore
from d2plm.data.tables import NO_SEQUENCE, Table, is_missing, listed, open_table, usual_columns
from d2plm.settings.data import Reading

TEXT_FORMATS = ("text", "lines", "paragraphs")  # a document is a file, a line or a paragraph
SEQUENCE_FIELDS = (
    *("sequence", "seq", "protein_sequence", "aa_seq", "primary", "protein"),
    *("text", "content"),
)
NAME_FIELDS = ("name", "id", "accession", "entry", "uniprot_id", "protein_id", "entry_name")

_ROWS = 4096
_SHORT = 20  # letters; a shorter cell may be a name
_RESIDUES = re.compile(r"[A-Za-z*-]+")
_A_PROTEIN = re.compile(rf"[{CANONICAL}]{{15,}}")
_ROWS_EXAMINED = 50  # to recognise the column of sequences in a table
_LONGEST_LINE = 64 << 20  # of JSON
_LMDB_PASS_BYTES = 8 << 20
_COMPRESSIONS = (".gz", ".xz", ".zst", ".bz2")
_FASTA = (".fasta", ".fa", ".fas", ".fna", ".ffn", ".frn", ".faa")
_HUGGINGFACE_FILES = ("state.json", "dataset_dict.json", "**/*.parquet", "**/*.arrow")
_SPLITS = {  # split → words for it in the names of files and folders
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
_LMDB_MAGIC = b"\xde\xc0\xef\xbe"
_LMDB_METADATA = frozenset(
    b"num_examples num_samples length __len__ keys __keys__ metadata __metadata__".split()
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Input:
    path: Path
    reading: Reading
    vocabulary: Vocabulary
    in_parts: bool
    has_fields: bool = True  # whether the command has settings that name the fields


def resolve_inputs(inputs: str | Path | Sequence[str | Path]) -> list[Path]:
    """Expand paths, globs and `-` (standard input); `DataError` if one names nothing."""
    given = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    found: list[Path] = []
    for one in (os.path.expanduser(str(shipped(path))) for path in given):
        if one == str(STDIN) or os.path.lexists(one):
            found.append(Path(one))
            continue
        if one.startswith("hf:/"):  # a `Path` collapses the two slashes
            raise DataError(
                f"{one.replace(':/', '://', 1)}: not read from the hub; run hf download "
                "--repo-type dataset OWNER/NAME --local-dir FOLDER and give the folder"
            )
        matches = sorted(glob.glob(one, recursive=True))
        if not matches:
            raise DataError(
                f"{one}: no such file, and no file matches it{nearest_path(one)}; check the path"
            )
        found += map(Path, matches)
    if not found:
        raise DataError("no input: give a file, a glob pattern, or - for standard input")
    # A glob pattern may match both files of a Megatron corpus.
    return list(dict.fromkeys(one.with_suffix(INDEX) if is_megatron(one) else one for one in found))


def read_sources(
    paths: Sequence[Path],
    reading: Reading | None = None,
    vocabulary: Vocabulary = PROTEIN,
    in_parts: bool = False,
) -> Iterator[RawRecords]:
    """The records of all inputs, one after another.

    Raises `DataError` (when iterated) if an input is missing, damaged, of no known format, or lacks
    the field.

    Args:
        paths: as returned by `resolve_inputs`.
        reading: None if no setting can name the format or the fields.
        vocabulary: decides between plain text and FASTA, and interprets the ids of a Megatron
            corpus.
        in_parts: whether a record of many megabytes may come in parts.
    """
    chosen = reading or Reading()
    files = [[file for file in input_files(path) if file.exists()] for path in paths]
    sizes = [max(sum(file.stat().st_size for file in one), 1) for one in files]
    before = 0
    for path, size in zip(paths, sizes, strict=True):
        kind = _format_of(path, vocabulary) if chosen.format == "auto" else chosen.format
        if path == STDIN and kind not in ("fasta", "csv", "jsonl", *TEXT_FORMATS):
            raise DataError(f"standard input: cannot be read as {kind}; give FASTA or CSV there")
        given = _Input(path, chosen, vocabulary, in_parts, reading is not None)
        try:
            for records in checked(_READERS[kind](given), vocabulary, path):
                yield replace(records, done=(before + records.done * size) / sum(sizes))
        except ModuleNotFoundError as error:
            raise without_pyarrow(path, error) from None
        before += size


def read_sequences(
    inputs: str | Path,
    vocabulary: Vocabulary,
    window: int | None = None,
    max_residues: int | None = None,
) -> Iterator[FastaRecord]:
    """The records of any input or of a store of this vocabulary.

    Longer records are cut by `window` or left out by `max_residues`, as in `ingest`.

    Raises:
        ConfigError: one of them is out of range.
        DataError (when iterated): an input is missing or damaged, or not of the vocabulary.
    """
    require_number("window", window, optional=True, integer=True, low=1)
    require_number("max_residues", max_residues, optional=True, integer=True, low=1)
    records = _read_sequences(inputs, vocabulary)
    return _cut(records if max_residues is None else _short(records, max_residues, inputs), window)


def _short(records: Iterator[FastaRecord], most: int, inputs: str | Path) -> Iterator[FastaRecord]:
    left_out: list[str] = []
    for record in records:
        if len(record.tokens) <= most:
            yield record
        else:
            left_out.append(record.name)
    if left_out:
        names = first_few(left_out)
        _say(f"{inputs}: left out {len(left_out):,} longer than max_residues={most}: {names}")


def _read_sequences(inputs: str | Path, vocabulary: Vocabulary) -> Iterator[FastaRecord]:
    for path in resolve_inputs(inputs):
        if (path / MANIFEST).is_file():
            store = SequenceStore(path)
            store.require_vocabulary(vocabulary)
            for names, tokens in zip(chain.from_iterable(store.name_blocks()), store, strict=True):
                yield FastaRecord(shown(names), tokens)
        else:
            yield from tokenised(read_sources([path], vocabulary=vocabulary), vocabulary)


def _cut(records: Iterator[FastaRecord], window: int | None) -> Iterator[FastaRecord]:
    for record in records:
        if window is None or len(record.tokens) <= window:
            yield record
            continue
        for number, start in enumerate(range(0, len(record.tokens), window), start=1):
            yield FastaRecord(f"{record.name}/{number}", record.tokens[start : start + window])


def input_files(path: Path) -> list[Path]:
    """The files of an input, in a fixed order; none for standard input."""
    if is_stream(path):
        return []
    if is_megatron(path):
        return [path.with_suffix(DATA), path.with_suffix(INDEX)]
    if not path.is_dir():
        return [path]
    return sorted(file for file in _files_in(path, "*") if file.name != "lock.mdb")


def _files_in(folder: Path, pattern: str) -> Iterator[Path]:
    """The files in a folder tree, without hidden ones such as `.cache` and `.git`."""
    for file in folder.rglob(pattern):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if not hidden and file.is_file():
            yield file


def is_stream(path: Path) -> bool:
    """Whether an input is a pipe or standard input, which can be read only once."""
    return path == STDIN or path.is_fifo() or path.is_char_device()


def _format_of(path: Path, vocabulary: Vocabulary) -> str:
    if path.is_dir():
        if (path / "data.mdb").is_file():
            if (path / "lengths.npy").is_file():
                raise DataError(
                    f"{path}: a sequence store already; d2plm prepare takes it as it is"
                )
            return "lmdb"
        if any(any(path.glob(files)) for files in _HUGGINGFACE_FILES):
            return "huggingface"
        raise DataError(
            f"{path}: a folder that is no LMDB, no Hugging Face dataset and holds no Parquet "
            "files; name the files, as in 'folder/*.fasta.gz' or 'folder/*.jsonl'"
        )
    if is_megatron(path):
        return "megatron"
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffix = next((one for one in reversed(suffixes) if one not in _COMPRESSIONS), "")
    if suffix in (".csv", ".tsv"):
        return "csv"
    if suffix in (".jsonl", ".ndjson", ".json"):
        return "jsonl"
    otherwise = "text" if vocabulary.is_text else "fasta"
    if is_stream(path):  # looking at its start would consume it
        return otherwise
    with open_input(path) as source:
        start = source.content.peek(32)[:32]
    if start.startswith(b"PAR1"):
        return "parquet"
    if suffix == ".arrow":
        return "huggingface"
    if start[16:20] in (_LMDB_MAGIC, _LMDB_MAGIC[::-1]):
        return "lmdb"
    if vocabulary.is_text:
        _refuse_other_than_text(path, suffix, start)
    return otherwise


def _refuse_other_than_text(path: Path, suffix: str, start: bytes) -> None:
    what = None
    if suffix in _FASTA and start.lstrip().startswith(b">"):
        what = "FASTA; set alphabet to protein, dna, rna or codon"
    elif path.suffix in (INDEX, DATA):
        other = path.with_suffix(INDEX if path.suffix == DATA else DATA)
        what = f"by its name one file of a Megatron corpus, and {other} is missing; copy it there"
    if what:
        raise DataError(f"{path}: is {what}, or ingest the file with format=text")


def _read_parquet(given: _Input) -> Iterator[RawRecords]:
    import pyarrow.parquet

    path = given.path
    with (
        _readable(path, "Parquet file"),
        pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file,
    ):
        columns = _columns(file.schema_arrow.names, given, path)
        batches = file.iter_batches(_ROWS, columns=_without_repeats(columns))
        rows = file.metadata.num_rows
        yield from _from_tables(batches, columns, given, lambda read: read / max(rows, 1))


def _read_csv(given: _Input) -> Iterator[RawRecords]:
    with open_table(given.path) as table:
        yield from in_blocks(
            _csv_rows(given, table),
            table.source,
            lambda one, offset: f"{given.path}, line {one.line}",
        )


def _csv_rows(given: _Input, table: Table) -> Iterator[Document]:
    path, vocabulary, rows, without = given.path, given.vocabulary, table.rows(), list[str]()
    examined = [*islice(rows, _ROWS_EXAMINED)]
    by_column = zip(*(cells for _, cells in examined), strict=True)
    cells_of = dict(zip(table.columns, by_column, strict=False))  # none without rows
    sequence, named = (
        None if column is None else table.columns.index(column)
        for column in _columns(table.columns, given, path, cells_of)
    )
    assert sequence is not None
    prefix = path.name + ":" if vocabulary.is_text else "row"
    for row, (line, cells) in enumerate(chain(examined, rows), start=1):
        text = cells[sequence]
        if is_missing(text, {""} if vocabulary.is_text else NO_SEQUENCE):
            without.append(str(line))
            continue
        name = f"{prefix}{row}" if named is None else cells[named].partition("\x01")[0]
        yield Document(_one_line(name.encode("utf-8", "replace")), vocabulary.raw(text), line)
    if without:
        rows_left = f"{counted(len(without), 'row')} without a sequence"
        _say(f"{path}: {rows_left} left out (lines {listed(without)})")


@cache  # once for a file, even if it is read repeatedly
def _say(notice: str) -> None:
    log.info(notice)


def _read_huggingface(given: _Input) -> Iterator[RawRecords]:
    files = _huggingface_files(given.path)
    for number, file in enumerate(files):
        read = _read_parquet if file.suffix == ".parquet" else _read_arrow
        for records in read(replace(given, path=file)):
            yield replace(records, done=(number + records.done) / len(files))


def _read_arrow(given: _Input) -> Iterator[RawRecords]:
    import pyarrow

    file = given.path
    with (
        _readable(file, "Arrow file"),
        # Not mapped: mapped pages would count as this process's memory.
        pyarrow.OSFile(str(file)) as raw,
        pyarrow.ipc.open_stream(raw) as reader,
    ):
        columns, size = _columns(reader.schema.names, given, file), raw.size()
        with open(file, "rb") as end:  # Arrow accepts any end between two batches
            end.seek(-len(_ARROW_END), os.SEEK_END)
            if end.read() != _ARROW_END:
                raise DataError(f"{file}: truncated Arrow file; fetch or save it again")
        wanted = _without_repeats(columns)
        batches = (batch.select(wanted) for batch in reader)
        yield from _from_tables(batches, columns, given, lambda read: raw.tell() / size)


def _read_jsonl(given: _Input) -> Iterator[RawRecords]:
    with open_input(given.path) as source:
        yield from in_blocks(
            _json_lines(given, source.content),
            source,
            lambda one, offset: f"{given.path}, line {one.line}",
        )


def _json_lines(given: _Input, content: Any) -> Iterator[Document]:
    columns = None
    skip_byte_order_mark(content)
    lines = iter(lambda: content.readline(_LONGEST_LINE), b"")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{given.path}, line {number}"
        fields = _json_object(line, where)
        if columns is None or columns[0] not in fields:
            columns = _columns(list(fields), given, where)
        name, text = _name_and_text(fields, columns, where)
        if isinstance(text, str):
            text = given.vocabulary.raw(text)
        if not isinstance(text, bytes):
            raise DataError(f"{where}: {columns[0]!r} is {type(text).__name__}, not text")
        if name is None:
            name = f"{given.path.name}:{number}".encode("utf-8", "replace")
        yield Document(name, text, number)
    if columns is None:
        raise DataError(f"{given.path}: is empty; give at least one line of JSON")


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    if len(line) >= _LONGEST_LINE:
        raise DataError(f"{where}: is longer than {_LONGEST_LINE:,} bytes; split its record")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); write one object a line") from None
    if not isinstance(fields, dict):
        raise DataError(f"{where}: {type(fields).__name__}, not an object; write one object a line")
    return fields


def _huggingface_files(path: Path) -> list[Path]:
    """The data files of a folder that `datasets` saved, or of Parquet or Arrow files."""
    if path.is_file():
        return [path]
    try:
        if (path / "dataset_dict.json").is_file():
            saved = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            _require_one_split(path, {split: [path / split] for split in saved})
            return [file for split in saved for file in _huggingface_files(path / split)]
        if (path / "state.json").is_file():
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            if state.get("_indices_data_files") or state.get("_indices_files"):
                raise DataError(
                    f"{path}: rows were selected without being written; call flatten_indices() "
                    "before save_to_disk()"
                )
            return [path / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a whole Hugging Face dataset folder ({error!r}); save it again with "
            "save_to_disk()"
        ) from None
    files = sorted([*_files_in(path, "*.parquet"), *_files_in(path, "*.arrow")])
    if not files:
        raise DataError(f"{path}: no folder with Parquet or Arrow files; check the path")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        words = re.split(r"[\W\d_]+", str(file.relative_to(path)).lower())
        named = next((split for split in _SPLITS if {*_SPLITS[split]} & {*words}), "other files")
        by_split.setdefault(named, []).append(file)
    _require_one_split(path, by_split)
    return files


def _require_one_split(path: Path, splits: Mapping[str, list[Path]]) -> None:
    """Reject a dataset of several splits, listing the input for each of them."""
    if len(splits) < 2:
        return
    said = []
    for split, files in splits.items():
        start = os.path.commonprefix([*map(str, files)])  # noqa: RUF071  # of a pattern, not a path
        pattern = glob.escape(start) + "*"
        several = pattern if sorted(glob.glob(pattern)) == [str(file) for file in files] else None
        given = str(files[0]) if len(files) == 1 else several or f"[{','.join(map(str, files))}]"
        said.append(f"{split}: {shlex.quote(given)}")
    raise DataError(f"{path}: has several splits; give one of them, {'; '.join(said)}")


def _from_tables(
    batches: Iterable[Any],
    columns: tuple[str, str | None],
    given: _Input,
    done: Callable[[int], float],
) -> Iterator[RawRecords]:
    """Records of Arrow record batches: null values are empty sequences."""
    (sequence_column, name_column), path, read = columns, given.path, 0
    prefix = os.fsencode(path.name) + b":" if given.vocabulary.is_text else b"row"
    for batch in batches:
        batch.validate(full=True)  # a damaged offset in an Arrow file would end the process
        sequences = _binary(batch, sequence_column, path)
        rows = range(read + 1, read + 1 + len(sequences))
        if name_column is None:
            names = [b"%b%d" % (prefix, row) for row in rows]
        else:
            names = [_one_line(name) for name in _binary(batch, name_column, path)]
        read += len(sequences)
        yield RawRecords(names, sequences, partial(_row_place, path, rows), done(read))


def _row_place(path: Path, rows: range, record: int, offset: int | None) -> str:
    return f"{path}, row {rows[record]}"


def _binary(batch: Any, name: str, path: Path) -> list[bytes]:
    import pyarrow

    column = batch.column(name)
    try:
        if pyarrow.types.is_integer(column.type) or pyarrow.types.is_dictionary(column.type):
            column = column.cast(pyarrow.string())
        return [value or b"" for value in column.cast(pyarrow.binary()).to_pylist()]
    except pyarrow.ArrowException:
        raise DataError(
            f"{path}: column {name!r} holds {column.type}, not text; name another one"
        ) from None


def _columns(
    names: Sequence[str], given: _Input, where: str | Path, cells: Mapping[str, Sequence[str]] = {}
) -> tuple[str, str | None]:
    """The columns (or fields) of the sequence and of the name, if any.

    A column without a usual name may be recognised by its `cells`, examples by column.
    """

    reading = given.reading
    if not given.vocabulary.is_text and any(map(_A_PROTEIN.fullmatch, names)):
        raise DataError(f"{where}: has no header row; add one, such as name,sequence")
    of_residues = [name for name in names if _hold_residues(cells.get(name, ()))]
    usual = [
        # `protein` may hold names such as KRAS, whose letters are residues, too
        *(one for one in SEQUENCE_FIELDS if one != "protein"),
        *(one.lower() for one in of_residues if one.lower() == "protein"),
    ]
    chosen = usual_columns(where, names, usual, reading.sequence_field, "sequence_field")
    sequence = next(iter(chosen), None)
    known = [cell.strip() for cell in cells.get(sequence or "", ()) if not is_missing(cell)]
    if reading.sequence_field is None and known and all(len(one) < _SHORT for one in known):
        sequence = None if len(of_residues) == 1 else sequence  # names
    if sequence is None and len(of_residues) == 1 and not given.vocabulary.is_text:
        [sequence] = of_residues
        _say(f"{where}: the sequences are taken from column {sequence!r}")
    if sequence is None:
        what = "field holds the text" if given.vocabulary.is_text else "column holds the sequence"
        remedy = f"Set sequence_field to one of {listed(names)}"
        if not given.has_fields:
            remedy = f"Name it sequence; the columns are {listed(names)}"
        raise DataError(f"{where}: which {what}? {remedy}")
    named = usual_columns(where, names, NAME_FIELDS, reading.name_field, "name_field")
    return sequence, next(iter(named), None)


def _hold_residues(cells: Sequence[str]) -> bool:
    known = [cell.strip() for cell in cells if not is_missing(cell)]
    return bool(known) and all(len(c) >= _SHORT and _RESIDUES.fullmatch(c) for c in known)


def _without_repeats(columns: tuple[str, str | None]) -> list[str]:
    return list(dict.fromkeys(filter(None, columns)))


def _read_lmdb(given: _Input) -> Iterator[RawRecords]:
    following: bytes | None = b""
    path, read = given.path, 0
    while following is not None:
        # Remapped now and then, because pages that were read count as this process's memory.
        try:
            with lmdb.open(
                str(path), subdir=path.is_dir(), readonly=True, lock=False, create=False
            ) as environment:
                status = environment.stat()
                size = (path / "data.mdb" if path.is_dir() else path).stat().st_size
                entries = max(status["entries"], 1)
                # Reading beyond the end of what LMDB has mapped would end the process with SIGBUS.
                if (environment.info()["last_pgno"] + 1) * status["psize"] > size:
                    raise DataError(f"{path}: truncated LMDB; copy it again, with mdb_copy -c")
                with environment.begin() as transaction, transaction.cursor() as cursor:
                    if not cursor.set_range(following):
                        return
                    following, taken = None, 0
                    items: list[tuple[bytes, bytes]] = []
                    for key, value in cursor:
                        if taken >= _LMDB_PASS_BYTES:
                            following = key
                            break
                        items.append((key, value))
                        taken += len(value)
            read += len(items)
            yield _lmdb_records(given, items, read / entries)
        except lmdb.Error as error:
            raise DataError(f"{path}: not a readable LMDB ({error}); check the path") from None


def _lmdb_records(given: _Input, items: list[tuple[bytes, bytes]], done: float) -> RawRecords:
    kept = [(key, value) for key, value in items if key not in _LMDB_METADATA]
    places = [f"{given.path}, key {key.decode('utf-8', 'replace')!r}" for key, _ in kept]
    found = [
        _lmdb_value(where, key, value, given)
        for where, (key, value) in zip(places, kept, strict=True)
    ]
    return RawRecords(
        [name for name, _ in found],
        [sequence for _, sequence in found],
        lambda record, offset: places[record],
        done,
    )


def _lmdb_value(where: str, key: bytes, value: bytes, given: _Input) -> tuple[bytes, bytes]:
    """(name, sequence) of a value: a plain sequence, or JSON."""
    if value.startswith(b"\x80"):
        raise DataError(
            f"{where}: is a pickle, which could run programs; convert the LMDB to JSON lines: "
            f"python examples/lmdb_of_pickles.py {shlex.quote(str(given.path))} proteins.jsonl"
        )
    if not value.startswith((b"{", b'"')):
        return _one_line(key), value
    try:
        content = json.loads(value)
    except (ValueError, RecursionError) as error:
        reason = repr(error)[:200]
        raise DataError(f"{where}: a value that cannot be read ({reason})") from None
    name = _one_line(key)
    if isinstance(content, dict):
        found, content = _name_and_text(content, _columns(list(content), given, where), where)
        name = name if found is None else found
    if isinstance(content, str):
        content = given.vocabulary.raw(content)
    if not isinstance(content, bytes):
        raise DataError(f"{where}: holds {type(content).__name__}, not a sequence")
    return name, content


def _name_and_text(
    fields: dict[str, Any], columns: tuple[str, str | None], where: str
) -> tuple[bytes | None, Any]:
    """The name (or None) and the sequence in a record; names in a list are those of duplicates."""
    sequence_field, name_field = columns
    name = None if name_field is None else fields.get(name_field)
    aliases = name if isinstance(name, list) else [name]
    if not all(isinstance(one, str | bytes | int | float | None) for one in aliases):
        raise DataError(f"{where}: a name that is {type(name).__name__}, not text")
    texts = (
        one if isinstance(one, bytes) else str(one).encode("utf-8", "replace") for one in aliases
    )
    content = fields[sequence_field]
    return (
        None if name is None else ALIAS_SEPARATOR.join(map(_one_line, texts)),
        b"" if content is None else content,
    )


def _one_line(name: bytes) -> bytes:
    return b" ".join(name.translate(WITHOUT_CONTROL).replace(ALIAS_SEPARATOR, b" ").split())


@contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file{nearest_path(path)}; check the path") from None
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: not a readable {what} ({first_line(error)}); check or write it again"
        ) from None


_READERS: dict[str, Callable[[_Input], Iterator[RawRecords]]] = {
    "fasta": lambda given: read_fasta_blocks(given.path, given.vocabulary, given.in_parts),
    "csv": _read_csv,
    "parquet": _read_parquet,
    "jsonl": _read_jsonl,
    "huggingface": _read_huggingface,
    "lmdb": _read_lmdb,
    "text": lambda given: read_documents(given.path, given.in_parts),
    "lines": lambda given: read_documents(
        given.path, given.in_parts, lambda line: line.endswith(b"\n")
    ),
    "paragraphs": lambda given: read_documents(
        given.path, given.in_parts, lambda line: not line.strip()
    ),
    "megatron": lambda given: read_megatron(
        given.path, given.vocabulary, given.reading.end_of_document
    ),
}
# Description of each format and an example of the settings, for docs/data.md.
FORMS = {
    "fasta": (
        "FASTA, A2M, A3M, PIR; alignments in Stockholm and Clustal, without their gaps",
        "input=proteins.fasta.gz",
    ),
    "csv": (
        "tables with a header: CSV, TSV, `;`, comments, UTF-8, UTF-16, Latin-1",
        "input=table.csv sequence_field=Sequence name_field=Entry",
    ),
    "parquet": ("Parquet", "input=table.parquet"),
    "jsonl": ("JSON lines, an object a line: .jsonl, .ndjson, .json", "'input=shards/*.jsonl.zst'"),
    "huggingface": (
        "a folder of one split that `datasets` saved, or of Parquet or Arrow files",
        "input=dataset_folder/train",
    ),
    "lmdb": ("LMDB of plain sequences or of JSON", "input=old_lmdb sequence_field=primary"),
    "text": ("a plain text, one record (alphabet bytes or tokenizer)", "input=book.txt"),
    "lines": ("the lines of a plain text", "input=book.txt format=lines"),
    "paragraphs": ("what blank lines divide in a plain text", "input=book.txt format=paragraphs"),
    "megatron": ("a corpus of Megatron, .bin and .idx, tokenised already", "input=corpus.idx"),
}
