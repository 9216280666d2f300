"""Reading CSV, TSV and their dialects row by row.

Encoding, delimiter, comments, quotation marks, empty tails and missing values are decided here for
every table that is read. Only the standard library is needed; memory is bounded by a row.
"""

import csv
import io
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path

from d2plm.core.errors import DataError, did_you_mean
from d2plm.data.compressed import InputFile, open_input
from d2plm.data.foreign import refuse_foreign

MISSING = frozenset(
    [
        *("", "na", "n/a", "#n/a", "n.a.", "<na>", "nan", "none", "null", "nil", "missing"),
        *("nd", "n.d.", "-", "--", "–", "—", ".", "?"),
        *("#div/0!", "#value!", "#ref!", "#num!", "#name?", "#null!"),
    ]
)
NO_SEQUENCE = MISSING | {*("true", "false", "unavailable", "sequence unavailable", "not available")}
LONGEST_WORD = max(map(len, NO_SEQUENCE))

_LONGEST = 64 << 20  # characters of a line, or of a quoted cell
_START = 8 << 10  # bytes by which a file is recognised
_LINES_OF_CELL = 100  # of a quoted cell among tabs
_UNDECODED = re.compile("[\udc80-\udcff]")
_NUMBER = re.compile(r"[+-]?([0-9]+([.,][0-9]*)?|[.,][0-9]+)([eE][+-]?[0-9]+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2},[0-9]{3}")
_GROUPED = re.compile(r"[+-]?[1-9][0-9]{0,2}([.,][0-9]{3})+")
_TENS = re.compile(r"[+-]?[1-9][0-9]+")
_NO_TABLE = {">": "FASTA", "|": "a Markdown table"}
_BEFORE_HEADER = '\ufeff#" \t'
_NAMES_SHOWN = 20
_MINUS = str.maketrans("−–", "--")

Line = tuple[int, str]
Row = tuple[int, list[str]]

log = logging.getLogger(__name__)


