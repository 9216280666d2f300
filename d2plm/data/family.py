"""A family of proteins, given as relatives to a model that takes them."""

from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, require_number
from d2plm.core.files import shipped
from d2plm.core.vocabulary import is_canonical
from d2plm.data.compressed import open_input
from d2plm.data.fasta import read_fasta
from d2plm.data.records import places_by_name
from d2plm.data.relatives import LONGEST_RELATIVE
from d2plm.data.relatives_table import read_relatives

HOLD_OUT_FROM = 10  # members; a smaller family is given whole

Tokens = NDArray[np.uint8]


@dataclass(frozen=True)
class Family:
    """Members of a family, some of which are drawn for each protein as its relatives.

    Attributes:
        members: uint8 residue tokens, distinct.
        most: that are drawn for one protein.
    """

    members: Sequence[Tokens]
    most: int
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        require_number("max_relatives", self.most, integer=True, low=1)

    @classmethod
    def of(
        cls,
        sequences: Sequence[Tokens],
        most: int,
        longest: int = LONGEST_RELATIVE,
        names: Sequence[str] = (),
    ) -> "Family":
        """The distinct `sequences` with at least one canonical residue.

        Args:
            longest: longer sequences are cut to this number of residues.
            names: names of the sequences; their numbers if empty.

        Raises:
            DataError: if no sequence is left.
        """
        names = names or [str(number) for number in range(len(sequences))]
        distinct: dict[bytes, tuple[str, Tokens]] = {}
        for name, one in zip(names, (one[:longest] for one in sequences), strict=True):
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

    def has_others(self, protein: Tokens) -> bool:
        """Whether there is a member other than the protein itself."""
        return any(not np.array_equal(one, protein) for one in self.members)

    def gives_away(self, protein: Tokens) -> bool:
        """Whether another member contains the protein, or is a part of it."""
        own = protein.tobytes()
        others = (one.tobytes() for one in self.members)
        return any(one != own and (own in one or one in own) for one in others)

    def draw(self, *key: int, of: Tokens | None = None) -> list[Tokens]:
        """`most` random members, or all members if there are no more.

        Args:
            key: integers that determine the draw.
            of: the protein whose relatives are drawn, which is left out itself.
        """
        others = [one for one in self.members if of is None or not np.array_equal(one, of)]
        if len(others) <= self.most:
            return others
        random = np.random.default_rng(key)
        return [others[i] for i in np.sort(random.choice(len(others), self.most, replace=False))]

    def draw_for_designs(self, number: int, seed: int) -> list[list[Tokens]]:
        """The result of `draw` for each of `number` designs."""
        return [self.draw(seed, index) for index in range(number)]

    def _only(self, which: NDArray[np.int64]) -> "Family":
        names = [self.names[i] for i in which] if self.names else []
        return Family([self.members[i] for i in which], self.most, names)


def read_families(path: Path, most: int, names: Sequence[str], source: str | Path) -> list[Family]:
    """The family of each protein of `source`: the same for all from FASTA, its own from a table.

    A protein that is not in a table of relatives has a family without members.

    Args:
        most: as of `Family`.
        names: of the proteins, by which a table refers to them.

    Raises:
        DataError: the file cannot be read, is neither, or holds no protein; or it is a table, and
            two of the proteins have the same name.
    """
    start, path = b"", shipped(path)
    if path.is_file():  # an input that can be read only once is FASTA
        with open_input(path) as file:
            start = file.content.peek(64)[:64].removeprefix(BOM_UTF8).lstrip()
    if not start or start.startswith(b">"):
        family = read_family(path, most)
        return [family] * len(names)
    table, families = read_relatives(path), [Family([], most)] * len(names)
    places, own = places_by_name(names, source), dict[int, list[Tokens]]()
    places.require_distinct()
    for name, relatives in table.items():
        if name in places:
            own.setdefault(places[name], []).extend(relatives)
    for place, relatives in own.items():
        if usable := [one for one in relatives if is_canonical(one).any()]:
            families[place] = Family.of(usable, most)
    return families


def read_family(path: Path, most: int, longest: int = LONGEST_RELATIVE) -> Family:
    """The family in a FASTA file; arguments as of `Family.of`.

    Raises:
        DataError: the file cannot be read, is no FASTA, or holds no protein.
    """
    records = [*read_fasta(shipped(path))]
    names = [record.name for record in records]
    try:
        return Family.of([record.tokens for record in records], most, longest, names)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
