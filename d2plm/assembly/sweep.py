"""One list of runs: check all of them, execute them, and reduce their results to one document.

`d2plm train --multirun`, `compare` and `scaling` list the runs and reduce them to a table, a
comparison with intervals or a scaling law. `run_sweep` executes them here; a pipeline in a cluster
calls `planned`, executes the runs, and calls `reduced`. No run starts before the settings of all
have been checked. Finished runs are reused and others resume, so the same command continues an
interrupted sweep.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from d2plm.assembly.dry_run import forecast
from d2plm.assembly.tracked_run import tracking_arguments
from d2plm.config import save
from d2plm.core.errors import ConfigError, D2PLMError, within
from d2plm.core.files import write_text
from d2plm.core.precision import resolve_device
from d2plm.core.processes import Job, run_jobs
from d2plm.core.terminal import aligned, result
from d2plm.settings.commands import PipelineSettings, SweepSettings
from d2plm.settings.registry import module_words
from d2plm.tracking.runs import Run, tracking_run

SUFFIXES = ("json", "md", "png")

log = logging.getLogger(__name__)

T = TypeVar("T")
Kind = TypeVar("Kind", bound=PipelineSettings)
Runs = Mapping[str, PipelineSettings]  # name → complete configuration, with a folder of its own


@dataclass(frozen=True)
class Sweep:
    """A list of runs, and the reduction of their results.

    Attributes:
        settings: where the runs execute, and the tracking experiment of all of them.
        runs: the runs in the order in which they start.
        commands: the commands of each run in order, such as `train`, `evaluate`.
        varied: key that differs between the runs → its values.
        results: path of the written files, without `.json`, `.md` and `.png`.
        reduce: reads the finished runs.
        table: a reduction as Markdown.
        document: a reduction as JSON content.
        plot: writes a figure of a reduction as PNG.
    """

    settings: SweepSettings
    runs: Runs
    commands: Sequence[str]
    varied: Mapping[str, Iterable[object]]
    results: Path
    reduce: Callable[[], Any]
    table: Callable[[Any], str]
    document: Callable[[Any], Any] = lambda reduced: reduced
    plot: Callable[[Any, Path], None] | None = None

    @property
    def title(self) -> str:
        """Name of the parent tracking run."""
        return f"{self.settings.name}: {', '.join(self.varied)}"


def one_run(config: Kind, name: str, folder: Path) -> Kind:
    """Configure a run that writes only to `folder`, under this name."""
    tracking = replace(config.tracking, run_name=name)
    model_dir = str(folder / "model")
    return replace(config, output_dir=str(folder), model_dir=model_dir, tracking=tracking)


def run_sweep(sweep: Sweep) -> Any:
    """Execute the runs below one tracking run; write, log, print and return their reduction.

    A dry run prints and returns the forecasts of the runs instead.

    Raises:
        ConfigError: if a setting of any run is invalid; no run has been started then.
        LaunchError: if a run fails; the same command continues where it stopped.
    """
    settings = sweep.settings
    check = forecast if settings.dry_run else _check
    forecasts = for_all({name: partial(check, config) for name, config in sweep.runs.items()})
    if settings.dry_run:
        result("\n\n".join(f"{name}\n{aligned(rows)}" for name, rows in forecasts.items()))
        return forecasts
    with _tracked(sweep) as parent:
        _run_here(_placed(sweep, parent), sweep.commands, settings.parallel)
        return _reduced(sweep, parent)


def planned(sweep: Sweep) -> Runs:
    """The runs, assigned to a parent tracking run; the caller checks and executes them."""
    with _tracked(sweep) as parent:
        return _placed(sweep, parent)


def reduced(sweep: Sweep) -> Any:
    """Write, log, print and return the reduction of runs that have been executed."""
    with _tracked(sweep) as parent:
        return _reduced(sweep, parent)


def result_files(results: Path) -> dict[str, Path]:
    """Paths of a sweep's results by suffix."""
    return {suffix: results.with_name(f"{results.name}.{suffix}") for suffix in SUFFIXES}


@contextmanager
def _tracked(sweep: Sweep) -> Iterator[Run]:
    own = {**tracking_arguments(sweep.settings), "run_name": sweep.title}
    with tracking_run(sweep.results, **own) as parent:
        parent.set_tags(sweep.settings.tracking.tags)
        yield parent


def _placed(sweep: Sweep, parent: Run) -> Runs:
    parent.log_params({key: ", ".join(map(str, values)) for key, values in sweep.varied.items()})
    return {n: _below(config, sweep.settings, parent.id) for n, config in sweep.runs.items()}


def _reduced(sweep: Sweep, parent: Run) -> Any:
    found = sweep.reduce()
    shown, files = sweep.table(found), result_files(sweep.results)
    write_text(files["json"], json.dumps(sweep.document(found), indent=2) + "\n")
    write_text(files["md"], shown + "\n")
    if sweep.plot is not None:
        sweep.plot(found, files["png"])
    for file in filter(Path.exists, files.values()):
        parent.log_file(file)
    result(shown)
    return found


def _below(config: Kind, settings: SweepSettings, parent: str | None) -> Kind:
    """Put a run's tracking run below `parent`, in the sweep's experiment."""
    shared = settings.tracking
    tracking = replace(
        config.tracking,
        uri=shared.uri,
        experiment=shared.experiment,
        parent_run_id=parent or shared.parent_run_id,
        tags={**shared.tags, **config.tracking.tags},
    )
    return replace(config, tracking=tracking)


def _run_here(runs: Runs, commands: Sequence[str], parallel: int) -> None:
    os.environ.pop("MLFLOW_RUN_ID", None)  # each run has its own tracking run
    began = time.monotonic()
    start = [sys.executable, "-m", "d2plm"]
    jobs = []
    for name, config in runs.items():
        folder = Path(config.output_dir)
        file = folder / "config.requested.yaml"
        save(config, file)
        words = [f"--config-file={file}", *module_words()]
        lines = [[*start, command, *words] for command in commands]
        jobs.append(Job(name, lines, folder / "output.log"))
    for number, job in enumerate(run_jobs(jobs, parallel), 1):
        minutes = (time.monotonic() - began) / 60
        log.info("%s is done: %d of %d, %.1f min", job.name, number, len(runs), minutes)


def for_all(calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Call every function; raises one `ConfigError` with each error and the runs it concerns."""
    results: dict[str, T] = {}
    reasons: dict[str, list[str]] = {}
    for name, call in calls.items():
        try:
            results[name] = call()
        except D2PLMError as error:
            reasons.setdefault(str(error), []).append(name)
    if reasons:
        texts = [
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}"
            for reason, names in reasons.items()
        ]
        raise ConfigError(f"no run was started. {'; '.join(texts)}")
    return results


def _check(config: PipelineSettings) -> dict[str, str]:
    with within("trainer"):
        resolve_device(config.trainer.device)
    return forecast(config)
