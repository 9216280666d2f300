"""Alignments in Stockholm and Clustal format, and the columns of alignments in any format."""

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import PAD, Tokens
from d2plm.data.compressed import InputFile
from d2plm.data.records import RawRecords

_STOCKHOLM = re.compile(rb"\s*# STOCKHOLM 1\.")
_CLUSTAL = re.compile(rb"\s*CLUSTAL|[^\n>#;!]* multiple sequence alignment", re.I)
_PLAIN_GAPS = bytes.maketrans(b"~_", b"--")
_BLANKS, _GAPS = b" \t\r\n\v\f", b"-."
_INSERTIONS = b"abcdefghijklmnopqrstuvwxyz."  # in A2M and A3M
_LONGEST_LINE = 64 << 20


def alignment_format(start: bytes) -> str | None:
    """The format of an alignment file, given its first bytes; None for another file."""
    start = start.removeprefix(BOM_UTF8)
    if _STOCKHOLM.match(start):
        return "Stockholm"
    return "Clustal" if _CLUSTAL.match(start) else None


def read_alignments(source: InputFile, form: str) -> Iterator[RawRecords]:
    """The rows of each alignment in a file; the blocks of a row are joined.

    Raises `DataError` (when iterated) for a line that is no row, or rows of unequal length.
    """
    rows: dict[bytes, list[bytes]] = {}
    lines: dict[bytes, int] = {}
    in_block: set[bytes] = set()
    end = [b"//"] if form == "Clustal" else []  # Clustal has no end mark
    for number, line in enumerate(
        chain(iter(partial(source.content.readline, _LONGEST_LINE), b""), end), start=1
    ):
        words = line.split()
        if not words or line.startswith(b"//"):
            in_block.clear()
        if line.startswith(b"//"):
            if len({sum(map(len, row)) for row in rows.values()}) > 1:
                raise DataError(
                    f"{source.path}: the rows of the alignment that ends at line {number} are not "
                    f"equally long, so the {form} file is not whole; fetch or write it again"
                )
            names = list(rows)
            places = [f"{source.path}, line {lines[name]}" for name in names]
            sequences = [b"".join(row).translate(_PLAIN_GAPS) for row in rows.values()]
            where = partial(_place, places)
            yield RawRecords(names, sequences, where, source.done(), aligned=True)
            rows, lines = {}, {}
        elif (
            words and not line[:1].isspace() and not line.startswith(b"#") and (rows or number > 1)
        ):
            if len(words) != 2 and not (len(words) == 3 and words[2].isdigit()):
                raise DataError(
                    f"{source.path}, line {number}: is no row of a {form} alignment, a name and a "
                    "sequence; write the file again, or give FASTA"
                )
            if words[0] in in_block:
                raise DataError(
                    f"{source.path}, line {number}: two rows of a block have the name "
                    f"{words[0].decode('utf-8', 'replace')!r}; give each a name of its own"
                )
            in_block.add(words[0])
            rows.setdefault(words[0], []).append(words[1])
            lines.setdefault(words[0], number)
    if rows:
        raise DataError(
            f"{source.path}: the last alignment has no end (//), so the Stockholm file is not "
            "whole; fetch it again"
        )


def alignment_columns(
    texts: Sequence[bytes], sequences: Sequence[Tokens]
) -> NDArray[np.uint8] | None:
    """uint8 [N, W]: each sequence in the columns of its alignment, PAD at gaps.

    If the rows are equally long (A2M, aligned FASTA, Stockholm, Clustal), columns are all letters
    and gaps; otherwise (A3M), lower case and `.` are insertions without a column. None if the rows
    are no alignment: without gaps, or of other lengths.

    Args:
        texts: N rows, as in their file.
        sequences: uint8 residue tokens of each row.
    """
    rows = [np.frombuffer(row.translate(None, _BLANKS + b"*"), np.uint8) for row in texts]
    kept = [np.ones(len(row), np.bool_) for row in rows]
    if len({*map(len, rows)}) > 1:
        insertions = np.frombuffer(_INSERTIONS, np.uint8)
        kept = [~np.isin(row, insertions) for row in rows]
    widths, gaps = {int(own.sum()) for own in kept}, np.frombuffer(_GAPS, np.uint8)
    if len(widths) != 1 or not any(np.isin(row, gaps).any() for row in rows):
        return None
    columns = np.full((len(rows), *widths), PAD, np.uint8)
    for own, row, shown, tokens in zip(columns, rows, kept, sequences, strict=True):
        letters = ~np.isin(row, gaps)
        own[letters[shown]] = tokens[shown[letters]]
    return columns


def _place(places: list[str], record: int, offset: int | None) -> str:
    return places[record]
