"""The training paradigms: absorbing discrete diffusion and discrete flow matching."""

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from d2plm.errors import ModelError

if TYPE_CHECKING:
    from d2plm.paradigms.base import Paradigm

# Class name, as saved with a model → its module.
PARADIGMS = {
    "AbsorbingDiffusion": "d2plm.paradigms.diffusion",
    "MaskFlowMatching": "d2plm.paradigms.flow_matching",
    "UniformFlowMatching": "d2plm.paradigms.flow_matching",
}


def load_paradigm(folder: Path) -> "Paradigm":
    """The paradigm whose settings are saved in an export folder.

    Raises:
        ModelError: if they are missing, damaged or of an unknown paradigm.
    """
    file = folder / "paradigm_config.json"
    try:
        settings = json.loads(file.read_text())
        name = settings["_class_name"]
        module = importlib.import_module(PARADIGMS[name])
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{folder} is not a whole model folder: {file.name}: {error}; export again"
        ) from error
    return getattr(module, name).from_config(settings)
