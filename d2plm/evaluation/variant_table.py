"""A table of variants with measured effects: its columns, and its rows by protein.

Columns are recognised by name and content; rows that cannot be scored are left out and counted.
Cells stay text, so the output equals the input with added columns of scores.
"""

import csv
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, did_you_mean
from d2plm.core.number_text import counted
from d2plm.core.terminal import first_few
from d2plm.core.vocabulary import CANONICAL, PROTEIN, Tokens, decode
from d2plm.data.fasta import FastaRecord
from d2plm.data.records import places_by_name
from d2plm.data.tables import ambiguous, is_missing, number, open_table, plain, usual_columns
from d2plm.families.variants import (
    DISAGREES,
    MALFORMED,
    MOST_MISTAKEN,
    UNKNOWN,
    Variant,
    VariantError,
    label_of,
    parse_variant,
    place_variants,
    residue_letter,
)

# Usual names of columns in order of preference, in lower case with underscores.
VARIANT_COLUMNS = (
    *("mutant", "mutants", "mutation", "mutations", "variant", "variants", "hgvs_pro", "hgvs_p"),
    *("hgvsp", "hgvs", "aa_change", "aa_changes", "aa_mutation", "aa_mutations", "aa_substitution"),
    *("aa_substitutions", "substitution", "substitutions", "amino_acid_change", "protein_change"),
)
SEQUENCE_COLUMNS = ("mutated_sequence", "mutant_sequence", "mutated_seq", "mutant_seq", "mut_seq")
MEASURED_COLUMNS = (
    *("dms_score", "score", "fitness", "log_fitness", "fitness_score", "functional_score"),
    *("enrichment", "log_enrichment", "log2_enrichment", "enrichment_score", "activity", "effect"),
    *("measured", "measurement", "value", "growth", "growth_rate", "abundance", "ddg", "dg"),
)
NAME_COLUMNS = (
    *("name", "protein", "protein_name", "protein_id", "wt_name", "target", "target_name"),
    *("accession", "uniprot", "uniprot_id", "entry", "gene", "gene_name"),
)
OF_PROTEINS = NAME_COLUMNS[:4]  # these contain only names of proteins or variants
LETTER_COLUMNS = (  # for variants written in three columns
    ("wildtype", "wild_type", "wt", "wt_aa", "aa_wt", "wildtype_aa", "ref", "aa_ref"),
    ("position", "pos", "site", "resi", "residue_number", "aa_pos"),
    ("mutant", "mutation", "mut", "mut_aa", "aa_mut", "mutant_aa", "alt", "aa_alt"),
)
# Output: with relatives the score of their alignment and its terms, and the model's scores.
SCORE_COLUMN, MODEL_COLUMN, ALONE_COLUMN = (
    "d2plm_score",
    "d2plm_model_score",
    "d2plm_model_alone_score",
)
TERM_COLUMNS = {
    "profile": "d2plm_profile_score",
    "pairs": "d2plm_pairs_score",
    "blosum62": "d2plm_blosum62_score",
}
SCORE_COLUMNS = (SCORE_COLUMN, *TERM_COLUMNS.values(), MODEL_COLUMN, ALONE_COLUMN)
# Further reasons for leaving out a row; only the last is a mistake.
OTHER_PROTEIN, NO_VARIANT = "of another protein", "without a variant"
OTHER_SEQUENCE = "with another sequence"

_EXAMINED = 200  # number of rows used to recognise a column
_MATRIX = 15  # number of columns or rows named after residues
_MISTAKES = (MALFORMED, DISAGREES, OTHER_SEQUENCE)
_SEQUENCE = re.compile(rf"[{CANONICAL}XBUZO*-]{{10,}}")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placed:
    """The N rows of a table with variants of one protein that can be scored.

    Attributes:
        rows: int64 [N].
        variants: N variants; placeholders if there are `sequences`.
        sequences: N whole sequences, if some differ in length from the wild type.
        offset: offset of the numbering, see `place_variants`.
    """

    rows: NDArray[np.int64]
    variants: list[Variant]
    sequences: list[Tokens] | None = None
    offset: int | None = None