class Table:
    """An open table; see `open_table`.

    Attributes:
        columns: names in the header; R's unnamed first column of row names has the name "".
        source: the open file, which knows how much of it has been read.
        delimiter: tab, `;`, `,` or a blank; `,` for a single column.
    """

    def __init__(self, source: InputFile) -> None:
        self.path, self.source, self._noticed, self._line = source.path, source, False, 0
        start = source.content.peek(_START)[:_START]
        encoding = _wide_encoding(start)
        refuse_foreign(self.path, start.decode(encoding, "replace").encode() if encoding else start)
        errors = "replace" if encoding else "surrogateescape"
        self.text = io.TextIOWrapper(source.content, encoding or "utf-8-sig", errors)
        lines = enumerate(self._decoded(), start=1)
        header, following, delimiter = self._beginning(lines)
        self._split = delimiter or _delimiter(header[1], following[1] if following else "")
        self.delimiter = self._split if self._split in header[1] else ","
        if what := _NO_TABLE.get(header[1].lstrip()[:1]):
            raise DataError(f"{self.path}: is {what}, not a table; write it as CSV, with a header")
        csv.field_size_limit(_LONGEST)
        self._rows = self._cells(chain([header], [following] if following else [], lines))
        self.columns = [name.strip() for name in next(self._rows)[1]]
        first = next(self._rows, None)
        cells = [cell.strip() for cell in first[1]] if first else []
        # R writes row names, in quotation marks or 1, 2, 3, without a header.
        is_of_r = header[1].startswith('"') or cells[:1] == ["1"]
        if len(cells) == len(self.columns) + 1 and cells[-1] and is_of_r:
            self.columns.insert(0, "")
        while self.columns and not self.columns[-1] and not "".join(cells[len(self.columns) - 1 :]):
            self.columns.pop()
        self._rows = chain([first] if first else [], self._rows)

    def rows(self) -> Iterator[Row]:
        """(line in the file, cells) of each row, without empty rows and comments.

        Raises `DataError` (when iterated) for a row of another width, or an open quotation mark.
        """
        width, repeats, first = len(self.columns), 0, True
        for line, cells in self._rows:
            if not "".join(cells).strip():
                continue
            if self._is_header(cells):  # of a second, concatenated file
                if not repeats:
                    log.info("%s: line %d repeats the header; left out", self.path, line)
                repeats += 1
                continue
            if len(cells) > width and not any(map(str.strip, cells[width:])):
                del cells[width:]
            if len(cells) == width:
                yield line, cells
                first = False
            elif not cells[0].startswith("#"):
                remedy = f"quote cells that hold a {self.delimiter!r}"
                if first and not any(map(_NUMBER.fullmatch, map(str.strip, cells))):
                    remedy = f"line {line} looks like the header: remove what is above it"
                raise DataError(
                    f"{self.path}, line {line}: has {len(cells)} cells where the header has "
                    f"{width}; {remedy}"
                )

    def _is_header(self, cells: list[str]) -> bool:
        if not self.columns or cells[0].strip(_BEFORE_HEADER) != self.columns[0]:
            return False
        again = [self.columns[0], *map(str.strip, cells[1:])]
        return again[: len(self.columns)] == self.columns and not any(again[len(self.columns) :])

    def _decoded(self) -> Iterator[str]:
        for line in iter(partial(self.text.readline, _LONGEST), ""):
            if len(line) >= _LONGEST:
                raise DataError(f"{self.path}: has a line of {_LONGEST:,} characters; split it")
            if not line.isascii() and _UNDECODED.search(line):
                line = line.encode("utf-8", "surrogateescape").decode("cp1252", "replace")
                if not self._noticed:
                    log.info(
                        "%s: is not UTF-8, read as Windows-1252; if letters are wrong, convert "
                        "it: iconv -f ENCODING -t UTF-8",
                        self.path,
                    )
                self._noticed = True
            # End mark of DOS files, and reserved space.
            yield line if line[-1] == "\n" else line.rstrip("\x1a\0")

    def _beginning(self, lines: Iterator[Line]) -> tuple[Line, Line | None, str]:
        """The header, the line after it, and the delimiter that a line `sep=` specifies."""
        comment, delimiter = None, ""
        for line in lines:
            if stated := re.fullmatch(r'"?sep=(.)"?\s*', line[1], re.IGNORECASE):
                delimiter = stated[1]
            elif line[1].startswith(("#", '"#')):
                comment = line
            elif line[1].strip(' ,;\t\n"'):
                break
        else:
            raise DataError(
                f"{self.path}: is empty; give a table with a header and at least one row"
            )
        if comment:  # if the next line has numbers, it may be the header
            cells, names = (re.split("[\t;,]", one.rstrip()) for one in (line[1], comment[1][1:]))
            if len(names) == len(cells) > 1 and any(map(_NUMBER.fullmatch, cells)):
                return (comment[0], comment[1][1:]), line, delimiter
        return line, next((one for one in lines if one[1].strip()), None), delimiter

    def _cells(self, lines: Iterable[Line]) -> Iterator[Row]:
        if self._split == "\t":
            yield from _tabbed(iter(lines))
            return

        def texts() -> Iterator[str]:
            for self._line, text in lines:
                yield text

        reader = csv.reader(
            texts(), delimiter=self._split, skipinitialspace=self._split == " ", strict=True
        )
        try:
            for cells in reader:
                yield self._line, cells
        except csv.Error as error:
            raise DataError(
                f"{self.path}, line {self._line}: not readable as CSV ({error}); quote cells that "
                f"hold a {self._split!r} or a quotation mark, and double the latter"
            ) from None


@contextmanager
def open_table(path: Path) -> Iterator[Table]:
    """Open a table, plain or compressed; `-` is standard input.

    UTF-8, UTF-16 and Windows-1252 are read; tabs, semicolons or commas separate cells. Between tabs
    a quotation mark is a character unless the whole cell is quoted. Raises `DataError` if the file
    is missing, damaged, empty, or no table.
    """
    with open_input(path) as source:
        table = Table(source)
        yield table
        table.text.detach()  # the file is closed by `open_input`


def usual_columns(
    where: str | Path,
    columns: Sequence[str],
    usual: Sequence[str],
    wanted: str | None = None,
    key: str = "",
) -> list[str]:
    """The column `wanted` by the setting `key`, or those with usual names, the most likely first.

    Raises `DataError` if there is no such column, or several have its name.
    """
    found = sorted(
        (name for name in columns if plain(name) in usual), key=lambda one: usual.index(plain(one))
    )
    if wanted is not None and wanted not in columns:
        raise DataError(
            f"{where}: has no column {wanted!r}{did_you_mean(wanted, columns)}; set {key} to one "
            f"of {listed(columns)}"
        )
    for name in found[:1] if wanted is None else [wanted]:
        if columns.count(name) > 1:
            raise DataError(f"{where}: has several columns {name!r}; rename all but one")
    return found if wanted is None else [wanted]


