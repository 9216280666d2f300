"""The pipeline's steps, which its components call on a laptop and in a cluster.

The first step composes the run's configuration and writes it to the work folder. Every other step
reads the file and calls the command of the same name. Imports are inside the functions, because the
image that prepares the data has no torch.
"""

import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from d2plm.config import check_paths, compose, quoted, read, save
from d2plm.core.errors import D2PLMError, first_line
from d2plm.core.files import write_text
from d2plm.core.processes import end_with_parent, train_locally, unwound_by_sigterm
from d2plm.core.terminal import configure_logging, done
from d2plm.launch.job_log import job_log
from d2plm.launch.kfp_server import POD_VARIABLE
from d2plm.settings.commands import PipelineSettings
from d2plm.settings.registry import load_modules, module_words
from pipelines import artifacts, record
from pipelines.retries import patiently

if TYPE_CHECKING:
    from d2plm.tracking.registry import Registration

# Pipeline parameter → configuration key; keys without a dot are groups.
PARAMETERS = {
    "experiment": "experiment",
    "paradigm": "paradigm",
    "model": "model",
    "trainer": "trainer",
    "launcher": "launcher",
    "max_steps": "trainer.max_steps",
    "input": "data.input",
    "registered_model": "tracking.registered_model",
    "nodes": "launcher.nodes",
    "gpus": "launcher.gpus",
    "node_cpu": "launcher.cpu",
    "node_memory": "launcher.memory",
    "gpu_resource": "launcher.gpu_resource",
    "trainer_image": "launcher.image",
}
INPUTS = ("data.input", "data.tokenizer", "init_from")  # must exist before the first step
IMAGE = Path("/opt/d2plm")  # folder of the examples in the images
WORKSPACE = "/workspace"  # mount path of the shared volume in the steps and the training pods
# State of a cancelled run in its exit handler; RUNNING in Kubeflow Pipelines 2.17.
CANCELLED = ("RUNNING", "CANCELED", "CANCELLED")
RUN_VARIABLE = "MLFLOW_RUN_ID"  # KFP's MLflow plugin creates a run per step; ours is shared
ERROR = "d2plm: error: "  # begins the last line of a failed step
Result = TypeVar("Result")

log = logging.getLogger(__name__)


