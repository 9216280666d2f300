"""A family of proteins, given as relatives to a model that takes them."""

import logging
from codecs import BOM_UTF8
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, require_number
from d2plm.core.files import shipped
from d2plm.core.number_text import counted
from d2plm.core.terminal import first_few
from d2plm.core.vocabulary import PROTEIN, Tokens, is_canonical
from d2plm.data.compressed import open_input
from d2plm.data.records import places_by_name, require_distinct
from d2plm.data.relatives import LONGEST_RELATIVE, aligned_part
from d2plm.data.relatives_table import read_relatives
from d2plm.data.sources import read_sequences

HOLD_OUT_FROM = 10  # members; a smaller family is given whole

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """Members of a family, some of which are drawn for each protein as its relatives.

    Attributes:
        members: uint8 residue tokens, distinct.
        most: maximum number of relatives drawn per protein.
    """

    members: Sequence[Tokens]
    most: int
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        require_number("max_relatives", self.most, integer=True, low=1)

    @classmethod
    def of(cls, sequences: Sequence[Tokens], most: int, names: Sequence[str] = ()) -> "Family":
        """The distinct `sequences` with at least one canonical residue.

        Args:
            names: names of the sequences; their numbers if empty.

        Raises:
            DataError: if no sequence is left.
        """
        names = names or [str(number) for number in range(len(sequences))]
        distinct: dict[bytes, tuple[str, Tokens]] = {}
        for name, one in zip(names, sequences, strict=True):
            if is_canonical(one).any():
                distinct.setdefault(one.tobytes(), (name, one))
        if not distinct:
            raise DataError("there are no relatives: give at least one protein")
        kept = distinct.values()
        return cls([one for _, one in kept], most, [name for name, _ in kept])

    def hold_out(self, share: float, seed: int) -> tuple["Family", "Family"]:
        """The family without a random `share` of its members, and those members.

        Nothing is held out of a family of fewer than HOLD_OUT_FROM members.

        Raises:
            ConfigError: unless 0 ≤ share < 1.
        """
        require_number("held_out_members", share, low=0, high=1, high_open=True)
        count = len(self.members)
        number = min(round(share * count), count - 1) if count >= HOLD_OUT_FROM else 0
        drawn = np.random.default_rng(seed).permutation(count)
        return self._only(np.sort(drawn[number:])), self._only(np.sort(drawn[:number]))

    def given_to(self, protein: Tokens) -> "Family":
        """The family without the protein and without members that contain it or lie in it."""
        own = protein.tobytes()
        kept = [own not in one and one not in own for one in self._texts]
        return self if all(kept) else self._only(np.flatnonzero(kept))

    def giving_away(self, protein: Tokens) -> list[str]:
        """Names of the members, but for the protein itself, that are not `given_to` it."""
        own, named = protein.tobytes(), zip(self.names, self._texts, strict=True)
        return [name for name, one in named if one != own and (own in one or one in own)]

    def draw(self, *key: int, protein: Tokens) -> list[Tokens]:
        """`most` random members, or all members if there are no more.

        Args:
            key: integers that determine the draw.
            protein: protein they are drawn for; long members are cut to the part aligned with it.
        """
        drawn, count = self.members, len(self.members)
        if count > self.most:
            random = np.random.default_rng(key)
            drawn = [drawn[i] for i in np.sort(random.choice(count, self.most, replace=False))]
        return [aligned_part(one, protein) for one in drawn]

    def draw_for_designs(self, templates: Sequence[Tokens], seed: int) -> list[list[Tokens]]:
        """The result of `draw` for each of the templates of designs."""
        return [self.draw(seed, index, protein=one) for index, one in enumerate(templates)]

    @cached_property
    def _texts(self) -> list[bytes]:
        return [one.tobytes() for one in self.members]

    def _only(self, which: NDArray[np.int64]) -> "Family":
        names = [self.names[i] for i in which] if self.names else []
        return Family([self.members[i] for i in which], self.most, names)


class RelativesCheck:
    """Collects messages about the relatives of proteins, one protein at a time.

    Args:
        relatives, proteins: their files, for messages.
    """

    def __init__(self, relatives: str | Path, proteins: str | Path) -> None:
        self.relatives, self.proteins, self.number = relatives, proteins, 0
        self.alone, self.left_out = list[str](), list[str]()

    def add(self, name: str, family: Family, protein: Tokens) -> Family:
        """The members of its family that are given to the protein."""
        given = family.given_to(protein)
        self.number += 1
        if not given.members:
            self.alone.append(name)
        if len(given.members) < len(family.members):
            self.left_out += [f"{one} (of {name})" for one in family.giving_away(protein)]
        return given

    def report(self) -> None:
        """Log which members are left out and which proteins have no relatives.

        Raises:
            DataError: if none has.
        """
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


def read_families(path: Path, most: int, names: Sequence[str], source: str | Path) -> list[Family]:
    """The family of each protein of `source`: the same for all, or its own from a table.

    A protein that is not in a table of relatives has a family without members.

    Args:
        path: a table of relatives, or what `read_family` reads.
        most: as in `Family`.
        names: names of the proteins, by which a table refers to them.

    Raises:
        DataError: the file cannot be read, is neither, or holds no protein; or it is a table, and
            it is not clear which of the proteins a name means.
    """
    path, table = shipped(path), None
    if path.is_file():  # what can be read only once is no table
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
    """The family in an input of any form that `read_sequences` reads; arguments as in `Family.of`.

    Raises:
        DataError: the input cannot be read, or holds no protein.
    """
    records = [*read_sequences(path, PROTEIN)]
    names = [record.name for record in records]
    try:
        family = Family.of([record.tokens for record in records], most, names)
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
