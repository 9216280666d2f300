"""One list of runs: check all of them, execute them, and reduce their results to one document.

`d2plm train --multirun`, `compare` and `scaling` make the list and reduce the finished runs: to a
table, to a comparison with intervals, to a scaling law. No run starts before the settings of all
have been checked. Finished runs are reused and others resume, so the same command continues an
interrupted sweep.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
from d2plm.tracking.runs import tracking_run

SUFFIXES = ("json", "md", "png")

log = logging.getLogger(__name__)

T = TypeVar("T")
Kind = TypeVar("Kind", bound=PipelineSettings)
Runs = Mapping[str, PipelineSettings]  # name → complete configuration, with a folder of its own
Document = dict[str, Any]  # JSON content
Executor = Callable[[Runs, Sequence[str]], None]


def one_run(config: Kind, name: str, folder: Path) -> Kind:
    """The configuration of a run that writes only to `folder`, under this name."""
    tracking = replace(config.tracking, run_name=name)
    model_dir = str(folder / "model")
    return replace(config, output_dir=str(folder), model_dir=model_dir, tracking=tracking)


def run_sweep(
    settings: SweepSettings,
    runs: Runs,
    commands: Sequence[str],
    *,
    varied: Mapping[str, Iterable[object]],
    results: Path,
    reduce: Callable[[], T],
    table: Callable[[T], str],
    document: Callable[[T], Any] = lambda reduced: reduced,
    plot: Callable[[T, Path], None] | None = None,
) -> T | Document:
    """Execute the runs below one tracking run; write, log, print and return their reduction.

    A dry run prints and returns the forecasts of the runs instead.

    Args:
        settings: where the runs execute, and the tracking experiment of all of them.
        commands: the commands of each run in order, such as `train`, `evaluate`.
        varied: what differs between the runs → its values.
        results: path of the written files, without `.json`, `.md` and `.png`.
        reduce: reads the finished runs.
        table: a reduction as Markdown.
        document: a reduction as JSON content.
        plot: writes a figure of a reduction as PNG.

    Raises:
        ConfigError: if a setting of any run is invalid; no run has been started then.
        LaunchError: if a run fails; the same command continues where it stopped.
    """
    check = forecast if settings.dry_run else _check
    forecasts = for_all({name: partial(check, config) for name, config in runs.items()})
    if settings.dry_run:
        result("\n\n".join(f"{name}\n{aligned(rows)}" for name, rows in forecasts.items()))
        return forecasts
    own = {**tracking_arguments(settings), "run_name": f"{settings.name}: {', '.join(varied)}"}
    with tracking_run(results, **own) as parent:
        parent.log_params({key: ", ".join(map(str, values)) for key, values in varied.items()})
        placed = {name: _below(config, settings, parent.id) for name, config in runs.items()}
        executor(settings)(placed, commands)
        reduced = reduce()
        shown = table(reduced)
        files = {suffix: results.with_name(f"{results.name}.{suffix}") for suffix in SUFFIXES}
        write_text(files["json"], json.dumps(document(reduced), indent=2) + "\n")
        write_text(files["md"], shown + "\n")
        if plot is not None:
            plot(reduced, files["png"])
        for file in filter(Path.exists, files.values()):
            parent.log_file(file)
    result(shown)
    return reduced


def _below(config: Kind, settings: SweepSettings, parent: str | None) -> Kind:
    """A run's configuration, with its tracking run below `parent` in the sweep's experiment."""
    shared = settings.tracking
    tracking = replace(
        config.tracking,
        uri=shared.uri,
        experiment=shared.experiment,
        parent_run_id=parent or shared.parent_run_id,
    )
    return replace(config, tracking=tracking)


def executor(settings: SweepSettings) -> Executor:
    """Where the settings execute the runs: in processes here, `parallel` runs at a time."""
    return partial(_run_here, parallel=settings.parallel)


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
    """Call the function of every run and return the results by name.

    Raises:
        ConfigError: one line with each error and the runs that it concerns.
    """
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
