"""The table of relatives: which relatives each protein has, as tab-separated text.

A row is a relative of a protein. Names are single words, so no cell is quoted.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core import vocabulary
from d2plm.core.errors import DataError
from d2plm.core.files import written_beside
from d2plm.core.number_text import counted
from d2plm.core.vocabulary import decode
from d2plm.data.retrieval import Relative
from d2plm.data.tables import is_missing, open_table

PROTEIN, SEQUENCE = "protein", "sequence"
COLUMNS = (PROTEIN, "relative", "identity", "coverage", SEQUENCE)
OF_RELATIVES = (PROTEIN, "relative", "query", "qseq")  # how a column begins in such tables only

log = logging.getLogger(__name__)


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


def read_relatives(path: Path) -> dict[str, list[NDArray[np.uint8]]] | None:
    """Name of each protein of a table → its relatives, uint8 residue tokens.

    Only the columns of names and sequences are needed, in any place. None is a file without them.

    Raises:
        DataError: the file is a table of relatives under other names, has no rows, or a cell holds
            no protein.
    """
    found: dict[str, list[NDArray[np.uint8]]] = {}
    empty = 0
    with ExitStack() as stack:
        try:
            table = stack.enter_context(open_table(path))
        except DataError:
            return None
        columns = [column.lower() for column in table.columns]
        if not {PROTEIN, SEQUENCE} <= {*columns}:
            if len(columns) > 1 and any(one.startswith(OF_RELATIVES) for one in columns):
                raise DataError(
                    f"{path}: has the columns {', '.join(table.columns)}; a table of relatives "
                    f"needs {PROTEIN}, the name of a protein, and {SEQUENCE}, that of a relative"
                )
            return None
        places = columns.index(PROTEIN), columns.index(SEQUENCE)
        for line, cells in table.rows():
            protein, sequence = (cells[place].strip() for place in places)
            if is_missing(protein) or is_missing(sequence):
                empty += 1
                continue
            tokens = vocabulary.PROTEIN.encode(sequence, f"{path}, line {line}")
            found.setdefault(protein, []).append(tokens)
    if not found:
        raise DataError(f"{path}: has no rows; give at least one relative")
    if empty:
        log.info("%s: left out %s without a protein or a sequence", path, counted(empty, "row"))
    return found
