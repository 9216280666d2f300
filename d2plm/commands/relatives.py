"""d2plm relatives: find the relatives of each protein in a reference collection.

Results are cached in `cache_dir` by proteins, reference and settings.
"""

import logging
from pathlib import Path
from typing import Any

from d2plm.core.errors import DataError
from d2plm.core.files import require_other_output
from d2plm.core.progress import Progress
from d2plm.core.terminal import done, first_few
from d2plm.core.vocabulary import PROTEIN
from d2plm.data.family import write_relatives
from d2plm.data.records import require_distinct
from d2plm.data.retrieval import retrieve_relatives
from d2plm.data.sources import read_sequences
from d2plm.settings.commands import RelativesSettings
from d2plm.settings.data import Resources, RetrievalSettings
from d2plm.settings.schema import part

log = logging.getLogger(__name__)


def run(config: RelativesSettings) -> dict[str, Any]:
    """Search, and write a row for each relative of each protein of the input.

    Raises:
        DataError: if two proteins have the same name, or no protein has a relative.
    """
    source, reference, output = config.input, config.reference, config.output
    require_other_output("output", output, [source, reference])
    retrieval = part(RetrievalSettings, config)
    proteins = [*read_sequences(source, PROTEIN)]
    names = [record.name for record in proteins]
    require_distinct(names, source)  # so that the table can be read
    with Progress("reading the reference", 100, unit="%") as progress:
        found = retrieve_relatives(
            [record.tokens for record in proteins],
            reference,
            Path(config.cache_dir),
            retrieval,
            resources=part(Resources, config),
            report=log.info,
            progress=progress.update_share,
        )
    without = [name for name, relatives in zip(names, found, strict=True) if not relatives]
    if len(without) == len(names):
        raise DataError(
            f"{reference}: contains no relatives of any protein in {source} under these settings; "
            "use another reference, or a larger identity_below or max_e_value"
        )
    if without:
        shown = first_few(without)
        log.info("%d of %d proteins have no relatives: %s", len(without), len(names), shown)
    write_relatives(Path(output), names, found)
    number = sum(map(len, found))
    having = len(names) - len(without)
    done(f"wrote {output}: {number:,} relatives of {having:,} of {len(names):,} proteins")
    return {"output": output, "proteins": len(names), "relatives": number, "without": without}