def plain(name: str) -> str:
    """The name of a column in lower case, with _ between words and without a unit."""
    without_unit = re.sub(r"[(\[].*", "", name.lower())  # fitness (log2)
    return re.sub(r"[^a-z0-9]+", "_", without_unit).strip("_")


def listed(names: Sequence[str]) -> str:
    """The first 20 names, for a message."""
    shown = [name if name.isprintable() else repr(name) for name in names[:_NAMES_SHOWN]]
    return ", ".join(shown + ["…"] * (len(names) > _NAMES_SHOWN)) or "none"


def is_missing(cell: str, words: Set[str] = MISSING) -> bool:
    """Whether a cell is empty or one of the `words` for a missing value."""
    return cell.strip().lower() in words


def number(cell: str, delimiter: str = ",") -> float:
    """The finite number in a cell, with a decimal point or comma; NaN if it is missing.

    Raises `DataError` if the cell is no such number.
    """
    if is_missing(cell):
        return math.nan
    text = cell.strip().translate(_MINUS)
    if _NUMBER.fullmatch(text) and not (delimiter == "," and _THOUSANDS.fullmatch(text)):
        value = float(text.replace(",", "."))
        if math.isfinite(value):
            return value
    raise DataError(f"{cell!r} is not a number, such as -0.3; leave it empty if there is none")


def ambiguous(cells: Iterable[str]) -> tuple[int, str] | None:
    """The place of a cell that may have thousands or decimals, and why it is ambiguous."""
    texts = [(place, cell.strip()) for place, cell in enumerate(cells) if not is_missing(cell)]
    points, commas = ([one for one in texts if mark in one[1]] for mark in ".,")
    if points and commas:
        place, text = max(points[0], commas[0])
        return place, f"{text!r} beside {min(points[0], commas[0])[1]!r}: decimals or thousands?"
    marked = points or commas
    grouped = marked and all(_GROUPED.fullmatch(text) for _, text in marked)
    if grouped and (commas or any(_TENS.fullmatch(text) for _, text in texts)):
        return marked[0][0], f"{marked[0][1]!r} has thousands or decimals?"
    return None


def _wide_encoding(start: bytes) -> str | None:
    """UTF-16 or UTF-32, by its mark or by the zeros of ASCII letters; None for other text."""
    if start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    zeros = [start[first:64:2].count(0) * 4 > len(start[:64]) for first in (0, 1)]
    return None if zeros[0] == zeros[1] else "utf-16-be" if zeros[0] else "utf-16-le"


def _delimiter(header: str, following: str) -> str:
    """The delimiter of the cells; a tab for a single column, whose cells may contain the others."""
    first, second = (re.sub('"[^"]*"', "q", text).rstrip() for text in (header, following))
    of_both = {one: min(first.count(one), second.count(one)) for one in "\t;, "}
    if not any(first.count(one) for one in "\t;,"):
        return " " if of_both[" "] and second.count(" ") - first.count(" ") in (0, 1) else "\t"
    return max("\t;,", key=lambda one: (of_both[one], first.count(one)))


def _tabbed(lines: Iterator[Line]) -> Iterator[Row]:
    """The rows of a table with tabs; a cell quoted as a whole may contain tabs and line breaks."""
    width, held = 0, list[Line]()
    while held := held or [*islice(lines, 1)]:
        number, text = held[0]
        cells, used = text.rstrip("\n").split("\t"), 1
        while '"' in text and width not in (0, len(cells)) and used < _LINES_OF_CELL:
            try:
                cells = next(csv.reader([text], delimiter="\t", strict=True))
                break
            except csv.Error:  # perhaps the cell ends on a later line
                held += islice(lines, used + 1 - len(held))
                used += 1
                text = "".join(one for _, one in held[:used])
        else:
            cells, used = [*map(_unquoted, cells)] if '"' in text else cells, 1
        width, held = len(cells), held[used:]
        yield number, cells


def _unquoted(cell: str) -> str:
    whole = len(cell) > 1 and cell[0] == cell[-1] == '"'
    return cell[1:-1].replace('""', '"') if whole else cell