@dataclass(frozen=True)
class VariantTable:
    """A table of variants, see `read_variants`.

    Attributes:
        lines: line numbers of the rows in the file.
        texts: the variants, or whole sequences if `whole`.
        sequences: the column of whole sequences that accompanies the variants, if any.
        left_out: reason → (line, fault) of each row that cannot be scored.
    """

    path: Path
    columns: list[str]
    delimiter: str
    lines: list[int]
    cells: list[list[str]]
    texts: list[str]
    whole: bool
    source: str
    sequences: str | None
    left_out: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def column(self, name: str) -> list[str]:
        place = self.columns.index(name)
        return [cells[place] for cells in self.cells]

    def measured(self, wanted: str | None = None) -> tuple[str, NDArray[np.float64]] | None:
        """Name and values of the column of measured effects, NaN for missing ones.

        Args:
            wanted: name of the column; None: the first of MEASURED_COLUMNS that holds numbers.

        Raises:
            DataError: if a cell is not a number, or there is no such column.
        """
        for name in usual_columns(self.path, self.columns, MEASURED_COLUMNS, wanted, "measured="):
            values, wrong, cells = np.full(len(self.cells), np.nan), list[str](), self.column(name)
            for row, cell in enumerate(cells):
                try:
                    values[row] = number(cell, self.delimiter)
                except DataError as error:
                    wrong.append(f"{self._where(row)}: {name} {error}")
            of_words = not wanted and plain(name) != MEASURED_COLUMNS[0]  # values such as high, low
            if wrong and not (of_words and not any(map(str.isdigit, "".join(cells)))):
                raise DataError(wrong[0])
            if not wrong and (unclear := ambiguous(cells)):
                raise DataError(
                    f"{self._where(unclear[0])}: {name} {unclear[1]} Write decimals with a point, "
                    "without thousands separators"
                )
            if not wrong:
                return name, values
            log.info("%s, so it is not taken", wrong[0].partition(";")[0])
        return None

    def rows_by_protein(
        self, proteins: Sequence[FastaRecord], source: str, wanted: str | None = None
    ) -> dict[int, list[int]]:
        """Index of each wild type → the rows with its variants; other rows are left out.

        Args:
            source: file of the proteins, for messages.
            wanted: column of protein names; None: the first of NAME_COLUMNS that contains any, not
                needed for a single wild type.

        Raises:
            DataError: if no row belongs to a wild type, or its wild type is unclear.
        """
        names, column = [record.name for record in proteins], None
        place_of = places_by_name(names, source)
        candidates = usual_columns(self.path, self.columns, NAME_COLUMNS, wanted, "name=")
        for name in candidates:
            if any(place_of(one) is not None for one in {*map(str.strip, self.column(name))}):
                column = name
                break
            known = [cell for cell in self.column(name) if not is_missing(cell)]
            of_proteins = plain(name) in OF_PROTEINS and 2 * len({*known}) <= len(known)
            if known and (wanted or len(proteins) > 1 or of_proteins):
                raise DataError(
                    f"{self.path}: {source} has no record {known[0]!r} (column {name})"
                    f"{did_you_mean(known[0], names)}; use one of its names, or set name= to the "
                    "column with them"
                )
        if column is None and len(proteins) > 1:
            raise DataError(
                f"{self.path}: {source} has {len(proteins)} proteins; add a column name with the "
                "record that each variant changes, or set name="
            )
        if column is None:
            return {0: [*range(len(self.cells))]}
        rows_of: dict[int, list[int]] = {}
        for row, cell in enumerate(map(str.strip, self.column(column))):
            place = 0 if len(proteins) == 1 and is_missing(cell) else place_of(cell)
            if place is None:
                self._leave_out(row, OTHER_PROTEIN, repr(cell))
            else:
                rows_of.setdefault(place, []).append(row)
        return rows_of

    def place(
        self,
        proteins: Sequence[FastaRecord],
        rows_of: Mapping[int, list[int]],
        offset: int | Literal["auto"],
        strict: bool,
    ) -> dict[int, Placed]:
        """Index of each wild type → its variants; `rows_of` is from `rows_by_protein`.

        Args:
            strict: whether a variant that cannot be scored is an error.

        Raises:
            ConfigError: if the numbering is unclear.
            DataError: if no variant is left, more than MOST_MISTAKEN of a protein's are wrong, or
                one cannot be scored and `strict` is set.
        """
        label, placed = label_of(self.texts), dict[int, Placed]()
        for protein, given in rows_of.items():
            record, rows = proteins[protein], list[int]()
            for row in given:
                if is_missing(self.texts[row]):
                    self._leave_out(row, NO_VARIANT, repr(self.texts[row]))
                else:
                    rows.append(row)
            if self.whole:
                placed[protein] = self._whole(rows, record.tokens, strict)
                continue
            texts = [self.texts[row] for row in rows]
            found, used = place_variants(
                texts, record.tokens, offset=offset, name=record.name, label=label
            )
            if self.sequences:
                found = self._compared(rows, found, record.tokens)
            kept = self._kept(rows, found, record.name, strict)
            numbers, variants = np.array([*kept], np.int64), [*kept.values()]
            placed[protein] = Placed(numbers, variants, offset=used)
        if not any(len(one.rows) for one in placed.values()):
            raise DataError(f"{self.path}: has no variant to score: {self._left_out()}")
        return {protein: one for protein, one in placed.items() if len(one.rows)}

    def _kept(
        self, rows: list[int], found: list[Variant | VariantError], name: str, strict: bool
    ) -> dict[int, Variant]:
        """Row → variant of those that can be scored; the others are left out or raise DataError."""
        failed = {r: e for r, e in zip(rows, found, strict=True) if isinstance(e, VariantError)}
        mistakes = [row for row, error in failed.items() if error.reason in _MISTAKES]
        if failed and (strict or len(mistakes) > MOST_MISTAKEN * len(rows)):
            row = next(iter(failed if strict else mistakes))
            hint = f" ({len(mistakes):,} of {len(rows):,} variants of {name!r})" * (not strict)
            if failed[row].reason == DISAGREES:
                hint += "; check the sequence and the numbering, which mutation_offset shifts"
            raise DataError(f"{self._where(row)}: {failed[row]}{hint}")
        for row, error in failed.items():
            self._leave_out(row, error.reason, self.texts[row])
        return {r: one for r, one in zip(rows, found, strict=True) if isinstance(one, Variant)}

    def write(self, file: Path | TextIO, scores: Mapping[str, NDArray[np.float64]]) -> None:
        """Write the table with the scores [N] as its last columns, empty for NaN."""
        if isinstance(file, Path):
            with file.open("w", encoding="utf-8", newline="") as stream:
                return self.write(stream, scores)
        writer = csv.writer(file, delimiter=self.delimiter, lineterminator="\n")
        writer.writerow([*self.columns, *scores])
        for cells, *values in zip(self.cells, *scores.values(), strict=True):
            writer.writerow([*cells, *("" if np.isnan(one) else f"{one:.6f}" for one in values)])
        return None

    def _whole(self, rows: list[int], wild_type: Tokens, strict: bool) -> Placed:
        """Whole sequences; if all have the wild type's length, as variants by substitution."""
        kept, sequences, mistakes = [], list[Tokens](), list[DataError]()
        for row in rows:
            text, where, reason = self.texts[row].strip(), self._where(row), MALFORMED
            try:
                tokens = PROTEIN.encode(text, where, aligned=True)
                if not PROTEIN.is_predicted(tokens).all():
                    reason = UNKNOWN
                    raise DataError(f"{where}: has a residue such as X, which has no probability")
                sequences.append(tokens)
                kept.append(row)
            except DataError as error:
                if strict:
                    raise
                mistakes += [error] * (reason in _MISTAKES)
                self._leave_out(row, reason, str(error).removeprefix(where).lstrip(": "))
        if len(mistakes) > MOST_MISTAKEN * len(rows):
            raise mistakes[0]
        same = [one == wild_type for one in sequences if len(one) == len(wild_type)]
        # The bound also scores shifted sequences, and residues for an unknown one.
        is_known = all(PROTEIN.is_predicted(wild_type[~one]).all() for one in same)
        if len(same) < len(sequences) or not is_known or any(2 * x.sum() < len(x) for x in same):
            return Placed(np.array(kept, int), [Variant((r,), (0,)) for r in kept], sequences)
        positions = [np.flatnonzero(one != wild_type).tolist() for one in sequences]
        variants = [
            Variant(tuple(own), tuple(one[own].tolist()))
            for own, one in zip(positions, sequences, strict=True)
        ]
        return Placed(np.array(kept, int), variants)

    def _compared(
        self, rows: list[int], found: list[Variant | VariantError], wild_type: Tokens
    ) -> list[Variant | VariantError]:
        """`found`, with an error for each variant that contradicts the whole sequence beside it."""
        assert self.sequences is not None
        compared, written = list[Variant | VariantError](), self.column(self.sequences)
        for row, one in zip(rows, found, strict=True):
            sequence = written[row].strip().upper()
            if isinstance(one, Variant) and not is_missing(sequence):
                changed = wild_type.copy()
                changed[list(one.positions)] = one.mutants
                if decode(changed) not in sequence:  # the wild type may be a part of it
                    fault = f"{self.texts[row]!r} contradicts its {self.sequences}"
                    one = VariantError(fault, OTHER_SEQUENCE)
            compared.append(one)
        return compared

    def report(self, placed: Mapping[int, Placed], names: Sequence[str], measured: str) -> None:
        """Log what was found and left out; `measured` is the column of measured effects, or ""."""
        parts = [
            f"{self.path}: {counted(sum(len(one.rows) for one in placed.values()), 'variant')}"
        ]
        parts[0] += f" {self.source}"
        parts += [f"measured in {measured!r}"] * bool(measured)
        by_bound = any(one.sequences is not None for one in placed.values())
        parts += ["compared by the bound per residue"] * by_bound
        offsets = {names[place]: one.offset for place, one in placed.items()}
        if len({*offsets.values()} - {None}) > 1:
            parts += [f"offset of {name} {offset}" for name, offset in offsets.items()]
        else:
            parts += [f"offset {offset}" for offset in {*offsets.values()} - {None}]
        if not measured:
            log.info(
                "%s: no column of measurements found, so there is no correlation; set measured= to "
                "one of the columns: %s",
                self.path,
                ", ".join(self.columns),
            )
        log.info("%s", ", ".join([*parts, *filter(None, [self._left_out()])]))

    def _left_out(self) -> str:
        reasons = [
            f"{len(rows):,} {reason} ({first_few([f'line {line}: {what}' for line, what in rows])})"
            for reason, rows in self.left_out.items()
        ]
        total = counted(sum(map(len, self.left_out.values())), "row")
        return f"{total} left out: {', '.join(reasons)}" if reasons else ""

    def _leave_out(self, row: int, reason: str, what: str) -> None:
        self.left_out.setdefault(reason, []).append((self.lines[row], what))

    def _where(self, row: int) -> str:
        return f"{self.path}, line {self.lines[row]}"


