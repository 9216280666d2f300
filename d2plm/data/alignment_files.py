"""Sequences of alignments in the formats Stockholm and Clustal, without their gaps."""

import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from functools import partial
from itertools import chain

from d2plm.core.errors import DataError
from d2plm.data.compressed import InputFile
from d2plm.data.records import RawRecords

_STOCKHOLM = re.compile(rb"\s*# STOCKHOLM 1\.")
_CLUSTAL = re.compile(rb"\s*CLUSTAL|[^\n>#;!]* multiple sequence alignment", re.I)
_GAPS = b"-.~_"
_LONGEST_LINE = 64 << 20


def alignment_format(start: bytes) -> str | None:
    """The format of an alignment file, from its first bytes; None for another file."""
    start = start.removeprefix(BOM_UTF8)
    if _STOCKHOLM.match(start):
        return "Stockholm"
    return "Clustal" if _CLUSTAL.match(start) else None


def read_alignments(source: InputFile, form: str) -> Iterator[RawRecords]:
    """The sequences of each alignment of a file: rows of one name in several blocks are joined.

    Raises (when iterated):
        DataError: a line is no row, or rows of an alignment are not equally long.
    """
    rows: dict[bytes, list[bytes]] = {}
    lines: dict[bytes, int] = {}
    in_block: set[bytes] = set()
    end = [b"//"] if form == "Clustal" else []  # which ends without a mark
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
            sequences = [b"".join(row).translate(None, _GAPS) for row in rows.values()]
            yield RawRecords(names, sequences, partial(_place, places), source.done())
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


def _place(places: list[str], record: int, offset: int | None) -> str:
    return places[record]
