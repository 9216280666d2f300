"""A family of proteins, given as relatives to a model that takes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core.alphabet import is_canonical
from d2plm.core.errors import DataError, require_number
from d2plm.data.fasta import read_fasta

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

    def __post_init__(self) -> None:
        require_number("max_relatives", self.most, integer=True, low=1)

    @classmethod
    def of(cls, sequences: Sequence[Tokens], most: int, longest: int) -> "Family":
        """The distinct ones of `sequences`, those without a canonical residue left out.

        Args:
            longest: residues that longer ones are cut to.

        Raises:
            DataError: if none is left.
        """
        cut = (one[:longest] for one in sequences)
        members = {one.tobytes(): one for one in cut if is_canonical(one).any()}
        if not members:
            raise DataError("there are no relatives: give at least one protein")
        return cls([*members.values()], most)

    def draw(self, *key: int, of: Tokens | None = None) -> list[Tokens]:
        """`most` members at random, or all where there are no more.

        Args:
            key: integers; with the same ones the same members are drawn.
            of: the protein that they are to be relatives of, which is left out itself.
        """
        others = [one for one in self.members if of is None or not np.array_equal(one, of)]
        if len(others) <= self.most:
            return others
        random = np.random.default_rng(key)
        return [others[i] for i in np.sort(random.choice(len(others), self.most, replace=False))]


def read_family(path: Path, most: int, longest: int) -> Family:
    """The family in a FASTA file; arguments as of `Family.of`.

    Raises:
        DataError: the file cannot be read, is no FASTA, or holds no protein.
    """
    return Family.of([record.tokens for record in read_fasta(path)], most, longest)
