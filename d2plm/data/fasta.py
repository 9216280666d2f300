"""Reading and writing FASTA in blocks of whole records.

A block is cut into records by two C-level searches, and its sequences are made tokens of together,
which takes about a microsecond per record; the longest record bounds the memory.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError
from d2plm.core.files import written_beside
from d2plm.core.vocabulary import PROTEIN
from d2plm.data.compressed import InputFile, open_input
from d2plm.data.records import ALIAS_SEPARATOR, RawRecords, refuse

LINE_WIDTH = 60

_BLOCK_BYTES = 256 << 10
_BUFFER_BYTES = 1 << 20
_MAX_RECORD_BYTES = 16 << 20  # memory is several times that of the largest record
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")
_DNA_BYTES, _DNA_LETTERS = (
    4096,
    50,
)  # residues examined, and the minimum number to distinguish DNA from proteins

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FastaRecord:
    """One protein: the first word of its header and its residue tokens, uint8 [L]."""

    name: str
    tokens: NDArray[np.uint8]


def read_fasta(path: Path) -> Iterator[FastaRecord]:
    """Yield the records of a FASTA file, plain or compressed.

    Raises (when iterated):
        DataError: the file is missing, unreadable, empty, damaged or no FASTA, or a record is empty
            or holds a letter that is no residue.
    """
    return proteins(read_fasta_blocks(Path(path)))


def proteins(blocks: Iterable[RawRecords]) -> Iterator[FastaRecord]:
    """The cleaned records of an input.

    Raises (when iterated):
        DataError: a record is empty or holds a letter that is no residue.
    """
    for records in blocks:
        cleaned = records.tokenised(PROTEIN)
        for index, name in enumerate(records.names):
            if cleaned.illegal[index] or not cleaned.lengths[index]:
                refuse(records, index, PROTEIN)
            yield FastaRecord(name.decode("utf-8", "replace"), cleaned[index].copy())


def read_template_fasta(path: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each record of a FASTA file of templates, without blanks, unchecked.

    Raises (when iterated):
        DataError: the file is missing, unreadable, empty, damaged or no FASTA.
    """
    for records in read_fasta_blocks(Path(path)):
        for name, text in zip(records.names, records.sequences, strict=True):
            yield name.decode("utf-8", "replace"), b"".join(text.split()).decode("latin-1")


def read_fasta_blocks(path: Path) -> Iterator[RawRecords]:
    """The records of a FASTA file (`-`: standard input), plain or compressed, block by block.

    Raises (when iterated):
        DataError: the file is missing, unreadable, empty, damaged or no FASTA.
    """
    with open_input(path) as source:
        line = _refuse_other_text(source)
        for number, block in enumerate(_blocks(source)):
            if number == 0:
                _warn_of_dna(path, bytes(block[:_DNA_BYTES]))
            if b"\r" in block:  # line ends of Windows or of old Macs
                block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            texts = block.split(b"\n>")
            texts[0] = texts[0][1:]
            parts = [text.partition(b"\n") for text in texts]
            yield RawRecords(
                names=[_first_word(header) for header, _, _ in parts],
                sequences=[sequence for _, _, sequence in parts],
                where=_places(path, line, texts),
                done=source.done(),
            )
            # Several times as fast as bytes.count, which stops at every find.
            line += int(np.count_nonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE))


def write_fasta(path: Path, records: Iterable[tuple[str, bytes | str]]) -> None:
    """Write (header without `>`, residue letters) records, wrapped at 60 columns.

    The file is written beside `path` and renamed when complete, so `path` is never half-written.

    Raises:
        DataError: the file cannot be written.
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


@cache  # once for a file, however often it is read
def _warn_of_dna(path: Path, beginning: bytes) -> None:
    """Warn if the first records look like nucleotides, whose letters are also residue letters."""
    lines = [line for line in beginning.split(b"\n")[:-1] if not line.startswith(b">")]
    letters = b"".join(lines).upper()
    if len(letters) >= _DNA_LETTERS and set(b"ACG") <= {*letters} <= set(b"ACGTUN\r"):
        log.warning("%s: looks like DNA or RNA, read as residues; translate it first", path)


def _blocks(source: InputFile) -> Iterator[bytes]:
    """Blocks of whole records, each of which begins with `>`."""
    pieces: list[bytes] = []
    size = 0  # of them
    for piece in iter(lambda: source.content.read(_BLOCK_BYTES), b""):
        if pieces and pieces[-1].endswith(b"\n") and piece.startswith(b">"):
            yield b"".join(pieces)
            pieces, size = [], 0
        cut = piece.rfind(b"\n>")
        if cut >= 0:
            view = memoryview(piece)
            yield b"".join([*pieces, view[: cut + 1]])
            pieces, size = [piece[cut + 1 :]], 0
        else:
            pieces.append(piece)
            size += len(piece)
            if size > _MAX_RECORD_BYTES:
                name = bytes(pieces[0][1:61]).split(b"\n")[0].decode("utf-8", "replace")
                raise DataError(
                    f"{source.path}: record {name!r} has more than {_MAX_RECORD_BYTES:,} bytes, "
                    "far more than any protein; remove it, or split it"
                )
    yield b"".join(pieces)


def _refuse_other_text(source: InputFile) -> int:
    """Skip to the first `>` and return its line number; reject input that begins otherwise."""
    # Looking before reading keeps a binary file without line breaks out of memory.
    line = 1
    while True:
        start = source.content.peek(64)[:64]
        blank = len(start) - len(start.removeprefix(_BYTE_ORDER_MARK).lstrip())
        if not start:
            raise DataError(f"{source.path}: is empty; give a FASTA file with at least one record")
        if not blank:
            break
        line += source.content.read(blank).count(b"\n")
    if not start.startswith(b">"):
        shown = start.splitlines()[0][:20].decode("ascii", "backslashreplace")
        raise DataError(
            f"{source.path}: not FASTA (text before the first '>': {shown!r}); give a FASTA file, "
            "plain or compressed"
        )
    return line


def _first_word(header: bytes) -> bytes:
    words = header.split(maxsplit=1)
    if ALIAS_SEPARATOR in header:  # NCBI's nr: the headers of equal sequences in one
        words = [ALIAS_SEPARATOR.join(_first_word(one) for one in header.split(ALIAS_SEPARATOR))]
    return words[0] if words else b""


def _places(path: Path, first_line: int, texts: list[bytes]) -> Callable[[int, int | None], str]:
    """The lines of the records `texts`, the first of which begins at `first_line`."""

    def where(record: int, offset: int | None) -> str:
        line = first_line + sum(text.count(b"\n") + 1 for text in texts[:record])
        if offset is not None:
            sequence = texts[record].partition(b"\n")[2]
            line += 1 + sequence.count(b"\n", 0, offset)
        return f"{path}, line {line}"

    return where
