"""d2plm bench: measure this machine, and say whether the goals are met."""

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

from d2plm.bench.data import bench_data
from d2plm.bench.measure import Row, table
from d2plm.config import Config
from d2plm.files import write_text


def run_data(config: Config) -> None:
    """Measure the data engine; print the table and write it as JSON where that is wanted."""
    rows = bench_data(
        Path(config["proteins"]),
        sequences=config["sequences"],
        many_sequences=config["many_sequences"],
        planned=config["planned"],
        mmseqs_sizes=config["mmseqs_sizes"],
        temporary_dir=config["temporary_dir"],
        report=lambda line: print(line, flush=True),
    )
    _show(rows, config["output"])


def _show(rows: list[Row], output: str | None) -> None:
    print(f"\n{table(rows)}")
    if output is not None:
        machine = {"machine": platform.platform(), "cpus": os.cpu_count()}
        results = [{**asdict(row), "met": row.met} for row in rows]
        write_text(Path(output), json.dumps({**machine, "rows": results}, indent=2) + "\n")
        print(f"\nwrote {output}")
