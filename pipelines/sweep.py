"""Sweeps in a cluster: a list of runs that execute at the same time, and their table.

`configure` writes the shared settings and, beside them, the sweep's command line. From both, `plan`
writes a configuration for each unfinished run, so that `train` and `evaluate` are the steps of a
single run; `reduce` makes the table. On one machine, commands such as `d2plm scaling` do the same.
"""

import json
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2plm.config import Arguments, changed, compose_arguments, parse_arguments, read, save
from d2plm.core.errors import ConfigError, require, require_choice
from d2plm.core.files import read_json
from d2plm.core.terminal import done
from d2plm.settings.commands import PipelineSettings, SweepSettings
from pipelines import record
from pipelines.steps import step, with_job_log

if TYPE_CHECKING:
    from d2plm.assembly.sweep import Sweep

KINDS = ("train", "compare", "scaling")  # commands that have several runs


def composed(kind: str | None, words: list[str]) -> tuple[PipelineSettings, Arguments]:
    """Compose a single run, or a sweep of `kind`; for `train`, the settings of the first run.

    Raises:
        ConfigError: if a setting is unknown, invalid, or not for a sweep.
    """
    if kind is None:
        return compose_arguments("pipeline", words)
    require_choice("sweep", kind, KINDS)
    arguments = parse_arguments(kind, words)
    configs: list[SweepSettings] = [arguments.compose()] if kind != "train" else []
    if kind == "train":
        from d2plm.commands import multirun

        configs += multirun.composed(arguments)[1].values()
    config, inputs = configs[0], [one.data.input for one in configs]
    require(len({*map(str, inputs)}) == 1, "data.input", inputs, "the same in all runs")
    wanted = f"false; for forecasts use d2plm {kind} --dry-run"
    require(not config.dry_run, "dry_run", config.dry_run, wanted)
    for section in ("arms", "sizes"):  # of compare, of scaling
        for name, changes in getattr(config, section, {}).items():
            changed(config, changes, f"{section}.{name}")
    name = config.launcher.name
    require(name is None, "launcher.name", name, "null: each run has its own job")
    return config, arguments


def listed(kind: str, words: list[str]) -> "Sweep":
    config, arguments = composed(kind, words)
    if kind == "train":
        from d2plm.commands import multirun

        return multirun.sweep(arguments)
    found: Sweep = import_module(f"d2plm.commands.{kind}").sweep(config)
    return found


def shared_settings(kind: str, words: list[str]) -> PipelineSettings:
    """Settings that all runs share, with the output folder and the tracking run of the table."""
    sweep = listed(kind, words)
    tracking = replace(sweep.settings.tracking, run_name=sweep.title)
    return replace(sweep.settings, output_dir=str(sweep.results), tracking=tracking)


@step
def plan(config: str) -> list[str]:
    """Check all runs and save their configurations; returns those of the runs to execute."""
    from d2plm.assembly.sweep import for_all, planned
    from d2plm.commands.multirun import folder_name

    sweep = _read(Path(config))
    for_all({name: partial(_check, run) for name, run in sweep.runs.items()})
    files = []
    for name, run in planned(sweep).items():
        file = Path(config).with_suffix("") / folder_name(name) / record.RUN
        save(with_job_log(run, file), file)
        files.append(file)
    left = [str(file) for file in files if not _is_finished(file)]
    done(f"{len(left)} of {len(files)} runs are to be executed")
    return left or [str(files[0])]  # a loop over nothing might skip what follows


@step
def reduce(config: str) -> str:
    """Write the table of the finished runs, and a figure if possible; returns the table's path."""
    from d2plm.assembly.sweep import reduced, result_files

    sweep = _read(Path(config))
    reduced(sweep)
    return str(result_files(sweep.results)["md"])


def _read(file: Path) -> "Sweep":
    command, *words = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    return replace(listed(command, words), settings=read(command, file))


def _check(config: PipelineSettings) -> None:
    """Check a run's settings with the number of processes of its job."""
    from d2plm.assembly.dry_run import forecast
    from d2plm.assembly.training_job import training_job
    from d2plm.launch.client import where_to_train

    if where_to_train(config.launcher.kind) != "local":
        job = training_job(config, ["-m", "d2plm", "train"], name="d2plm")
        processes = job.nodes * job.processes_per_node
        config = replace(config, distributed=replace(config.distributed, processes=processes))
    forecast(config)


def _is_finished(file: Path) -> bool:
    """Whether an earlier sweep with the same settings finished the run, and its files exist."""
    from d2plm.evaluation.result import read_evaluation
    from d2plm.export.exported_model import is_whole_export

    config: Any = read("pipeline", file)
    for earlier in file.parents[2].glob(f"*/{file.parent.name}/{file.name}"):
        entry = record.entries(earlier).get("evaluate")
        if entry is None or entry.state != "succeeded":
            continue
        try:
            known: Any = read("pipeline", earlier)
        except ConfigError:  # written by a version with other settings
            continue
        known = replace(known, tracking=config.tracking, launcher=config.launcher)
        if known == config and config.trainer.resume != "none":
            evaluation = read_evaluation(Path(config.output_dir))
            manifest = read_json(Path(config.data.prepared_dir) / "manifest.json") or {}
            data = manifest.get("digests", {}).items()
            is_of_data = evaluation is not None and data <= evaluation.digests.items()
            return is_of_data and is_whole_export(Path(config.model_dir))
    return False
