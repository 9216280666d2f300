"""d2plm ingest: FASTA → raw LMDB store."""

from pathlib import Path

from d2plm.config import Config
from d2plm.data.prepare import ingest


def run(config: Config) -> None:
    """Ingest `input` into `output` and print the counts."""
    output = Path(config["output"])
    ingest(
        Path(config["input"]),
        output,
        min_length=config["min_length"],
        max_length=config["max_length"],
        on_illegal=config["on_illegal"],
        report=print,
    )
    print(f"wrote {output}")
