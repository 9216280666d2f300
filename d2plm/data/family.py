"""Families of proteins given to a model as relatives: one file for all proteins, or a table.

A row of a table is a relative of a protein, as tab-separated text. Names are single words, so no
cell is quoted.
"""

import logging
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, require_number
from d2plm.core.files import shipped, written_beside
from d2plm.core.number_text import counted
from d2plm.core.terminal import first_few
from d2plm.core.vocabulary import PROTEIN, Tokens, decode, is_canonical
from d2plm.data.alignment_files import alignment_columns
from d2plm.data.compressed import open_input
from d2plm.data.fasta import tokenised
from d2plm.data.records import places_by_name, require_distinct
from d2plm.data.relatives import LONGEST_RELATIVE, aligned_part
from d2plm.data.retrieval import Relative
from d2plm.data.sources import read_sequences, read_sources
from d2plm.data.tables import open_table
from d2plm.settings.data import Reading

OF_ONE, SEQUENCE = "protein", "sequence"  # required columns
TABLE_COLUMNS = (OF_ONE, "relative", "identity", "coverage", SEQUENCE)
OF_RELATIVES = (OF_ONE, "relative", "query", "qseq")  # such column names occur only in tables
WITH_FIELDS = frozenset((".parquet", ".arrow", ".jsonl", ".ndjson", ".json"))

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """Members of a family, some of which are drawn for each protein as its relatives.

    Attributes:
        members: uint8 residue tokens, distinct.
        most: maximum number of members drawn per protein.
        columns: uint8 [N, W], the members in the columns of their file, see `alignment_columns`.
    """

    members: Sequence[Tokens]
    most: int
    names: Sequence[str] = ()
    columns: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        require_number("max_relatives", self.most, integer=True, low=1)

    @classmethod
    def of(
        cls,
        sequences: Sequence[Tokens],
        most: int,
        names: Sequence[str] = (),
        columns: NDArray[np.uint8] | None = None,
    ) -> "Family":
        """The distinct `sequences` with at least one canonical residue; `DataError` without any.

        Empty `names` stand for the indices of the sequences; for `columns` see `Family`.
        """
        names = names or [str(number) for number in range(len(sequences))]
        distinct: dict[bytes, int] = {}
        for number, one in enumerate(sequences):
            if is_canonical(one).any():
                distinct.setdefault(one.tobytes(), number)
        if not distinct:
            raise DataError("there are no relatives: give at least one protein")
        return cls(sequences, most, names, columns).only([*distinct.values()])

    def some(self, number: int, named: Collection[str] = ()) -> NDArray[np.int64]:
        """int64: indices of the named members and of up to `number` fixed random ones."""
        drawn = np.random.default_rng(0).permutation(len(self.members))[:number]
        wanted = [place for place, name in enumerate(self.names) if name in named]
        return np.unique(np.concatenate([drawn, np.array(wanted, dtype=np.int64)]))

    def given_to(self, protein: Tokens) -> "Family":
        """The family without the protein itself, proteins that contain it, and parts of it."""
        own = protein.tobytes()
        kept = [own not in one and one not in own for one in self._texts]
        return self if all(kept) else self.only(np.flatnonzero(kept))

    def giving_away(self, protein: Tokens) -> list[str]:
        """Names of the members excluded by `given_to`, except the protein itself."""
        own, named = protein.tobytes(), zip(self.names, self._texts, strict=True)
        return [name for name, one in named if one != own and (own in one or one in own)]

    def draw(self, *key: int, protein: Tokens) -> list[Tokens]:
        """`most` random members (determined by `key`), or all members if there are no more.

        Long members are cut to the part that aligns with `protein`.
        """
        drawn, count = self.members, len(self.members)
        if count > self.most:
            random = np.random.default_rng(key)
            drawn = [drawn[i] for i in np.sort(random.choice(count, self.most, replace=False))]
        return [aligned_part(one, protein) for one in drawn]

    @cached_property
    def _texts(self) -> list[bytes]:
        return [one.tobytes() for one in self.members]

    def only(self, which: Sequence[int] | NDArray[np.int64]) -> "Family":
        """The family restricted to these members."""
        names = [self.names[i] for i in which] if self.names else []
        columns = None if self.columns is None else self.columns[which]
        return Family([self.members[i] for i in which], self.most, names, columns)


class RelativesCheck:
    """Collects notices about the relatives of several proteins.

    `relatives` and `proteins` are the names of their files, for messages.
    """

    def __init__(self, relatives: str | Path, proteins: str | Path) -> None:
        self.relatives, self.proteins, self.number = relatives, proteins, 0
        self.alone, self.left_out = list[str](), list[str]()

    def add(self, name: str, family: Family, protein: Tokens) -> Family:
        """The members of its family that may be given to the protein."""
        given = family.given_to(protein)
        self.number += 1
        if not given.members:
            self.alone.append(name)
        if len(given.members) < len(family.members):
            self.left_out += [f"{one} (of {name})" for one in family.giving_away(protein)]
        return given

    def report(self) -> None:
        """Log excluded relatives and proteins without any; `DataError` if all proteins lack any."""
        if self.left_out:
            log.warning(
                "%s: left out %s that would give its protein away, as it contains it or is a part "
                "of it: %s",
                self.relatives,
                counted(len(self.left_out), "relative"),
                first_few(self.left_out),
            )
        if self.number and len(self.alone) == self.number:
            raise DataError(
                f"{self.relatives}: contains no relatives of any protein in {self.proteins} except "
                "the protein itself, what contains it or is a part of it; check the names, add "
                "relatives, or omit relatives="
            )
        if self.alone:
            shown, ratio = first_few(self.alone), f"{len(self.alone)} of {self.number} proteins"
            log.info("%s are scored without relatives: %s", ratio, shown)


