"""d2plm register: register an evaluated model as a version in the MLflow registry."""

from pathlib import Path

from d2plm.assembly.tracked_run import describe, short_digest, tracked_run
from d2plm.core.errors import ConfigError
from d2plm.core.files import shipped
from d2plm.core.locks import locked
from d2plm.core.terminal import done
from d2plm.settings.commands import PipelineSettings
from d2plm.tracking.mlflow_run import VERSION_TAG
from d2plm.tracking.registry import Registration, export_digest, register


def run(config: PipelineSettings) -> Registration:
    """Register the model, and make it the champion if it is better than the present one."""
    export = shipped(config.model_dir)
    digest = export_digest(export)
    name, trackers = config.tracking.registered_model, config.tracking.trackers
    busy = f"another process is registering the model of {config.output_dir}"
    with (
        locked(Path(config.output_dir) / ".register.lock", busy),
        tracked_run(config, "register") as tracked,
    ):
        if tracked.mlflow is None:
            raise ConfigError(f"tracking.trackers={trackers}: must include mlflow to register")
        registration = register(tracked.mlflow.client, tracked.mlflow.id, export, name, digest)
        tracked.set_tags({VERSION_TAG: registration.version, "model.digest": short_digest(digest)})
        describe(tracked, config, version=(name, registration.version))
    standing = "champion" if registration.is_champion else "candidate"
    done(f"registered {name} version {registration.version} as {standing}: {registration.reason}")
    return registration
