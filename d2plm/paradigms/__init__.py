"""The training paradigms: absorbing discrete diffusion and discrete flow matching."""

import importlib
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING

from d2plm.core.errors import ModelError, did_you_mean

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
        paradigm: type[Paradigm] = getattr(importlib.import_module(PARADIGMS[name]), name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder} is not a whole model folder: {file.name}: {error}; export again"
        ) from error
    known = inspect.signature(paradigm.__init__).parameters
    for key in settings:
        # What this version does not know would be dropped, and its default take its place.
        if not key.startswith("_") and key not in known:
            raise ModelError(
                f"{folder}: {file.name}: unknown setting {key!r}{did_you_mean(key, [*known])}; it "
                "is of another version of D2PLM, or damaged"
            )
    return paradigm.from_config(settings)
