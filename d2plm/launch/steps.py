"""The pipeline's steps, as its components call them on a laptop and in a cluster.

Each takes the run's settings as one line of Hydra overrides, composes `pipeline.yaml` and calls the
command of its name. What a step needs is imported inside it: the preparation's image has no torch.
"""

import shlex
from pathlib import Path

from d2plm.cli import configure_logging
from d2plm.config import Config, compose


def prepare(settings: str) -> str:
    """Prepare the data; gives the digest of the training store."""
    from d2plm.commands.prepare import run

    return str(run(_compose(settings))["digests"]["train"])


def train(settings: str, run_id: str = "") -> str:
    """Train where `launcher` says; gives the folder of the exported model.

    Args:
        settings: Hydra overrides.
        run_id: of the pipeline's run.
    """
    from d2plm.commands.job import launch_step, where_to_train
    from d2plm.launch.local import train_locally

    config = _compose(settings)
    requested = Path(config["output_dir"]) / "config.requested.yaml"
    config.save(requested)
    kind = where_to_train(config["launcher"]["kind"])
    if kind == "local":
        train_locally(requested, config["distributed"]["processes"])
    else:
        launch_step(config, kind, requested, run_id)
    return str(config["model_dir"])


def evaluate(settings: str) -> float:
    """Evaluate the exported model; gives its perplexity."""
    from d2plm.commands.evaluate import run

    return float(run(_compose(settings))["model"]["perplexity"])


def register(settings: str) -> str:
    """Register the evaluated model; gives the version."""
    from d2plm.commands.register import run

    return run(_compose(settings)).version


def generate(settings: str) -> str:
    """Sample proteins from the exported model; gives the FASTA file."""
    from d2plm.commands.generate import generate
    from d2plm.export import load_export
    from d2plm.precision import resolve_device

    config = _compose(settings)
    output = Path(config["output_dir"]) / "generated.fasta"
    precision = config["trainer"]["precision"]
    exported = load_export(config["model_dir"], resolve_device(config["trainer"]["device"]))
    generate(exported, config["generation"], output, precision)
    return str(output)


def _compose(settings: str) -> Config:
    configure_logging()
    return compose("pipeline", shlex.split(settings))
