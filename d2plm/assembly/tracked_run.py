"""Logging to the tracking run of a command: name, tags, data, settings and description."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from d2plm import __version__
from d2plm.config import as_yaml, flat
from d2plm.core.files import write_text
from d2plm.core.machine import user_name
from d2plm.core.number_text import short_number
from d2plm.core.redaction import redacted_settings
from d2plm.core.versions import git_revision
from d2plm.data.manifest import MANIFEST, read_manifest
from d2plm.settings.commands import PipelineSettings
from d2plm.tracking.description import description
from d2plm.tracking.mlflow_run import GIT_TAG, SOURCE_TAG, system_metrics
from d2plm.tracking.runs import Run, Runs, tracking_run

PIPELINE_RUN = "pipeline.run"


@contextmanager
def tracked_run(config: PipelineSettings, command: str) -> Iterator[Runs]:
    """Open the tracking run of `output_dir` and set the command's tags; see `tracking_run`."""
    with tracking_run(Path(config.output_dir), **tracking_arguments(config)) as tracked:
        if tracked.runs:
            tracked.set_tags(_tags(config, command))
        yield tracked


def tracking_arguments(config: PipelineSettings) -> dict[str, Any]:
    """Convert the `tracking` section to arguments of `tracking_run`."""
    section = config.tracking
    arguments: dict[str, Any] = {
        "trackers": section.trackers,
        "uri": section.uri,
        "experiment": section.experiment,
        "run_name": section.run_name,
        "parent_run_id": section.parent_run_id,
    }
    if arguments["run_name"] is None:
        arguments["run_name"] = f"{_title(config)} {datetime.now():%m-%d %H:%M}"
    return arguments


def with_tags(config: PipelineSettings, **tags: str) -> PipelineSettings:
    tracking = config.tracking
    return replace(config, tracking=replace(tracking, tags={**tracking.tags, **tags}))


def system_metrics_logged(config: PipelineSettings, tracked: Runs) -> AbstractContextManager[None]:
    """Log MLflow's system metrics inside the block, at the configured interval."""
    mlflow, seconds = tracked.mlflow, config.tracking.system_metrics
    return system_metrics(mlflow, seconds) if mlflow and seconds else nullcontext()


def log_data(tracked: Run, prepared_dir: Path, mixture: Mapping[str, Path]) -> None:
    """Log the prepared data as the run's inputs, with the manifest; nothing without a manifest.

    Args:
        prepared_dir: folder of the held-out proteins and, without a mixture, of the training
            proteins.
        mixture: name → prepared folder of training proteins.
    """
    manifest = read_manifest(prepared_dir)
    if manifest is None:
        return
    digests = manifest["digests"]
    for split in digests:
        if split != "train" or not mixture:
            _log_dataset(tracked, manifest, split, prepared_dir)
    for folder in mixture.values():
        member = read_manifest(folder)
        if member is not None:
            _log_dataset(tracked, member, "train", folder)
    tracked.set_tags(
        {
            "data": " + ".join(mixture) or manifest["input"],
            **{f"data.{split}_digest": short_digest(digests[split]) for split in digests},
            "data.leaking_pairs_after": str(manifest["leaking_pairs_after"]),
        }
    )
    tracked.log_file(prepared_dir / MANIFEST, "data")


def _log_dataset(tracked: Run, manifest: dict[str, Any], split: str, folder: Path) -> None:
    counts = manifest["counts"]
    profile = {
        "num_rows": counts[f"{split}_sequences"],
        "num_elements": counts[f"{split}_residues"],
        "clusters": counts[f"{split}_clusters"],
    }
    tracked.log_dataset(
        f"{manifest['input']}:{split}",
        manifest["digests"][split],
        split,
        (folder / f"{split}_lmdb").resolve(),
        profile,
    )


def short_digest(digest: str) -> str:
    """Shorten a SHA-256 for tags."""
    return digest[:16]


def log_model(tracked: Run, parameters: int, step: int, steps: int) -> None:
    tracked.set_tags({"parameters": short_number(parameters), "steps": f"{step:,} of {steps:,}"})


def log_settings(tracked: Run, config: PipelineSettings, **more: Any) -> None:
    """Log the configuration without secrets, as a file and as parameters.

    The parameters exclude the launcher section, because the result does not depend on it.
    """
    shown = redacted_settings(asdict(config))
    settings = {k: v for k, v in flat(shown).items() if not k.startswith("launcher.")}
    tracked.log_params({**settings, **more})
    with tempfile.TemporaryDirectory(prefix="d2plm-") as folder:
        file = Path(folder) / "config.yaml"
        write_text(file, as_yaml(shown))  # without secrets, for all readers of the run
        tracked.log_file(file, "config")


def describe(
    tracked: Run, config: PipelineSettings, version: tuple[str, str] | None = None
) -> None:
    """Describe the run from the files in its folders; `version`: (name, number) in the registry."""
    tracked.describe(
        description(
            name=config.name,
            paradigm=config.paradigm.name,
            output_dir=Path(config.output_dir),
            model_dir=Path(config.model_dir),
            version=version,
        )
    )


def _title(config: PipelineSettings) -> str:
    """Name and paradigm, such as `demo diffusion`; only the name if the two are equal."""
    name, paradigm = config.name, config.paradigm.name.replace("_", " ")
    return name if name.replace("_", " ") == paradigm else f"{name} {paradigm}"


def _tags(config: PipelineSettings, command: str) -> dict[str, str]:
    """Tags of every run; those with the prefix `mlflow.` fill columns of MLflow's run list."""
    tags = {
        "paradigm": config.paradigm.name,
        "d2plm.version": __version__,
        SOURCE_TAG: f"d2plm {command}",
        "mlflow.source.type": "JOB" if "KUBERNETES_SERVICE_HOST" in os.environ else "LOCAL",
    }
    found = {"mlflow.user": user_name(), GIT_TAG: git_revision()}
    tags |= {key: value for key, value in found.items() if value is not None}
    own = config.tracking.tags
    return tags | {str(key): str(value) for key, value in own.items()}