def read_variants(path: Path, wanted: str | None = None) -> VariantTable:
    """Read a table of variants, plain or compressed, of any dialect; `-` is standard input.

    Args:
        wanted: the column of variants; None: a usual name with variants, else any column with
            variants, else whole sequences.

    Raises:
        DataError: if the file is missing, damaged, empty, without variants or already scored, or a
            row has too many or too few cells.
    """
    with open_table(path) as table:
        columns, delimiter, rows = table.columns, table.delimiter, list(table.rows())
    lines, cells = [line for line, _ in rows], [row for _, row in rows]
    for column in SCORE_COLUMNS:
        if column in columns:
            raise DataError(f"{path}: has a column {column} already; rename or remove it")
    for place, name in enumerate(columns):
        if _is_variant(name, [name, *(row[place] for row in cells[:_EXAMINED])]):
            raise DataError(
                f"{path}: has no header row, for it begins with {name[:20]!r}; add one, such as "
                "mutant,DMS_score"
            )
    if not cells:
        raise DataError(f"{path}: has no rows; give at least one variant")
    named = usual_columns(path, columns, VARIANT_COLUMNS, wanted, "variant=")
    examined = {name: [row[i] for row in cells[:_EXAMINED]] for i, name in enumerate(columns)}
    _refuse_matrix(path, columns, cells)
    whole_columns = [*named, *usual_columns(path, columns, (*SEQUENCE_COLUMNS, "sequence"))]
    others = [] if wanted else columns
    written = next((one for one in [*named, *others] if _are_variants(examined[one])), None)
    whole = next((one for one in whole_columns if _are_sequences(examined[one], plain(one))), None)
    apart = [usual_columns(path, columns, usual) for usual in LETTER_COLUMNS]
    made = (path, columns, delimiter, lines, cells)
    if written is None and whole is not None:
        texts = [row[columns.index(whole)] for row in cells]
        return VariantTable(*made, texts, True, f"in column {whole!r} (whole sequences)", None)
    if written is None and not wanted and all(apart):
        three = [one[0] for one in apart]
        places = [columns.index(one) for one in three]
        texts = [_joined(*(row[place].strip() for place in places)) for row in cells]
        return VariantTable(*made, texts, False, f"in columns {', '.join(three)}", None)
    chosen = written or next(iter(named), None)
    first = cells[0][columns.index(chosen)] if chosen else ",".join(cells[0])
    if any(plain(w) in (*VARIANT_COLUMNS, *SEQUENCE_COLUMNS) for w in re.split("[\t;,]", first)):
        raise DataError(f"{path}: line {lines[0]} looks like the header; remove what is above it")
    if chosen is None:
        raise DataError(
            f"{path}: has no column of variants such as A24G; name it mutant, or set variant= to "
            f"it (it has: {', '.join(map(repr, columns))})"
        )
    usual_columns(path, columns, (), chosen)  # rejects duplicate columns
    beside = next((c for c in usual_columns(path, columns, SEQUENCE_COLUMNS) if c != chosen), None)
    texts = [row[columns.index(chosen)] for row in cells]
    return VariantTable(*made, texts, False, f"in column {chosen!r}", beside)