def run_step(name: str, config: Path, act: Callable[[], Result]) -> Result:
    """Run a step and record its state.

    If it fails, the process exits (`SystemExit`) with the error's exit code, the error is the last
    line of the step's log, and the traceback is in a file beside the configuration.
    """
    end_with_parent()
    nested = os.environ.pop(RUN_VARIABLE, None) if POD_VARIABLE in os.environ else None
    handlers = logging.getLogger().handlers
    # KFP's own handler would repeat each message.
    handlers[:] = [known for known in handlers if type(known) is not logging.StreamHandler]
    # On SIGTERM, training processes are ended in order, so that they save a checkpoint.
    with unwound_by_sigterm():
        configure_logging()
        done(f"\n── {name} ──")
        record.note(config, name, "running")
        try:
            result = patiently(act)
        except Exception as error:
            message, code = str(error), getattr(error, "exit_code", 1)
            trace = config.with_suffix(".log")
            with suppress(OSError), trace.open("a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
            if not isinstance(error, D2PLMError):
                message = f"{type(error).__name__}: {message}; its traceback is in {trace}"
            record.note(config, name, "failed", message)
            run = f"{config.parent.name}: " if config.name == record.RUN else ""
            print(f"{ERROR}{run}{message}", file=sys.stderr, flush=True)
            raise SystemExit(code) from error
        if nested is not None:
            _refer(nested, config)
        record.note(config, name, "succeeded")
        return result


def _refer(nested: str, file: Path) -> None:
    """Make the run that KFP's MLflow plugin created for this step refer to ours."""
    from d2plm.tracking.mlflow_run import refer

    config: PipelineSettings = read("pipeline", file)
    try:
        refer(nested, Path(config.output_dir), config.tracking.uri)
    except D2PLMError as error:
        log.warning("%s", error)


def step(function: Callable[[str], Result]) -> Callable[..., Result]:
    """Decorate a step, which takes its configuration's path and, in a cluster, output artifacts."""

    @wraps(function)
    def run(config: str, **outputs: Any) -> Result:
        def act() -> Result:
            result = function(config)
            try:
                artifacts.fill(Path(config), outputs, result)
            except Exception as error:  # the step itself is complete
                log.warning("the step's artifacts in the UI are incomplete: %s", first_line(error))
            return result

        return run_step(function.__name__, Path(config), act)

    return run


def load(modules: str) -> None:
    """Import the user's modules, separated by spaces, that register parts."""
    load_modules(shlex.split(modules))


def configure(
    run_id: str,
    time: str,
    work_dir: str,
    claim: str,
    overrides: str,
    modules: str = "",
    sweep: str = "",
    **parameters: str | float,
) -> str:
    """Compose the run's configuration and write it to the work folder; returns the file's path.

    Args:
        time: when the run was scheduled, in UTC, in the format of ISO 8601.
        work_dir: folder of the run's outputs; see `dated`.
        claim: PersistentVolumeClaim that the training pods mount at `WORKSPACE`.
        overrides: further settings as key=value, separated by spaces.
        modules: see `load`.
        sweep: command whose runs are configured, such as `scaling`; empty: a single run.
        parameters: values of `PARAMETERS`; empty text and 0 mean the configuration's own value.
    """
    work_dir, nested = dated(work_dir, time), os.environ.get(RUN_VARIABLE)
    words = [f"work_dir={quoted(work_dir)}", f"launcher.claims={{{claim}: {WORKSPACE}}}"]
    for name, value in parameters.items():
        key = PARAMETERS[name]
        if isinstance(value, float | int):
            value = int(value)  # KFP passes numbers as JSON: 6 may arrive as 6.0
        elif value and "." in key:
            value = quoted(value)
        if value:
            words.append(f"{key}={value}")

    def composed() -> str:
        load(modules)
        given = [*words, *shlex.split(overrides)]
        if sweep:
            from pipelines.sweep import shared_settings

            config = shared_settings(sweep, given)
        else:
            config = compose("pipeline", given)
            config = with_job_log(config, config_file(run_id, config.work_dir))
        check_paths("pipeline", config, INPUTS)
        if nested is not None:
            config = _below_parent_of(nested, config)
        file = save_configuration(config, run_id)
        if sweep:
            write_text(file.with_suffix(".json"), json.dumps([sweep, *given]))
        return str(file)

    return run_step("configure", config_file(run_id, work_dir), composed)


def _below_parent_of(nested: str, config: PipelineSettings) -> PipelineSettings:
    """Put the tracking run below the parent of the runs that KFP's MLflow plugin creates."""
    from d2plm.tracking.mlflow_run import parent_of

    tracking = config.tracking
    if "mlflow" not in tracking.trackers or tracking.parent_run_id is not None:
        return config
    parent = parent_of(nested, tracking.uri)
    return replace(config, tracking=replace(tracking, parent_run_id=parent))


def save_configuration(config: PipelineSettings, run_id: str) -> Path:
    """Check the configuration of a run and write it to the work folder; returns the file."""
    from d2plm.assembly.preparation import (
        build_vocabulary,
        require_fitting_relatives,
        require_fitting_window,
    )
    from d2plm.assembly.tracked_run import PIPELINE_RUN, with_tags

    require_fitting_relatives(config)
    require_fitting_window(config)
    if config.data.tokenizer is None:  # a tokenizer's file may exist only on the pods' volume
        build_vocabulary(config.data)
    relatives = config.generation.relatives
    if relatives is not None and not Path(relatives).exists() and (IMAGE / relatives).exists():
        # Pods run in another folder.
        generation = replace(config.generation, relatives=str(IMAGE / relatives))
        config = replace(config, generation=generation)
    file = config_file(run_id, config.work_dir)
    save(with_tags(config, **{PIPELINE_RUN: run_id}), file)
    done(f"wrote {file}")
    return file


def with_job_log(config: PipelineSettings, file: Path) -> PipelineSettings:
    """Tag the configuration to be saved as `file` with the path of its training job's log."""
    from d2plm.assembly.tracked_run import with_tags

    if POD_VARIABLE not in os.environ or config.launcher.kind == "local":
        return config
    return with_tags(config, **{"pipeline.job_log": str(job_log(file))})


def dated(work_dir: str, time: str) -> str:
    """Replace strftime codes such as %Y-%m-%d, so that each recurring run has its own folder.

    KFP expands macros such as [[ScheduledTime]] only in pipelines of its first version.
    """
    return datetime.fromisoformat(time).strftime(work_dir) if "%" in work_dir else work_dir


def config_file(run_id: str, work_dir: str) -> Path:
    return Path(work_dir) / "pipeline_runs" / f"{run_id}.yaml"


@step
def prepare(config: str) -> str:
    from d2plm.commands.prepare import run

    return str(run(read("pipeline", Path(config)))["digests"]["train"])


@step
def train(config: str) -> str:
    """Train where the launcher section says; returns the folder of the exported model."""
    from d2plm.launch.client import where_to_train

    file = Path(config)
    settings: PipelineSettings = read("pipeline", file)
    kind = where_to_train(settings.launcher.kind)
    if kind == "local":
        train_locally(file, settings.distributed.processes, module_words())
    else:
        from d2plm.assembly.training_job import launch_step

        launch_step(settings, kind, file)
    return str(settings.model_dir)


@step
def evaluate(config: str) -> float:
    from d2plm.commands.evaluate import run

    return run(_read_for_this_pod(config)).model.perplexity.value


@step
def register(config: str) -> "Registration":
    from d2plm.commands.register import run

    return run(read("pipeline", Path(config)))


@step
def generate(config: str) -> str:
    """Generate proteins or texts and report on them; returns the path of their file."""
    from d2plm.assembly.generation import generate, output_name
    from d2plm.commands.report import report_on_proteins
    from d2plm.tracking.locations import open_export

    settings = _read_for_this_pod(config)
    trainer = settings.trainer
    exported = open_export(settings.model_dir, trainer.device)
    output = Path(settings.output_dir) / output_name(exported.vocabulary)
    if settings.generation.relatives is None:
        generate(exported, settings.generation, output, trainer.precision)
    else:
        from d2plm.assembly.new_members import generate_members

        generate_members(settings.generation, output)
    try:
        report_on_proteins(settings, exported)
    except D2PLMError as error:
        raise type(error)(f"wrote {output}, but not the report on it: {error}") from error
    return str(output)


def finish(
    run_id: str,
    work_dir: str,
    state: str,
    message: str = "",
    summary: Any = None,
    modules: str = "",
) -> None:
    """End the training job and the MLflow run that failed or cancelled steps left running.

    The run's record says whether they succeeded. An MLflow run that has ended keeps its status.
    Errors are logged, not raised, so that the failure of the steps themselves is reported.

    Args:
        state: KFP's state of the steps, which is RUNNING in a cancelled run.
        message: why the steps failed, if the record does not say it.
        summary: artifact that receives a summary of the steps.
        modules: see `load`.
    """
    file = config_file(run_id, work_dir)
    known = record.entries(file)
    has_succeeded = any(known[name].state == "succeeded" for name in LAST & {*known})
    left = {run: entry for run in record.runs(file) if (entry := record.cause(run)) is not None}
    failure = record.cause(file) or next(iter(left.values()), None)
    is_cancelled = state in CANCELLED and not has_succeeded
    if is_cancelled:
        message = "the run was cancelled"
        if known:  # otherwise nothing has started, and the folder may not exist
            record.note(file, failure.step if failure else "run", "cancelled", message)
    if summary is not None:
        Path(summary.path).write_text(record.as_markdown(file), encoding="utf-8")
    if has_succeeded or not file.is_file():  # no file: nothing has started
        return

    def clean_up() -> None:
        load(modules)
        for one, entry in {**left, file: failure}.items():
            why = message
            if entry is not None and not is_cancelled:
                why = f"{entry.step}: {entry.message or message or 'its process was killed'}"
            _clean_up(one, is_cancelled, why)

    run_step("finish", file, clean_up)


def _clean_up(file: Path, is_cancelled: bool, message: str) -> None:
    from d2plm.assembly.training_job import end_step

    config = read("pipeline", file)
    ends = partial(end_step, config, file), partial(_end_tracking, config, is_cancelled, message)
    for end in ends:
        try:
            end()
        except D2PLMError as error:
            log.warning("cannot end what the steps have left running: %s", error)


def _end_tracking(config: PipelineSettings, is_cancelled: bool, message: str) -> None:
    from d2plm.assembly.tracked_run import PIPELINE_RUN
    from d2plm.tracking.mlflow_run import end_left_running

    if "mlflow" not in config.tracking.trackers:
        return
    status, state = ("KILLED", "CANCELLED") if is_cancelled else ("FAILED", "FAILED")
    tracked = end_left_running(
        Path(config.output_dir),
        status,
        uri=config.tracking.uri,
        owner={PIPELINE_RUN: config.tracking.tags[PIPELINE_RUN]},
        tags={"pipeline.state": state, "pipeline.error": message},
    )
    if tracked is not None:
        done(f"the tracking run {tracked} is marked {status}")


def _read_for_this_pod(config: str) -> PipelineSettings:
    """Read the configuration; sets trainer.device=cpu if this pod, unlike training, has no GPU."""
    import torch

    settings: PipelineSettings = read("pipeline", Path(config))
    if settings.trainer.device != "cuda" or torch.cuda.is_available():
        return settings
    log.warning("trainer.device=cuda: this step has no GPU (evaluate_gpus) and runs on the CPU")
    trainer = replace(settings.trainer, device="cpu", precision="auto")
    return replace(settings, trainer=trainer)


# The steps after `configure`, in order; each takes the path of the configuration.
STEPS: dict[str, Callable[[str], object]] = {
    one.__name__: one for one in (prepare, train, evaluate, register, generate)
}
LAST = {"generate", "reduce"}  # step that ends a run, or a sweep


def main(words: list[str]) -> int:
    """Run one step in this process: `python -m pipelines.steps NAME CONFIGURATION MODULE…`."""
    end_with_parent()
    name, config, *modules = words
    load_modules(modules)
    STEPS[name](config)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
