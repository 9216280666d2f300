"""The training paradigms: absorbing discrete diffusion and discrete flow matching."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from d2plm.core.errors import ConfigError, ModelError
from d2plm.core.vocabulary import open_vocabulary
from d2plm.settings.registry import find
from d2plm.settings.schema import build

if TYPE_CHECKING:
    from d2plm.paradigms.paradigm import Paradigm


def load_paradigm(folder: Path) -> "Paradigm":
    """The paradigm whose settings are saved in an export folder, with the vocabulary saved there.

    Raises `ModelError` if the settings are missing or damaged, or the paradigm is not registered.
    """
    file = folder / "paradigm_config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        name = str(settings["type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder} is not a whole model folder: {file.name}: {error}; export again"
        ) from error
    try:
        entry = find("paradigm", name, "type")
        loaded: Paradigm = entry.factory(build(entry.settings, settings))
    except ConfigError as error:
        raise ModelError(f"{file}: {error}") from error
    loaded.vocabulary = open_vocabulary(folder)
    return loaded
