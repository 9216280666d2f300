"""The pipeline's steps, as its components call them on a laptop and in a cluster.

The first step composes the run's configuration once and writes it to the work folder. Every other
step reads the file and calls the command of its name. Imports are inside the functions, because
the image that prepares the data has no torch.
"""

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from d2plm.config import Config, compose, quoted, read
from d2plm.core.errors import D2PLMError
from d2plm.core.lifetime import end_with_parent
from d2plm.core.signals import unwound_by_sigterm
from d2plm.core.terminal import configure_logging, done

# The pipeline's parameters that are settings. Groups are without a dot.
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
IMAGE = Path("/opt/d2plm")  # where the images have the examples
WORKSPACE = "/workspace"  # where the steps and the training pods mount the shared volume
# `d2plm pipeline run` relays to its terminal what is written to this named pipe.
OUTPUT_VARIABLE = "D2PLM_STEP_OUTPUT"
CANCELLED = ("CANCELED", "CANCELLED")  # KFP's states of a run that was stopped from outside

log = logging.getLogger(__name__)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Set up a step's messages; an error is one line, and KFP adds the traceback to its log."""
    end_with_parent()
    handlers = logging.getLogger().handlers
    # KFP's own handler would show each message a second time.
    handlers[:] = [known for known in handlers if type(known) is not logging.StreamHandler]
    # On SIGTERM a training's processes are ended in order, so that it saves.
    with _terminal(), unwound_by_sigterm():
        configure_logging()
        done(f"\n── {name} ──")
        try:
            yield
        except Exception as error:
            kind = "" if isinstance(error, D2PLMError) else f"{type(error).__name__}: "
            print(f"d2plm: error: {kind}{error}", file=sys.stderr, flush=True)
            raise


@step("configure")
def configure(
    run_id: str, work_dir: str, claim: str, overrides: str, **parameters: str | float
) -> str:
    """Compose the run's configuration and write it to the work folder; returns the file's path.

    Args:
        run_id: of the pipeline's run.
        work_dir: folder of the run's outputs.
        claim: PersistentVolumeClaim that the training pods mount at `WORKSPACE`.
        overrides: further settings as key=value, separated by spaces.
        parameters: of `PARAMETERS`; empty text and 0 leave a setting to the configuration.
    """
    from d2plm.assembly.preparation import require_fitting_relatives
    from d2plm.assembly.tracked_run import PIPELINE_RUN, with_tags

    words = []
    for name, value in parameters.items():
        key = PARAMETERS[name]
        if isinstance(value, float | int):
            value = int(value)  # KFP's numbers are JSON's: 6 may come as 6.0
        elif value and "." in key:
            value = quoted(value)
        if value:
            words.append(f"{key}={value}")
    # null first: Hydra would add the claim to the default one.
    words += [f"work_dir={quoted(work_dir)}", "launcher.claims=null"]
    words += [f"launcher.claims={{{claim}: {WORKSPACE}}}", *shlex.split(overrides)]
    file, config = config_file(run_id, work_dir), compose("pipeline", words)
    require_fitting_relatives(config)
    relatives = config["generation"]["relatives"]
    if relatives is not None and not Path(relatives).exists() and (IMAGE / relatives).exists():
        config["generation"]["relatives"] = str(IMAGE / relatives)  # pods run in another folder
    with_tags(config, **{PIPELINE_RUN: run_id}).save(file)
    done(f"wrote {file}")
    return str(file)


def config_file(run_id: str, work_dir: str) -> Path:
    """Where the configuration of a run of the pipeline is."""
    return Path(work_dir) / "pipeline_runs" / f"{run_id}.yaml"


@step("prepare")
def prepare(config: str) -> str:
    """Prepare the data; returns the digest of the training store."""
    from d2plm.commands.prepare import run

    return str(run(read(Path(config), [], own=True))["digests"]["train"])


@step("train")
def train(config: str) -> str:
    """Train where the launcher's settings say; returns the folder of the exported model."""
    from d2plm.assembly.training_job import launch_step, where_to_train
    from d2plm.launch.torchrun import train_locally

    file = Path(config)
    settings = read(file, [], own=True)
    kind = where_to_train(settings)
    if kind == "local":
        train_locally(file, settings["distributed"]["processes"])
    else:
        launch_step(settings, kind, file)
    return str(settings["model_dir"])