def _is_variant(name: str, column: Sequence[str]) -> bool:
    """Whether a column's name is itself a variant or whole sequence, like its cells."""
    try:
        return bool(_SEQUENCE.fullmatch(name) and _are_sequences(column)) or (
            _are_variants(column) and bool(parse_variant(name))
        )
    except VariantError:
        return False


def _joined(wild_type: str, position: str, mutant: str) -> str:
    """The variant written in three columns; "" if one is missing."""
    if is_missing(wild_type) or is_missing(position) or (is_missing(mutant) and mutant != "-"):
        return ""
    return wild_type + re.sub(r"[.]0+$", "", position) + mutant  # pandas writes 2.0


def _are_variants(cells: Sequence[str]) -> bool:
    known, label = [cell for cell in cells if not is_missing(cell)], label_of(cells)
    right = 0
    for cell in known:
        try:
            parse_variant(cell, label)
        except VariantError as error:
            right -= error.reason == MALFORMED
        right += 1
    return bool(known) and 2 * right >= len(known)


def _are_sequences(cells: Sequence[str], name: str = "") -> bool:
    """Whether a column holds whole sequences: 90 % long ones, or half of any length if so named."""
    known = [cell.strip().upper() for cell in cells if not is_missing(cell)]
    if name in SEQUENCE_COLUMNS:
        return 2 * sum(map(str.isalpha, known)) > len(known)
    return bool(known) and sum(map(bool, map(_SEQUENCE.fullmatch, known))) > 0.9 * len(known)


def _refuse_matrix(path: Path, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    residues = [{*map(residue_letter, columns)}]
    if len(cells) < 2 * len(CANONICAL):  # otherwise it may be a column of residues beside positions
        residues.append({residue_letter(row[0]) for row in cells})
    if any(len(one & {*CANONICAL}) >= _MATRIX for one in residues):
        raise DataError(
            f"{path}: is a matrix of positions × residues; write one row for each variant, with "
            "the columns mutant (A24G) and DMS_score, as pandas.melt does"
        )
