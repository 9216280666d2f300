"""Variants of proteins: their notation, and reading and writing tables of variants with scores.

The cells of a table remain text, so the output equals the input with added columns of scores.
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from d2plm.core.errors import DataError, did_you_mean, nearest
from d2plm.core.vocabulary import CANONICAL, decode, encode
from d2plm.data.compressed import open_input
from d2plm.data.fasta import FastaRecord
from d2plm.data.records import places_by_name

VARIANT_COLUMNS = ("mutant", "mutation", "variant")  # in this order of preference
NAME_COLUMN, MEASURED_COLUMN = "name", "DMS_score"
# What is written: of the model, given relatives where there are any; with relatives also of the
# model alone, and of the site-independent profile.
SCORE_COLUMN, ALONE_COLUMN, PROFILE_COLUMN = SCORE_COLUMNS = (
    "d2plm_score",
    "d2plm_score_alone",
    "d2plm_profile_score",
)
UNMEASURED = ("", "na", "nan")
WILD_TYPE = ("wt", "_wt")  # how tables of variants call the unchanged protein, in either case

_HEADER_BYTES = 128 << 10
_SUBSTITUTION = re.compile(r"([A-Za-z*])(-?\d+)([A-Za-z*])")
_SEPARATORS = re.compile(r"[:;,\s]+")
_MIN_POSITIONS = 3  # fewer fit some other numbering by chance


@dataclass(frozen=True, slots=True)
class Substitution:
    """One change as it is written, `A24G`: residue `wild_type` at `position` becomes `mutant`."""

    wild_type: str
    position: int
    mutant: str

    def __str__(self) -> str:
        return f"{self.wild_type}{self.position}{self.mutant}"


@dataclass(frozen=True, slots=True)
class Variant:
    """The changes of a variant; a variant without changes is the wild type.

    Attributes:
        positions: residues from 0, ascending.
        mutants: the token that stands at each instead.
    """

    positions: tuple[int, ...] = ()
    mutants: tuple[int, ...] = ()


@dataclass(frozen=True)
class VariantTable:
    """A table of N variants.

    Attributes:
        cells: the N rows as text, under the names of the header.
    """

    path: Path
    cells: pd.DataFrame
    delimiter: str

    def column(self, *names: str) -> "pd.Series[str] | None":
        """The first of these columns that exists, in upper or lower case."""
        lower = [column.strip().lower() for column in self.cells.columns]
        found = next((lower.index(name.lower()) for name in names if name.lower() in lower), None)
        return None if found is None else self.cells.iloc[:, found]

    def measured(self) -> NDArray[np.float64] | None:
        """float64 [N]: the measured effects, NaN where there is none; None without their column.

        Raises:
            DataError: for a cell that is not a number.
        """
        cells = self.column(MEASURED_COLUMN)
        if cells is None:
            return None
        cells = cells.mask(cells.str.strip().str.lower().isin(UNMEASURED))
        values = pd.to_numeric(cells, errors="coerce")
        wrong = values.isna() & cells.notna()
        if wrong.any():
            raise DataError(
                f"{self._row(wrong.idxmax())}: {MEASURED_COLUMN} {cells[wrong.idxmax()]!r} is not "
                "a number; leave it empty where nothing was measured"
            )
        return values.to_numpy(np.float64)

    def rows_by_protein(
        self, proteins: Sequence[FastaRecord], source: str
    ) -> dict[int, NDArray[np.int64]]:
        """Index of each wild type → the rows with its variants.

        The column of names is ignored with a single wild type: it may hold the variants' own.

        Args:
            source: the file that holds them, for messages.

        Raises:
            DataError: with several wild types, for a missing column, an unknown name or two wild
                types of one name.
        """
        if len(proteins) == 1:
            return {0: np.arange(len(self.cells))}
        names, cells = [record.name for record in proteins], self.column(NAME_COLUMN)
        if cells is None:
            raise DataError(
                f"{self.path}: {source} has {len(proteins)} proteins; add a column {NAME_COLUMN} "
                "with the record that each variant changes"
            )
        places = places_by_name(names, source)
        groups = cells.str.strip().groupby(cells.str.strip(), sort=False).indices
        for name, rows in groups.items():
            if name not in places:
                raise DataError(
                    f"{self._row(rows[0])}: {source} has no record {name!r}"
                    f"{did_you_mean(name, names)}; use one of its names"
                )
        return {places[name]: rows for name, rows in groups.items()}

    def place(
        self, proteins: Sequence[FastaRecord], rows_of: dict[int, NDArray[np.int64]], offset: int
    ) -> dict[int, list[Variant]]:
        """Index of each wild type → the variants of its rows; `rows_of` is from `rows_by_protein`.

        Raises:
            DataError: for a cell that is no variant, or does not fit its wild type.
        """
        cells = self.column(*VARIANT_COLUMNS)
        assert cells is not None
        variants = {}
        for protein, rows in rows_of.items():
            places = [f"{self._row(row)}: " for row in rows]
            name, tokens = proteins[protein].name, proteins[protein].tokens
            variants[protein] = place_variants(
                cells.iloc[rows], tokens, offset=offset, name=name, places=places
            )
        return variants

    def write(self, file: Path | TextIO, scores: Mapping[str, NDArray[np.float64]]) -> None:
        """Write the table and, as its last columns, the scores [N] of its rows by column."""
        table = self.cells.copy()
        for column, values in scores.items():
            table[column] = [f"{score:.6f}" for score in values]
        # Bytes that are not UTF-8 are written as they were read.
        table.to_csv(file, sep=self.delimiter, index=False, errors="surrogateescape")

    def _row(self, row: Any) -> str:
        return f"{self.path}, row {row + 1}"


def parse_variant(text: str) -> list[Substitution]:
    """`A24G`, or several separated by `:`, `;`, `,` or blanks; none for `WT`.

    Raises:
        DataError: if that is not how it is written, a letter is none of the twenty residues, or a
            position is named twice.
    """
    text = text.strip()
    if text.lower() in WILD_TYPE:
        return []
    found: dict[int, Substitution] = {}
    for word in _SEPARATORS.split(text):
        match = _SUBSTITUTION.fullmatch(word)
        if match is None:
            raise DataError(
                f"{text!r} is not a variant; write wild-type residue, position, mutant residue, as "
                "in A24G, several as in A24G:L30P, or WT"
            )
        substitution = Substitution(match[1].upper(), int(match[2]), match[3].upper())
        for letter in (substitution.wild_type, substitution.mutant):
            if letter not in CANONICAL:
                raise DataError(
                    f"{text!r} has {letter!r}, which has no probability under the model; only the "
                    f"residues {''.join(sorted(CANONICAL))} can be scored"
                )
        if substitution.position in found:
            raise DataError(f"{text!r} changes position {substitution.position} twice; write once")
        found[substitution.position] = substitution
    return list(found.values())


def place(
    substitutions: Sequence[Substitution],
    wild_type: NDArray[np.uint8],
    *,
    offset: int = 0,
    name: str = "the wild type",
) -> Variant:
    """The variant of `wild_type` that has these substitutions; synonymous ones change nothing.

    Args:
        wild_type: uint8 [L], residue tokens, of which the first is at position `offset` + 1.
        offset: what the numbering of the substitutions is ahead of 1, 2, 3, ….
        name: what an error calls the wild type.

    Raises:
        DataError: if a position is not in the wild type, or has another residue there.
    """
    changed: dict[int, int] = {}
    for substitution in substitutions:
        index = substitution.position - 1 - offset
        if not 0 <= index < len(wild_type):
            raise DataError(
                f"{substitution}: {name!r} has the positions {1 + offset} to "
                f"{len(wild_type) + offset}"
            )
        found = decode(wild_type[index : index + 1])
        if found != substitution.wild_type:
            raise DataError(
                f"{substitution}: {name!r} has {found} at position {substitution.position}, not "
                f"{substitution.wild_type}"
            )
        if substitution.mutant != substitution.wild_type:
            changed[index] = int(encode(substitution.mutant)[0])
    positions = tuple(sorted(changed))
    return Variant(positions, tuple(changed[position] for position in positions))


def fitting_offset(
    substitutions: Iterable[Substitution], wild_type: NDArray[np.uint8]
) -> int | None:
    """The offset nearest to 0 at which all `substitutions` agree with `wild_type` (see `place`).

    None where there is none, or the positions are too few to tell it from chance.
    """
    expected = {(one.position, one.wild_type) for one in substitutions}
    positions = np.array([position for position, _ in expected])
    if len(set(positions.tolist())) < _MIN_POSITIONS:
        return None
    residues = encode("".join(letter for _, letter in expected))
    offsets = range(int(positions.max()) - len(wild_type), int(positions.min()))
    for offset in sorted(offsets, key=abs):
        if np.array_equal(wild_type[positions - 1 - offset], residues):
            return offset
    return None


def place_variants(
    texts: Iterable[str],
    wild_type: NDArray[np.uint8],
    *,
    offset: int = 0,
    name: str = "the wild type",
    places: Sequence[str] | None = None,
) -> list[Variant]:
    """The variants of a wild type, from text; see `parse_variant` and `place`.

    Args:
        wild_type: uint8 [L], residue tokens.
        places: N prefixes of a message.

    Raises:
        DataError: for a malformed variant, or one that does not fit the wild type, with the
            offset that fits all of them.
    """
    parsed: list[list[Substitution]] = []
    variants: list[Variant] = []
    hint = ""
    try:
        for text in texts:
            parsed.append(parse_variant(text))
        fitting = fitting_offset(chain.from_iterable(parsed), wild_type)
        hint = f"; all its variants fit with mutation_offset={fitting}"
        if fitting is None:
            hint = "; check the sequence and the numbering, which mutation_offset shifts"
        for substitutions in parsed:
            variants.append(place(substitutions, wild_type, offset=offset, name=name))
    except DataError as error:
        failed = len(variants) if hint else len(parsed)
        raise DataError(f"{places[failed] if places else ''}{error}{hint}") from None
    return variants


def read_variants(path: Path) -> VariantTable:
    """Read a CSV or TSV file of variants, plain or compressed; `-` is standard input.

    Raises:
        DataError: it is missing, damaged, empty, lacks the variants, is scored already, or has a
            row with too many or too few cells.
    """
    with open_input(path) as source:
        start = source.content.peek(_HEADER_BYTES)[:_HEADER_BYTES].decode("utf-8-sig", "replace")
        header = next(iter(start.lstrip().splitlines()), "")
        # A header without a comma has one column, whose variants may hold commas: A24G,L30P.
        delimiter = max("\t;,", key=header.count)
        text = io.TextIOWrapper(source.content, "utf-8-sig", "surrogateescape", newline="")
        options = {"header": None, "dtype": object, "keep_default_na": False}
        try:  # the engine in Python tells a missing cell from an empty one
            cells = pd.read_csv(text, sep=delimiter, engine="python", **options)
        except pd.errors.EmptyDataError:
            raise DataError(f"{path}: is empty; give a table with a header") from None
        except pd.errors.ParserError as error:
            raise DataError(
                f"{path}: not a readable CSV file ({error}); quote cells that hold a "
                f"{delimiter!r} or a quote"
            ) from None
    short = cells.isna().any(axis=1)
    if short.any():
        raise DataError(f"{path}, row {short.idxmax()}: has fewer cells than the header")
    cells = cells[1:].set_axis(cells.iloc[0].tolist(), axis=1).reset_index(drop=True)
    table = VariantTable(path, cells, delimiter if delimiter in header else ",")
    if cells.empty:
        raise DataError(f"{path}: has no rows; give at least one variant")
    for column in SCORE_COLUMNS:
        if table.column(column) is not None:
            raise DataError(f"{path}: has a column {column} already; rename or remove it")
    if table.column(*VARIANT_COLUMNS) is None:
        near = next((name for name in cells.columns if nearest(name, VARIANT_COLUMNS)), None)
        known = ", ".join(map(repr, cells.columns))
        raise DataError(
            f"{path}: has no column of variants; name it {' or '.join(VARIANT_COLUMNS)} "
            f"({f'did you mean {near!r}?' if near else f'it has: {known}'})"
        )
    return table