@step("evaluate")
def evaluate(config: str) -> float:
    """Evaluate the exported model; returns its perplexity."""
    from d2plm.commands.evaluate import run

    return float(run(_read_for_this_pod(config))["model"]["perplexity"])


@step("register")
def register(config: str) -> str:
    """Register the evaluated model; returns its version."""
    from d2plm.commands.register import run

    return run(read(Path(config), [], own=True)).version


@step("generate")
def generate(config: str) -> str:
    """Sample proteins from the exported model and report on them; returns the FASTA file's path.

    Raises:
        D2PLMError: as the commands do; if only the report fails, the FASTA file is written.
    """
    from d2plm.assembly.generation import generate
    from d2plm.commands.report import report_on_proteins
    from d2plm.export.designs import FASTA
    from d2plm.tracking.locations import open_export

    settings = _read_for_this_pod(config)
    output = Path(settings["output_dir"]) / FASTA
    trainer = settings["trainer"]
    exported = open_export(settings["model_dir"], trainer["device"])
    generate(exported, settings["generation"], output, trainer["precision"])
    try:
        report_on_proteins(settings, exported)
    except D2PLMError as error:
        raise type(error)(f"{output} is written, but not the report on it: {error}") from error
    return str(output)


def finish(run_id: str, work_dir: str, state: str, message: str = "") -> None:
    """End what failed or cancelled steps left running: the training job and the MLflow run.

    An MLflow run that has ended keeps its status. Errors are logged and not raised, because the
    steps' own failure is the one to report.

    Args:
        run_id: of the pipeline's run.
        work_dir: folder of the run's outputs.
        state: KFP's word for how the steps ended, such as SUCCEEDED, FAILED or CANCELED.
        message: KFP's message about a failure.
    """
    file = config_file(run_id, work_dir)
    if state == "SUCCEEDED" or not file.is_file():  # without it, no step but the first has started
        return
    with step("finish"):
        from d2plm.assembly.training_job import end_step

        config = read(file, [], own=True)
        for end in (
            partial(end_step, config, file),
            partial(_end_tracking, config, state, message),
        ):
            try:
                end()
            except D2PLMError as error:
                log.warning("what the steps have left running: %s", error)


def _end_tracking(config: Config, state: str, message: str) -> None:
    from d2plm.tracking.mlflow_run import end_left_running

    if "mlflow" not in config["tracking"]["trackers"]:
        return
    status = "KILLED" if state in CANCELLED else "FAILED"
    uri, tags = config["tracking"]["uri"], {"pipeline.state": state, "pipeline.error": message}
    tracked = end_left_running(Path(config["output_dir"]), status, uri=uri, tags=tags)
    if tracked is not None:
        done(f"the tracking run {tracked} is marked {status}")


def _read_for_this_pod(config: str) -> Config:
    """The configuration, on CPU in a pod without the GPUs that the training pods have."""
    import torch

    settings = read(Path(config), [], own=True)
    if settings["trainer"]["device"] != "cuda" or torch.cuda.is_available():
        return settings
    log.warning("trainer.device=cuda: this step has no GPU (evaluate_gpus) and runs on its CPUs")
    return read(Path(config), ["trainer.device=cpu", "trainer.precision=auto"], own=True)


@contextmanager
def _terminal() -> Iterator[None]:
    """Write to the terminal of `d2plm pipeline run`, if it has started the step.

    KFP's runner reads the standard output of a step and mixes it with its own messages.
    """
    if OUTPUT_VARIABLE not in os.environ:
        yield
        return
    streams = {stream: os.dup(stream.fileno()) for stream in (sys.stdout, sys.stderr)}
    output = os.open(os.environ[OUTPUT_VARIABLE], os.O_WRONLY)
    for stream in streams:
        os.dup2(output, stream.fileno())
    try:
        yield
    finally:
        for stream, before in streams.items():
            stream.flush()
            os.dup2(before, stream.fileno())
