"""The pipeline's steps, as its components call them on a laptop and in a cluster.

Each takes the run's settings as one line of Hydra overrides, composes `pipeline.yaml` and calls the
command of its name. In that line, the pipeline's own parameters come first and those left empty or
0 say nothing; after `--` come the user's overrides, which are taken as they are. What a step needs
is imported inside it: the preparation's image has no torch.
"""

import logging
import re
import shlex
from pathlib import Path

from d2plm.config import Config, compose
from d2plm.core.errors import ConfigError, D2PLMError
from d2plm.core.terminal import configure_logging, done

UNSAID = ("", '""', "0")  # a parameter's value that leaves it to the configuration
# How KFP says that a run was stopped from outside.
CANCELLED = ("CANCELED", "CANCELLED")

log = logging.getLogger(__name__)


def prepare(settings: str) -> str:
    """Prepare the data; gives the digest of the training store."""
    from d2plm.commands.prepare import run

    return str(run(_compose(settings))["digests"]["train"])


def train(settings: str, run_id: str = "") -> str:
    """Train where `launcher` says; gives the folder of the exported model.

    Args:
        settings: see the module.
        run_id: of the pipeline's run.
    """
    from d2plm.assembly.tracked_run import PIPELINE_RUN, with_tags
    from d2plm.launch.launcher import launch_step, where_to_train
    from d2plm.launch.local import train_locally

    config = with_tags(_compose(settings), **({PIPELINE_RUN: run_id} if run_id else {}))
    requested, processes = _requested(config), config["distributed"]["processes"]
    config.save(requested)
    kind = where_to_train(config["launcher"]["kind"])
    if kind == "local":
        train_locally(requested, processes)
    else:
        launch_step(
            config["launcher"],
            kind,
            config_file=requested,
            run_id=run_id,
            processes=processes,
            device=config["trainer"]["device"],
        )
    return str(config["model_dir"])


def evaluate(settings: str) -> float:
    """Evaluate the exported model; gives its perplexity."""
    from d2plm.commands.evaluate import run

    return float(run(_compose_for_here(settings))["model"]["perplexity"])


def register(settings: str) -> str:
    """Register the evaluated model; gives the version."""
    from d2plm.commands.register import run

    return run(_compose(settings)).version


def generate(settings: str) -> str:
    """Sample proteins from the exported model, and report on them; gives the FASTA file.

    Raises:
        D2PLMError: as the commands; where only the report fails, the FASTA file is written.
    """
    from d2plm.commands.generate import generate
    from d2plm.commands.report import report_on_proteins
    from d2plm.core.precision import resolve_device
    from d2plm.export.designs import FASTA
    from d2plm.export.exported_model import load_export

    config = _compose_for_here(settings)
    output = Path(config["output_dir"]) / FASTA
    precision = config["trainer"]["precision"]
    exported = load_export(config["model_dir"], resolve_device(config["trainer"]["device"]))
    generate(exported, config["generation"], output, precision)
    try:
        report_on_proteins(config, exported)
    except D2PLMError as error:
        raise type(error)(f"{output} is written, but not the report on it: {error}") from error
    return str(output)


def finish(settings: str, state: str, message: str = "", run_id: str = "") -> None:
    """Leave nothing behind that goes on: no training job, and no MLflow run that seems to.

    A run that has ended stays as it is: registered, or marked by the step that failed. What goes
    wrong here is logged alone, for it must not stand before how the steps ended.

    Args:
        settings: see the module.
        state: KFP's word for how the steps ended, such as SUCCEEDED, FAILED or CANCELED.
        message: what KFP says of a failure.
        run_id: of the pipeline's run.
    """
    if state == "SUCCEEDED":
        return
    for end in (_end_job, _end_tracking):
        try:
            end(_compose(settings), state, message, run_id)
        except ConfigError:
            return  # every step has said so
        except D2PLMError as error:
            log.warning("what the steps have left behind: %s", error)


def _end_job(config: Config, _state: str, _message: str, run_id: str) -> None:
    from d2plm.launch.launcher import end_step

    end_step(config["launcher"], config_file=_requested(config), run_id=run_id)


def _end_tracking(config: Config, state: str, message: str, _run_id: str) -> None:
    from d2plm.tracking.mlflow_run import end_left_running

    if "mlflow" not in config["tracking"]["trackers"]:
        return
    status = "KILLED" if state in CANCELLED else "FAILED"
    uri, tags = config["tracking"]["uri"], {"pipeline.state": state, "pipeline.error": message}
    tracked = end_left_running(Path(config["output_dir"]), status, uri=uri, tags=tags)
    if tracked is not None:
        done(f"the tracking run {tracked} is marked {status}")


def overrides(settings: str) -> list[str]:
    """The Hydra overrides of a line of settings; see the module."""
    words = shlex.split(settings)
    end = words.index("--") if "--" in words else -1
    parameters = [_whole(word) for word in words[: max(end, 0)]]
    said = [word for word in parameters if word.partition("=")[2] not in UNSAID]
    return said + words[end + 1 :]


def _whole(word: str) -> str:
    """`key=6` for `key=6.0`: a number of KFP's is one of JSON's, which knows no integers."""
    return re.sub(r"=(\d+)\.0$", r"=\1", word)


def _requested(config: Config) -> Path:
    """Where the configuration is that the train step trains with."""
    return Path(config["output_dir"]) / "config.requested.yaml"


def _compose_for_here(settings: str) -> Config:
    """The configuration of a step that the GPUs of the training pods are not given to."""
    import torch

    config = _compose(settings)
    if config["trainer"]["device"] != "cuda" or torch.cuda.is_available():
        return config
    log.warning("trainer.device=cuda: this step has no GPU (evaluate_gpus) and goes on on its CPUs")
    on_cpu = ["trainer.device=cpu", "trainer.precision=auto"]
    return compose("pipeline", [*overrides(settings), *on_cpu])


def _compose(settings: str) -> Config:
    configure_logging()
    return compose("pipeline", overrides(settings))
