"""d2plm register: an evaluated export → a version in the MLflow registry."""

from pathlib import Path

from d2plm.commands.prepare import tracking_arguments
from d2plm.config import Config
from d2plm.errors import ConfigError
from d2plm.terminal import done
from d2plm.tracking.registry import Registration, export_digest, register
from d2plm.tracking.runs import tracking_run


def run(config: Config) -> Registration:
    """Register the model and move the champion's alias if it is better."""
    export = Path(config["model_dir"])
    digest = export_digest(export)
    output_dir = Path(config["output_dir"])
    with tracking_run(output_dir, **tracking_arguments(config), final=True) as tracked:
        if tracked.mlflow is None:
            trackers = config["tracking"]["trackers"]
            raise ConfigError(f"tracking.trackers={trackers}: the registry needs mlflow in it")
        name = config["tracking"]["registered_model"]
        registration = register(tracked.mlflow.client, tracked.mlflow.id, export, name, digest)
        tracked.set_tags({"registered_version": registration.version})
    standing = "champion" if registration.is_champion else "candidate"
    done(f"registered {name} version {registration.version} as {standing}: {registration.reason}")
    return registration
