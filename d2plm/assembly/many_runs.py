"""Several trainings from one command, each in processes and a folder of its own.

Comparisons, sweeps and scaling experiments differ in the settings that vary and in the use of the
results; checking, starting and resuming their runs is the same. All settings are checked before
the first run starts, and a finished run is reused.
"""

import copy
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from d2plm.assembly.rehearsal import forecast
from d2plm.config import Config
from d2plm.core.errors import ConfigError, D2PLMError, as_keys, require, require_number
from d2plm.core.files import write_text
from d2plm.core.precision import resolve_device
from d2plm.launch.parallel_jobs import Job, run_jobs

log = logging.getLogger(__name__)

T = TypeVar("T")


def run_all(runs: Mapping[str, Config], commands: Sequence[str], parallel: int) -> None:
    """Run `commands` one after another with each of the configurations, `parallel` runs at a time.

    Args:
        runs: name → whole configuration, each with an `output_dir` of its own.
        commands: such as `train`, `evaluate`.

    Raises:
        LaunchError: if a run fails; the same call continues where it stopped.
    """
    os.environ.pop("MLFLOW_RUN_ID", None)  # each has a tracking run of its own
    began = time.monotonic()
    jobs = []
    for name, config in runs.items():
        folder = Path(config["output_dir"])
        file = folder / "config.requested.yaml"
        config.save(file)
        start = [sys.executable, "-m", "d2plm"]
        lines = [[*start, command, f"--config-file={file}"] for command in commands]
        jobs.append(Job(name, lines, folder / "output.log"))
    for number, job in enumerate(run_jobs(jobs, parallel), 1):
        minutes = (time.monotonic() - began) / 60
        log.info("%s is done: %d of %d, %.1f min", job.name, number, len(runs), minutes)


def write_results(config: Config, results: dict[str, Any], table: str) -> Path:
    """Write results as JSON and their table as Markdown; returns the file for their picture."""
    base = Path(config["work_dir"]) / config["name"]
    write_text(base.with_name(f"{base.name}.json"), json.dumps(results, indent=2))
    write_text(base.with_name(f"{base.name}.md"), table + "\n")
    return base.with_name(f"{base.name}.png")


def check_runs(runs: Mapping[str, Config], parallel: int) -> None:
    """Check all that training would check of any run, before the first one starts.

    Raises:
        ConfigError: with each reason, and the run that has it.
    """
    require_number("parallel", parallel, integer=True, low=1)
    check_all({name: partial(_check, config) for name, config in runs.items()})


def check_all(checks: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Call the check of every run; returns their results by name.

    Raises:
        ConfigError: in one line, with each reason and the runs that have it.
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
        raise ConfigError(f"nothing was started. {'; '.join(texts)}")
    return results


def _check(config: Config) -> None:
    with as_keys("trainer"):
        resolve_device(config["trainer"]["device"])
    forecast(config)


def merged(values: dict[str, Any], changes: dict[str, Any], where: str) -> dict[str, Any]:
    """`values` with nested `changes`; a section that names another `_target_` is replaced.

    Args:
        changes: to keys that it has.
        where: the key that holds the changes, for messages.

    Raises:
        ConfigError: for a change to an unknown key.
    """
    result = copy.deepcopy(values)
    for key, change in changes.items():
        inside = isinstance(change, dict) and isinstance(result.get(key), dict)
        if inside and "_target_" not in change:
            result[key] = merged(result[key], change, f"{where}.{key}")
        else:
            require(key in values, f"{where}.{key}", change, f"one of {', '.join(sorted(values))}")
            result[key] = copy.deepcopy(change)
    return result
