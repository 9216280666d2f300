"""The table of relatives: which relatives each protein has, as tab-separated text.

A row is a relative of a protein. Names are single words, so no cell is quoted.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from d2plm.core import vocabulary
from d2plm.core.errors import DataError
from d2plm.core.files import written_beside
from d2plm.core.number_text import counted
from d2plm.core.vocabulary import Tokens, decode
from d2plm.data.fasta import tokenised
from d2plm.data.record_checks import checked
from d2plm.data.records import RawRecords, is_missing
from d2plm.data.retrieval import Relative
from d2plm.data.tables import open_table

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


def read_relatives(path: Path) -> dict[str, list[Tokens]] | None:
    """Name of each protein of a table → its relatives, uint8 residue tokens.

    Only the columns of names and sequences are needed, in any place. None is a file without them.

    Raises:
        DataError: the file is a table of relatives under other names, has no rows, or a cell holds
            no protein.
    """
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
        rows = [(line, *(cells[place].strip() for place in places)) for line, cells in table.rows()]
    whole = [row for row in rows if row[1] and not is_missing(row[2].encode())]
    if not whole:
        raise DataError(f"{path}: has no rows; give at least one relative")
    if empty := len(rows) - len(whole):
        log.info("%s: left out %s without a protein or a sequence", path, counted(empty, "row"))
    records = RawRecords(
        names=[protein.encode() for _, protein, _ in whole],
        sequences=[sequence.encode() for _, _, sequence in whole],
        where=lambda record, offset: f"{path}, line {whole[record][0]}",
        done=1.0,
    )
    found: dict[str, list[Tokens]] = {}
    for record in tokenised(checked([records], vocabulary.PROTEIN, path), vocabulary.PROTEIN):
        found.setdefault(record.name, []).append(record.tokens)
    return found
