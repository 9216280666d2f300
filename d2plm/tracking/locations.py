"""Locations of models: a folder, the MLflow registry, or the Hugging Face Hub."""

import logging
import os
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from d2plm.core.errors import ModelError, first_line, require
from d2plm.core.files import is_hub_name, nearest_path, shipped
from d2plm.core.precision import resolve_device
from d2plm.core.waiting import waiting
from d2plm.export.exported_model import ExportedModel, load_export
from d2plm.settings.commands import PRETRAINED
from d2plm.settings.schema import Settings, key

REGISTRY = "models:/"
HUB_FILES = ("*.json", "*.txt", "*.md", "*.safetensors")  # excludes files that could run code

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HubSettings(Settings):
    """Options for files of the Hugging Face Hub, as in `from_pretrained`."""

    revision: str | None = key(None)
    """branch, tag or commit"""
    token: str | bool | None = key(None)
    """token, or whether the saved one is used"""
    cache_dir: str | Path | None = key(None)
    """folder of the downloaded files"""
    subfolder: str | None = key(None)
    """folder of the model in the repository, or in the folder of another location"""
    local_files_only: bool | None = key(None)
    """whether nothing is downloaded"""
    force_download: bool | None = key(None)
    """whether files are downloaded again"""


def model_folder(
    location: object, tracking_uri: str | None = None, *, key: str, hub: HubSettings = HubSettings()
) -> Path:
    """Return the folder of the model at `location`, downloading it if necessary.

    Args:
        location: a folder (which need not exist), `models:/NAME@ALIAS`, `models:/NAME/VERSION`, or
            `ORGANISATION/NAME` on the Hugging Face Hub.
        tracking_uri: URI of the registry; `MLFLOW_TRACKING_URI` takes precedence.
        key: name of the location in errors.
        hub: options for a model on the Hub.

    Raises:
        ConfigError: if `location` is none of these, or has no revisions.
        ModelError: if the Hub does not have the model or cannot be reached.
        TrackingError: if the registry does not have the model or cannot be reached.
    """
    text = pinned(location, tracking_uri, key=key)
    if (own := shipped(text)) != Path(text):
        text = str(own)
    if is_hub_name(text):
        return _from_hub(text, hub)
    wanted = f"None for {text}, which is not on the Hugging Face Hub"
    require(hub.revision is None, "revision", hub.revision, wanted)
    folder = Path(os.path.expanduser(text))
    if text.startswith(REGISTRY):
        from d2plm.tracking.mlflow_run import open_client
        from d2plm.tracking.registry import download

        name, version = text.removeprefix(REGISTRY).split("/")
        folder = download(open_client(tracking_uri), name, version)
    return folder / (hub.subfolder or "")


def pinned(location: object, tracking_uri: str | None = None, *, key: str) -> str:
    """Replace an alias in `location` by its version, because aliases may move."""
    wanted = "the folder of a model, models:/NAME@ALIAS or models:/NAME/VERSION"
    require(isinstance(location, str | Path), key, location, wanted)
    text = str(location)
    if not text.startswith(REGISTRY) or re.fullmatch(rf"{REGISTRY}[^@/]+/\d+", text):
        return text
    name, _, alias = text.removeprefix(REGISTRY).partition("@")
    require(bool(name and alias and "/" not in name), key, location, wanted)
    from d2plm.tracking.mlflow_run import open_client
    from d2plm.tracking.registry import version_of

    return f"{REGISTRY}{name}/{version_of(open_client(tracking_uri), name, alias)}"


def _from_hub(name: str, hub: HubSettings) -> Path:
    from huggingface_hub import snapshot_download

    log.info("%s: no such folder, using the model of this name on the Hugging Face Hub", name)
    given = {key: value for key, value in vars(hub).items() if value is not None}
    inside = given.pop("subfolder", "")
    patterns = [Path(inside, one).as_posix() for one in HUB_FILES]
    try:
        with waiting(f"the Hugging Face Hub, to send {name}"):
            return Path(snapshot_download(name, allow_patterns=patterns, **given), inside)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{name}: no such model folder{nearest_path(name)}, and no such model on the Hugging "
            f"Face Hub: {first_line(error)}"
        ) from error


def open_export(
    folder: str | Path,
    device: str = "auto",
    tracking_uri: str | None = None,
    hub: HubSettings = HubSettings(),
) -> ExportedModel:
    """Load the model in a local folder, on `device`; an adapter is loaded with its base.

    Raises:
        ConfigError: if the device is not available.
        ModelError: if a file of the model is missing or damaged.
        TrackingError: if the registry does not have the adapter's base or cannot be reached.
    """
    hub, key = replace(hub, revision=None, subfolder=None), "the adapter's base model"
    find_base = partial(model_folder, tracking_uri=tracking_uri, key=key, hub=hub)
    return load_export(folder, resolve_device(device), find_base)


def open_model(
    location: object, device: str = "auto", tracking_uri: str | None = None, *, key: str
) -> ExportedModel:
    """Load the model at `location` on `device`; see `model_folder` and `open_export`."""
    say_if_shipped(location, key)
    return open_export(model_folder(location, tracking_uri, key=key), device, tracking_uri)


def say_if_shipped(location: object, key: str) -> None:
    """Log that the shipped model is used, which may be the default."""
    if location == PRETRAINED:
        log.info("model: %s, which is part of D2PLM (%s=… chooses another)", location, key)
