"""Where a model is: the folder of an export, or `models:/NAME@ALIAS` in the MLflow registry."""

from pathlib import Path

from d2plm.core.errors import require
from d2plm.core.precision import resolve_device
from d2plm.export.exported_model import ExportedModel, load_export

REGISTRY = "models:/"


def model_folder(location: object, tracking_uri: str | None = None, *, key: str) -> Path:
    """The folder of the model at `location`, downloaded if it is in the registry.

    Args:
        location: a folder, which need not exist, or `models:/NAME@ALIAS`.
        tracking_uri: of the registry; `MLFLOW_TRACKING_URI` wins.
        key: the name of the location in errors.

    Raises:
        ConfigError: if `location` is neither.
        TrackingError: if the registry does not have it, or cannot be reached.
    """
    wanted = "the folder of a model, or models:/NAME@ALIAS"
    require(isinstance(location, str | Path), key, location, wanted)
    if not str(location).startswith(REGISTRY):
        return Path(str(location))
    name, at, alias = str(location).removeprefix(REGISTRY).partition("@")
    require(bool(name and at and alias), key, location, wanted)
    from d2plm.tracking.mlflow_run import open_client
    from d2plm.tracking.registry import download

    return download(open_client(tracking_uri), name, alias)


def open_model(
    location: object, device: str = "auto", tracking_uri: str | None = None, *, key: str
) -> ExportedModel:
    """The exported model at `location` (see `model_folder`), on `device`.

    Raises:
        ConfigError: if `location` is neither a folder nor in a registry, or the device is missing.
        ModelError: if a file of it is missing or damaged.
        TrackingError: if the registry does not have it, or cannot be reached.
    """
    home = resolve_device(device)
    return load_export(model_folder(location, tracking_uri, key=key), home)
