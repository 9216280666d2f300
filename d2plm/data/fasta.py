"""Reading and writing FASTA and the related A2M, A3M and PIR, in blocks of whole records.

A block is cut into records by two C-level searches and tokenised at once, which takes about a
microsecond per record; the longest record bounds the memory.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from d2plm.core.errors import DataError
from d2plm.core.files import written_beside
from d2plm.core.vocabulary import PROTEIN, Tokens, Vocabulary
from d2plm.data.alignment_files import alignment_format, read_alignments
from d2plm.data.compressed import InputFile, open_input
from d2plm.data.foreign import refuse_foreign
from d2plm.data.record_checks import checked
from d2plm.data.records import OF_TEXT, PROSE, RawRecords, first_words, refuse, shown

LINE_WIDTH = 60

_BLOCK_BYTES = 256 << 10
_OF_CHAINS = re.compile(rb"#\d+(,\d+)+\t")
_LOOK_BYTES = 1 << 12  # to recognise a format
_BUFFER_BYTES = 1 << 20
_MAX_RECORD_BYTES = 16 << 20  # memory is several times that of the largest record
_NEWLINE = ord("\n")


@dataclass(frozen=True, slots=True)
class FastaRecord:
    """A sequence: name, tokens and, from a text input, the text with any gaps of an alignment."""

    name: str
    tokens: Tokens
    text: bytes = b""


def read_fasta(path: Path, vocabulary: Vocabulary = PROTEIN) -> Iterator[FastaRecord]:
    """Yield the records of a FASTA file, plain or compressed.

    Raises `DataError` (when iterated) if the file is missing, unreadable, empty, damaged or no
    FASTA, or a record is empty or holds a letter outside the vocabulary.
    """
    path = Path(path)
    return tokenised(checked(read_fasta_blocks(path, vocabulary), vocabulary, path), vocabulary)


def tokenised(blocks: Iterable[RawRecords], vocabulary: Vocabulary) -> Iterator[FastaRecord]:
    """Yield the records of an input with their tokens.

    Raises `DataError` (when iterated) for a record that is empty or not in the vocabulary.
    """
    for records in blocks:
        found = records.tokenised(vocabulary)
        for index, name in enumerate(records.names):
            if found.illegal[index] or not found.lengths[index]:
                refuse(records, index, vocabulary)
            text = records.sequences[index] if records.sequences else b""
            yield FastaRecord(shown(name), found[index].copy(), text)


def read_template_fasta(path: Path) -> Iterator[tuple[str, str, str]]:
    """(name, text, its place) of each record of a FASTA file of templates, unchecked.

    Raises `DataError` (when iterated) if the file is missing, unreadable, damaged or no FASTA.
    """
    for records in read_fasta_blocks(Path(path)):
        for index, text in enumerate(records.sequences):
            name, where = shown(records.names[index]), records.where(index, None)
            yield name, b"".join(text.split()).decode("latin-1"), where


def read_fasta_blocks(
    path: Path, vocabulary: Vocabulary | None = None, in_parts: bool = False
) -> Iterator[RawRecords]:
    """The records of a FASTA file (`-`: standard input), plain or compressed, block by block.

    Stockholm and Clustal alignments are read, too. `checked` checks the records. Raises `DataError`
    (when iterated) if the file is missing, unreadable, empty, damaged, no FASTA, or contains
    nucleotides instead of proteins.

    Args:
        vocabulary: None allows any letter, as in templates.
        in_parts: whether a record of many megabytes may come in parts.
    """
    with open_input(path) as source:
        start = source.content.peek(_LOOK_BYTES)[:_LOOK_BYTES]
        refuse_foreign(path, start)
        if form := alignment_format(start):
            yield from read_alignments(source, form)
            return
        line = _first_record(source, vocabulary)
        for block, part in _blocks(source, in_parts):
            line -= bool(part)  # the header is repeated
            texts = block.split(b"\n>")
            texts[0] = texts[0][1:]
            split = [text.partition(b"\n") for text in texts]
            yield RawRecords(
                names=first_words(header for header, _, _ in split),
                sequences=[sequence for _, _, sequence in split],
                where=_places(path, line, texts),
                done=source.done(),
                part=part,
            )
            # Several times as fast as bytes.count.
            line += int(np.count_nonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE))


def write_fasta(path: Path, records: Iterable[tuple[str, bytes | str]]) -> None:
    """Write (header without `>`, residue letters) records atomically, wrapped at 60 columns.

    Raises `DataError` if the file cannot be written.
    """
    with written_beside(path) as partial, open(partial, "wb", buffering=_BUFFER_BYTES) as file:
        for header, sequence in records:
            file.write(fasta_text(header, sequence))


def fasta_text(header: bytes | str, sequence: bytes | str) -> bytes:
    """One record as FASTA, wrapped at 60 columns."""
    letters = sequence.encode() if isinstance(sequence, str) else sequence
    name = header.encode() if isinstance(header, str) else header
    lines = [letters[i : i + LINE_WIDTH] for i in range(0, len(letters), LINE_WIDTH)]
    return b"\n".join([b">" + name, *lines, b""])


def _pieces(source: InputFile) -> Iterator[bytes]:
    """The content, with Windows and old Mac line ends converted to newlines."""
    held = b""
    for piece in iter(lambda: source.content.read(_BLOCK_BYTES), b""):
        piece = held + piece
        held = piece[-1:] if piece.endswith(b"\r") else b""
        if b"\r" in piece:
            piece = piece.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        yield piece
    if held:
        yield b"\n"


def _blocks(source: InputFile, in_parts: bool) -> Iterator[tuple[bytes, int | None]]:
    """Blocks of whole records, or of one part of a long record with its header repeated.

    The second of a pair is `RawRecords.part`.
    """
    pieces: list[bytes] = []
    size, part = 0, None
    for piece in _pieces(source):
        if pieces and pieces[-1].endswith(b"\n") and piece.startswith(b">"):
            yield b"".join(pieces), part
            pieces, size, part = [], 0, None
        cut = piece.rfind(b"\n>")
        if cut >= 0 and (part is not None or source.content.peek(1)):
            view = memoryview(piece)
            if part is not None:
                end = piece.find(b"\n>") + 1
                yield b"".join([*pieces, view[:end]]), part
                pieces, view, cut, part = [], view[end:], cut - end, None
            if whole := b"".join([*pieces, view[: cut + 1]]):
                yield whole, None
            pieces, size = [bytes(view[cut + 1 :])], 0
        else:
            pieces.append(piece)
            size += len(piece)
            if size > _MAX_RECORD_BYTES:
                block = b"".join(pieces)
                header, newline, _ = block.partition(b"\n")
                if not in_parts:
                    name = header[1:61].decode("utf-8", "replace")
                    raise DataError(
                        f"{source.path}: record {name!r} has more than {_MAX_RECORD_BYTES:,} "
                        "bytes, far more than any protein or gene; remove it, split it, or cut it "
                        "with window when ingesting, without max_residues"
                    )
                part = part or 0
                yield block, part
                pieces, size, part = [header + newline], 0, part + 1
    yield b"".join(pieces).rstrip(b"\0\x1a"), part  # end marks of DOS and ColabFold


def _first_record(source: InputFile, vocabulary: Vocabulary | None) -> int:
    """Skip blank lines and comments up to the first `>`; returns its line, rejects other text."""
    # Peeking before reading keeps a binary file without line breaks out of memory.
    line = 1
    while True:
        start = source.content.peek(64)[:64]
        blank = len(start) - len(start.removeprefix(BOM_UTF8).lstrip())
        if not start:
            raise DataError(f"{source.path}: is empty; give a FASTA file with at least one record")
        if blank:
            line += source.content.read(blank).count(b"\n")
        elif start.startswith((b";", b"#", b"!")):
            comment = source.content.readline(_BUFFER_BYTES)
            if _OF_CHAINS.match(comment):
                raise DataError(
                    f"{source.path}, line {line}: is ColabFold's alignment of a complex, whose "
                    "chains are joined in each row; give the alignment of each chain"
                )
            line += comment.count(b"\n")
        else:
            break
    if not start.startswith(b">"):
        shown = start.splitlines()[0][:20].decode("ascii", "backslashreplace")
        is_text = vocabulary is not None and PROSE.search(start)
        raise DataError(
            f"{source.path}: not FASTA (text before the first '>': {shown!r}); give a FASTA file, "
            f"plain or compressed{OF_TEXT if is_text else ''}"
        )
    return line


def _places(path: Path, first_line: int, texts: list[bytes]) -> Callable[[int, int | None], str]:
    def where(record: int, offset: int | None) -> str:
        line = first_line + sum(text.count(b"\n") + 1 for text in texts[:record])
        if offset is not None:
            sequence = texts[record].partition(b"\n")[2]
            line += 1 + sequence.count(b"\n", 0, offset)
        return f"{path}, line {line}"

    return where
