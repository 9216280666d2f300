"""Settings of tracking."""

from dataclasses import dataclass
from typing import Any, Literal

from d2plm.settings.schema import Form, Settings, key

# Rejected by MLflow after the upload, or impossible in models:/NAME@ALIAS.
_NOT_IN_MODEL_NAMES = r"/:@'\"%#?\\\x00-\x1f"
MODEL_NAME = Form(
    rf"(?!\.+$)[^\s{_NOT_IN_MODEL_NAMES}]"
    rf"([^{_NOT_IN_MODEL_NAMES}]{{0,254}}[^\s{_NOT_IN_MODEL_NAMES}])?",
    "a name of up to 256 characters without / : @ ' \" % # ? \\, not of dots alone, and without "
    "spaces at its ends",
)
EXPERIMENT = Form(
    r"\S([^\x00-\x1f]{0,498}\S)?", "a name of up to 500 characters without spaces at its ends"
)


@dataclass(frozen=True, kw_only=True)
class TrackingSettings(Settings):
    """Where runs are tracked; MLFLOW_TRACKING_URI takes precedence over uri."""

    trackers: list[Literal["mlflow", "tensorboard", "wandb"]] = key(["mlflow"])
    """any of mlflow, tensorboard, wandb; []: none"""
    uri: str = key("sqlite:///${work_dir}/mlflow.db")
    """address of the MLflow store; MLFLOW_TRACKING_URI takes precedence"""
    experiment: str = key("d2plm-${paradigm.name}", form=EXPERIMENT)
    """MLflow's experiment; W&B's project"""
    run_name: str | None = key(None)
    """name of the run; null: name, paradigm, model size and start time"""
    tags: dict[str, Any] = key({})
    """tags, such as tracking.tags.project=antibodies"""
    parent_run_id: str | None = key(None)
    """parent run in MLflow; group in W&B"""
    system_metrics: float | None = key(10, above=0)
    """seconds between samples of processors, memory and GPUs; null: none"""
    registered_model: str = key("d2plm", composed="d2plm-${paradigm.name}", form=MODEL_NAME)
    """name in MLflow's registry"""
