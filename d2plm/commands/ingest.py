"""d2plm ingest: read a collection of sequences into a raw LMDB store."""

import logging
from pathlib import Path
from typing import Any

from d2plm.assembly.preparation import build_vocabulary
from d2plm.core.progress import Progress
from d2plm.core.terminal import done
from d2plm.data.ingest import ingest
from d2plm.settings.commands import IngestSettings
from d2plm.settings.data import Reading
from d2plm.settings.schema import part

log = logging.getLogger(__name__)


def run(config: IngestSettings) -> dict[str, Any]:
    output = Path(config.output)
    with Progress("ingesting", 100, unit="%") as progress:
        manifest = ingest(
            config.input,
            output,
            reading=part(Reading, config),
            vocabulary=build_vocabulary(config),
            window=config.window,
            min_residues=config.min_residues,
            max_residues=config.max_residues,
            report=log.info,
            progress=progress.update_share,
        )
    done(f"wrote {output}")
    return {"output": output, **manifest}
