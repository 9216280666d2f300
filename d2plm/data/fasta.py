"""Reading and writing FASTA, plain or gzipped, one record at a time.

Cleaning and checking are two `bytes.translate` calls a record, so no Python object is ever made
per residue and memory is bounded by the longest record. Malformed input is refused with the file,
the record and the line; a caller that would rather lose records than stop can drop and count them.
"""

import gzip
import io
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from d2plm.alphabet import RESIDUES, encode
from d2plm.errors import DataError, require_choice

ON_ILLEGAL = ("error", "drop")
LINE_WIDTH = 60

_GZIP_MAGIC = b"\x1f\x8b"
_BUFFER_BYTES = 1 << 20
_UPPER = bytes(range(256)).upper()
_BLANKS_AND_GAPS = b" \t\r\n\v\f-."
_LEGAL = RESIDUES.encode()


@dataclass(frozen=True, slots=True)
class FastaRecord:
    """One protein: the first word of its header and its residues as upper-case ASCII letters."""

    name: str
    sequence: bytes


def read_fasta(
    path: Path, on_illegal: str = "error", dropped: "Counter[str] | None" = None
) -> Iterator[FastaRecord]:
    """Yield the records of a FASTA file, plain or gzipped (told by its first bytes, not its name).

    Lower case is upper-cased; whitespace, the gaps `-` and `.`, and one trailing stop `*` are
    removed; U, O, B, Z and X are kept.

    Args:
        path: the file.
        on_illegal: "error" refuses a record that is empty or holds a letter that is no residue;
            "drop" leaves it out.
        dropped: counts the records left out, by reason ("illegal letter", "no sequence").

    Raises (when iterated):
        DataError: the file is missing, unreadable, empty, damaged or no FASTA, or a record is bad.
        ConfigError: `on_illegal` is neither "error" nor "drop".
    """
    require_choice("on_illegal", on_illegal, ON_ILLEGAL)
    path = Path(path)
    counts: Counter[str] = Counter() if dropped is None else dropped
    for line_number, name, lines in _records(path):
        sequence = b"".join(lines).translate(_UPPER, _BLANKS_AND_GAPS).removesuffix(b"*")
        illegal = sequence.translate(None, _LEGAL)
        if sequence and not illegal:
            yield FastaRecord(name, sequence)
        elif on_illegal == "drop":
            counts["illegal letter" if illegal else "no sequence"] += 1
        elif illegal:
            _refuse_letter(path, name, line_number, lines, illegal[:1])
        else:
            raise DataError(
                f"{path}, line {line_number}: record {name!r} has no sequence; remove the "
                "record, or drop such records with on_illegal=drop"
            )


def read_template_fasta(path: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each record of a FASTA file of templates, blanks removed, nothing checked.

    Raises (when iterated):
        DataError: the file is missing, unreadable, empty, damaged or no FASTA.
    """
    for _, name, lines in _records(Path(path)):
        yield name, b"".join(b"".join(lines).split()).decode("latin-1")


def _records(path: Path) -> Iterator[tuple[int, str, list[bytes]]]:
    """(line of the header, first word of the header, sequence lines) of each record."""
    try:
        with _open(path) as handle:
            for line_number, header, lines in _raw_records(path, handle):
                words = header[1:].split(maxsplit=1)
                yield line_number, words[0].decode("utf-8", "replace") if words else "", lines
    except FileNotFoundError:
        raise DataError(f"{path}: no such FASTA file; check the path") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder, not a FASTA file; name the file itself") from None
    except PermissionError:
        raise DataError(f"{path}: not readable by this user; change its permissions") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: truncated or corrupt gzip file ({error}); fetch or compress it again"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the disk") from None


def write_fasta(path: Path, records: Iterable[tuple[str, bytes | str]]) -> None:
    """Write (header without `>`, residue letters) records, wrapped at 60 columns.

    The file is written beside `path` and renamed when complete, so `path` is never half-written.

    Raises:
        DataError: the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        try:
            with open(partial, "wb", buffering=_BUFFER_BYTES) as handle:
                for header, sequence in records:
                    letters = sequence.encode() if isinstance(sequence, str) else sequence
                    handle.write(b">%b\n" % header.encode())
                    handle.writelines(
                        letters[start : start + LINE_WIDTH] + b"\n"
                        for start in range(0, len(letters), LINE_WIDTH)
                    )
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); check the folder, its permissions and "
            "the free space"
        ) from error


def encode_residues(sequence: str, where: str) -> NDArray[np.uint8]:
    """One sequence that did not come from a file, as residue tokens [L]; cleaned like a record.

    Raises:
        DataError: it is empty or holds a letter that is no residue; `where` names it.
    """
    raw = sequence.encode("latin-1", "replace")
    letters = raw.translate(_UPPER, _BLANKS_AND_GAPS).removesuffix(b"*")
    illegal = letters.translate(None, _LEGAL)[:1].decode("latin-1")
    if not letters or illegal:
        what = f"holds {illegal!r}, which is no residue letter" if letters else "is empty"
        raise DataError(f"{where}: the sequence {what}; write X for an unknown residue")
    return encode(letters)


@contextmanager
def _open(path: Path) -> Iterator["io.BufferedReader[Any]"]:
    """Open for reading bytes, through gzip where the file begins with gzip's magic bytes."""
    with open(path, "rb") as handle:
        if handle.peek(2)[:2] == _GZIP_MAGIC:
            with io.BufferedReader(gzip.GzipFile(fileobj=handle), _BUFFER_BYTES) as unpacked:
                yield unpacked
        else:
            yield handle


def _raw_records(
    path: Path, handle: "io.BufferedReader[Any]"
) -> Iterator[tuple[int, bytes, list[bytes]]]:
    """Yield (line number of the header, header line, sequence lines) of each record."""
    # Looking before reading a line keeps a binary file without newlines out of memory.
    start = handle.peek(64)[:64].lstrip()
    if start and not start.startswith(b">"):
        _refuse_start(path, start)
    header, header_number = b"", 0
    lines: list[bytes] = []
    for number, line in enumerate(handle, start=1):
        if line.startswith(b">"):
            if header:
                yield header_number, header, lines
            header, header_number, lines = line, number, []
        elif header:
            lines.append(line)
        elif line.strip():
            _refuse_start(path, line)
    if not header:
        raise DataError(f"{path}: is empty; give a FASTA file with at least one record")
    yield header_number, header, lines


def _refuse_start(path: Path, text: bytes) -> NoReturn:
    shown = text.strip().splitlines()[0][:20].decode("ascii", "backslashreplace")
    raise DataError(
        f"{path}: not FASTA (text before the first '>': {shown!r}); give a FASTA file, plain or "
        "gzipped"
    )


def _refuse_letter(
    path: Path, name: str, header_number: int, lines: list[bytes], letter: bytes
) -> NoReturn:
    offset = next(i for i, line in enumerate(lines, 1) if letter in line.translate(_UPPER))
    raise DataError(
        f"{path}, line {header_number + offset}: record {name!r} holds "
        f"{letter.decode('latin-1')!r}, which is no residue letter; write X for an unknown "
        "residue, or drop such records with on_illegal=drop"
    )
