"""The table of relatives: which relatives each protein has, as tab-separated text.

A row is a relative of a protein. Names are single words, so no cell is quoted.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core import vocabulary
from d2plm.core.errors import DataError
from d2plm.core.files import written_beside
from d2plm.core.vocabulary import decode
from d2plm.data.compressed import open_input
from d2plm.data.retrieval import Relative

PROTEIN, SEQUENCE = "protein", "sequence"
COLUMNS = (PROTEIN, "relative", "identity", "coverage", SEQUENCE)


def write_relatives(path: Path, names: Sequence[str], found: Sequence[Sequence[Relative]]) -> None:
    """Write the relatives of each of the proteins; `names` are theirs.

    Raises:
        DataError: the file cannot be written.
    """
    with written_beside(path) as partial, partial.open("w", encoding="utf-8") as file:
        print(*COLUMNS, sep="\t", file=file)
        for protein, relatives in zip(names, found, strict=True):
            for one in relatives:
                name = "_".join(one.name.split())  # of a table, it may hold blanks
                figures = f"{one.identity:.3f}", f"{one.coverage:.3f}"
                print(protein, name, *figures, decode(one.tokens), sep="\t", file=file)


def read_relatives(path: Path) -> dict[str, list[NDArray[np.uint8]]]:
    """Name of each protein of a table → its relatives, uint8 residue tokens.

    Only the columns of names and sequences are needed, in any place. The file may be compressed.

    Raises:
        DataError: the file cannot be read, lacks a column, has no rows, or a cell holds no protein.
    """
    found: dict[str, list[NDArray[np.uint8]]] = {}
    with open_input(path) as source:
        lines = io.TextIOWrapper(source.content, "utf-8-sig", "replace")
        header = next(lines, "").rstrip("\n").split("\t")
        if not {PROTEIN, SEQUENCE} <= {*header}:
            raise DataError(
                f"{path}: is neither FASTA nor a table with the columns {PROTEIN} and {SEQUENCE}, "
                "separated by tabs; give one of them"
            )
        for number, line in enumerate(lines, 2):
            if not line.strip():
                continue
            cells = line.rstrip("\n").split("\t")
            if len(cells) != len(header):
                raise DataError(
                    f"{path}, line {number}: has {len(cells)} cells where the header has "
                    f"{len(header)}; separate them by single tabs"
                )
            row = dict(zip(header, cells, strict=True))
            tokens = vocabulary.PROTEIN.encode(row[SEQUENCE], f"{path}, line {number}")
            found.setdefault(row[PROTEIN], []).append(tokens)
    if not found:
        raise DataError(f"{path}: has no rows; give at least one relative")
    return found
