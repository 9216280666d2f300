"""What a benchmark found: JSON, a picture, an MLflow run."""

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from d2plm.bench.arms import Timings
from d2plm.bench.rows import Row
from d2plm.core.files import write_text
from d2plm.core.machine import machine

EXPERIMENT = "d2plm-bench"
DPI = 120


def write_json(
    file: Path, benchmark: str, rows: Sequence[Row], timings: Sequence[Timings], settings: Any
) -> None:
    """Everything that was measured, with the machine and the settings, as one file."""
    content = {
        "benchmark": benchmark,
        "machine": machine(),
        "settings": settings,
        "rows": [row.as_json() for row in rows],
        "arms": [asdict(timing) for timing in timings],
    }
    write_text(file, json.dumps(content, indent=2) + "\n")


def plot(file: Path, benchmark: str, timings: Sequence[Timings]) -> None:
    """A box for each arm: what its turns took."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.45 * len(timings)), layout="constrained")
    names = [timing.name for timing in timings]
    axes.boxplot(
        [timing.seconds for timing in timings], orientation="horizontal", tick_labels=names
    )
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    clock = "GPU" if timings[0].cuda else "CPU"
    axes.set_xlabel(f"{clock} seconds of a turn (median, quartiles, range)")
    axes.set_title(f"d2plm bench {benchmark}")
    axes.grid(axis="x", alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)
    pyplot.close(figure)


def log_to_mlflow(
    uri: str, benchmark: str, rows: Sequence[Row], settings: dict[str, Any], files: Sequence[Path]
) -> str:
    """A run of its own in the experiment `d2plm-bench`; gives its id.

    Raises:
        TrackingError: if the store cannot be reached or refuses.
    """
    from d2plm.tracking.runs import tracking_run

    with (
        tempfile.TemporaryDirectory(prefix="d2plm-bench-") as folder,
        tracking_run(Path(folder), uri=uri, experiment=EXPERIMENT, run_name=benchmark) as run,
    ):
        facts = machine()
        run.log_params({**settings, **facts.pop("versions"), **facts})
        run.log_metrics({metric_name(row): row.value for row in rows})
        for file in files:
            run.log_file(file)
        return str(run.id)


def metric_name(row: Row) -> str:
    """A row's name in the letters that MLflow allows, with its unit."""
    words = f"{row.what} {row.unit}".replace("÷", "over").replace("%", "percent").replace("×", "")
    return " ".join(re.sub(r"[^\w./ -]", " ", words, flags=re.ASCII).split())