def write_relatives(path: Path, names: Sequence[str], found: Sequence[Sequence[Relative]]) -> None:
    """Write a table of the relatives `found` for each of the proteins `names`.

    Raises `DataError` if the file cannot be written.
    """
    with written_beside(path) as partial, partial.open("w", encoding="utf-8") as file:
        print(*TABLE_COLUMNS, sep="\t", file=file)
        for protein, relatives in zip(names, found, strict=True):
            for one in relatives:
                name = "_".join(one.name.split())  # names from tables may contain blanks
                figures = f"{one.identity:.3f}", f"{one.coverage:.3f}"
                print(protein, name, *figures, decode(one.tokens), sep="\t", file=file)


def read_relatives(path: Path) -> dict[str, list[Tokens]] | None:
    """Name of each protein in a table → its relatives, uint8 residue tokens; None for other files.

    Only the columns of names and sequences are needed, in any position. Raises `DataError` if the
    file is a table of relatives with other column names, has no rows, or a cell is not a protein.
    """
    columns: dict[str, str] = {}
    with suppress(DataError), open_table(path) as table:
        columns = {column.lower(): column for column in table.columns}
    is_csv = {OF_ONE, SEQUENCE} <= {*columns}
    if not is_csv and len(columns) > 1 and any(one.startswith(OF_RELATIVES) for one in columns):
        raise DataError(
            f"{path}: has the columns {', '.join(columns.values())}; a table of relatives needs "
            f"{OF_ONE}, the name of a protein, and {SEQUENCE}, that of a relative"
        )
    if not is_csv and WITH_FIELDS.isdisjoint(path.suffixes):
        return None
    reading = Reading(
        format="csv" if is_csv else "auto",
        name_field=columns.get(OF_ONE, OF_ONE),
        sequence_field=columns.get(SEQUENCE, SEQUENCE),
    )
    found: dict[str, list[Tokens]] = {}
    try:
        for record in tokenised(read_sources([path], reading), PROTEIN):
            found.setdefault(record.name, []).append(record.tokens)
    except DataError:
        if is_csv:
            raise
        return None  # without these fields
    if unnamed := found.pop("", []):
        log.info("%s: left out %s without a protein", path, counted(len(unnamed), "row"))
    if not found:
        raise DataError(f"{path}: has no rows; give at least one relative")
    return found


def read_families(path: Path, most: int, names: Sequence[str], source: str | Path) -> list[Family]:
    """The family of each protein of `source`: the same for all, or its own from a table.

    A protein that is not in a table of relatives has a family without members. Raises `DataError`
    if the file cannot be read, is neither, or holds no protein; or a name in a table is ambiguous.

    Args:
        path: a table of relatives, or an input of `read_family`.
        most: see `Family`.
        names: names of the proteins, by which a table refers to them.
    """
    path, table = shipped(path), None
    if path.is_file():  # a pipe can be read only once, so it is no table
        with open_input(path) as file:
            is_fasta = file.content.peek(64)[:64].removeprefix(BOM_UTF8).lstrip().startswith(b">")
        table = None if is_fasta else read_relatives(path)
    if table is None:
        return [read_family(path, most)] * len(names)
    require_distinct(names, source)
    place_of, own = places_by_name(names, source), dict[int, list[Tokens]]()
    others = list[str]()
    for name, relatives in table.items():
        if (place := place_of(name)) is None:
            others.append(name)
        else:
            own.setdefault(place, []).extend(relatives)
    if others:
        number = f"{len(others):,} of its {counted(len(table), 'protein')}"
        log.info("%s: %s not in %s, left out: %s", path, number, source, first_few(others))
    families = [Family([], most)] * len(names)
    for place, relatives in own.items():
        if usable := [one for one in relatives if is_canonical(one).any()]:
            families[place] = Family.of(usable, most)
    _report_long(path, (one for family in families for one in family.members))
    return families


def read_family(path: Path, most: int) -> Family:
    """The family in any input of `read_sequences`; arguments as in `Family`.

    Raises `DataError` if the input cannot be read, or holds no protein.
    """
    records = [*read_sequences(path, PROTEIN)]
    names, members = [record.name for record in records], [record.tokens for record in records]
    try:
        columns = alignment_columns([record.text for record in records], members)
        family = Family.of(members, most, names, columns)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    _report_long(path, family.members)
    return family


def _report_long(path: Path, members: Iterable[Tokens]) -> None:
    lengths = [len(one) for one in members if len(one) > LONGEST_RELATIVE]
    if lengths:
        log.info(
            "%s: %s more than %s residues (up to %s); only the part that aligns with a protein is "
            "given, or the beginning if none does",
            path,
            "1 relative has" if len(lengths) == 1 else f"{len(lengths):,} relatives have",
            f"{LONGEST_RELATIVE:,}",
            f"{max(lengths):,}",
        )
