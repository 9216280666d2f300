"""Several training runs from one command, each in its own processes and folder.

Comparisons, sweeps and scaling experiments share the checking, starting and resuming of runs. All
settings are checked before the first run starts, and finished runs are reused.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from d2plm.assembly.dry_run import forecast
from d2plm.config import save
from d2plm.core.errors import ConfigError, D2PLMError, within
from d2plm.core.files import write_text
from d2plm.core.precision import resolve_device
from d2plm.core.processes import Job, run_jobs
from d2plm.core.terminal import aligned, result
from d2plm.settings.commands import PipelineSettings
from d2plm.settings.registry import module_words

log = logging.getLogger(__name__)

T = TypeVar("T")


def run_all(runs: Mapping[str, PipelineSettings], commands: Sequence[str], parallel: int) -> None:
    """Run `commands` in order with each of the configurations, `parallel` runs at a time.

    Args:
        runs: name → complete configuration, each with its own `output_dir`.
        commands: such as `train`, `evaluate`.

    Raises:
        LaunchError: if a run fails; the same call continues where it stopped.
    """
    os.environ.pop("MLFLOW_RUN_ID", None)  # each run has its own tracking run
    began = time.monotonic()
    jobs = []
    for name, config in runs.items():
        folder = Path(config.output_dir)
        file = folder / "config.requested.yaml"
        save(config, file)
        start = [sys.executable, "-m", "d2plm"]
        lines = [
            [*start, command, f"--config-file={file}", *module_words()] for command in commands
        ]
        jobs.append(Job(name, lines, folder / "output.log"))
    for number, job in enumerate(run_jobs(jobs, parallel), 1):
        minutes = (time.monotonic() - began) / 60
        log.info("%s is done: %d of %d, %.1f min", job.name, number, len(runs), minutes)


def write_results(config: PipelineSettings, results: dict[str, Any], table: str) -> Path:
    """Write results as JSON and their table as Markdown; returns the path for their plot."""
    base = Path(config.work_dir) / config.name
    write_text(base.with_name(f"{base.name}.json"), json.dumps(results, indent=2))
    write_text(base.with_name(f"{base.name}.md"), table + "\n")
    return base.with_name(f"{base.name}.png")


def check_runs(runs: Mapping[str, PipelineSettings]) -> None:
    """Check the settings of every run as training would, before the first run starts.

    Raises:
        ConfigError: see `check_all`.
    """
    check_all({name: partial(_check, config) for name, config in runs.items()})


def dry_run(runs: Mapping[str, PipelineSettings]) -> dict[str, dict[str, str]]:
    """Check the settings of every run, and print and return their forecasts."""
    forecasts = check_all({name: partial(forecast, config) for name, config in runs.items()})
    result("\n\n".join(f"{name}\n{aligned(rows)}" for name, rows in forecasts.items()))
    return forecasts


def check_all(checks: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Call the check of every run and return the results by name.

    Raises:
        ConfigError: one line with each error and the runs that it concerns.
    """
    results: dict[str, T] = {}
    reasons: dict[str, list[str]] = {}
    for name, check_run in checks.items():
        try:
            results[name] = check_run()
        except D2PLMError as error:
            reasons.setdefault(str(error), []).append(name)
    if reasons:
        texts = [
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {reason}"
            for reason, names in reasons.items()
        ]
        raise ConfigError(f"no run was started. {'; '.join(texts)}")
    return results


def _check(config: PipelineSettings) -> None:
    with within("trainer"):
        resolve_device(config.trainer.device)
    forecast(config)
