"""The table of relatives: which relatives each protein has, as tab-separated text.

A row is a relative of a protein. Names are single words, so no cell is quoted.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from d2plm.core import vocabulary
from d2plm.core.errors import DataError
from d2plm.core.files import written_beside
from d2plm.core.number_text import counted
from d2plm.core.vocabulary import Tokens, decode
from d2plm.data.fasta import tokenised
from d2plm.data.retrieval import Relative
from d2plm.data.sources import read_sources
from d2plm.data.tables import open_table
from d2plm.settings.data import Reading

PROTEIN, SEQUENCE = "protein", "sequence"
COLUMNS = (PROTEIN, "relative", "identity", "coverage", SEQUENCE)
OF_RELATIVES = (PROTEIN, "relative", "query", "qseq")  # how a column begins in such tables only

FIELDS = frozenset((".parquet", ".arrow", ".jsonl", ".ndjson", ".json"))

log = logging.getLogger(__name__)


def write_relatives(path: Path, names: Sequence[str], found: Sequence[Sequence[Relative]]) -> None:
    """Write the relatives of each protein; `names` are the proteins' names.

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
    columns: dict[str, str] = {}
    with suppress(DataError), open_table(path) as table:
        columns = {column.lower(): column for column in table.columns}
    is_csv = {PROTEIN, SEQUENCE} <= {*columns}
    if not is_csv and len(columns) > 1 and any(one.startswith(OF_RELATIVES) for one in columns):
        raise DataError(
            f"{path}: has the columns {', '.join(columns.values())}; a table of relatives needs "
            f"{PROTEIN}, the name of a protein, and {SEQUENCE}, that of a relative"
        )
    if not is_csv and FIELDS.isdisjoint(path.suffixes):
        return None
    reading = Reading(
        format="csv" if is_csv else "auto",
        name_field=columns.get(PROTEIN, PROTEIN),
        sequence_field=columns.get(SEQUENCE, SEQUENCE),
    )
    found: dict[str, list[Tokens]] = {}
    try:
        for record in tokenised(read_sources([path], reading), vocabulary.PROTEIN):
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
