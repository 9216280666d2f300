"""The training paradigms: absorbing discrete diffusion and discrete flow matching."""

import importlib
import inspect
import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from d2plm.core.errors import ModelError, did_you_mean, first_line
from d2plm.core.vocabulary import open_vocabulary

if TYPE_CHECKING:
    from d2plm.paradigms.paradigm import Paradigm

# Class name, as saved with a model → its module.
PARADIGMS = {
    "AbsorbingDiffusion": "d2plm.paradigms.diffusion",
    "MaskFlowMatching": "d2plm.paradigms.flow_matching",
    "UniformFlowMatching": "d2plm.paradigms.flow_matching",
}
ENTRY_POINTS = "d2plm.paradigms"  # group in which other packages register theirs, by class name


def load_paradigm(folder: Path) -> "Paradigm":
    """The paradigm whose settings are saved in an export folder, with the vocabulary saved there.

    A paradigm of another package is found by its entry point in the group `d2plm.paradigms`, whose
    name is the name of the class.

    Raises:
        ModelError: if the settings are missing or damaged, or the paradigm is not installed.
    """
    file = folder / "paradigm_config.json"
    try:
        settings = json.loads(file.read_text())
        name = str(settings["_class_name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{folder} is not a whole model folder: {file.name}: {error}; export again"
        ) from error
    paradigm = _class_of(name, file)
    known = inspect.signature(paradigm.__init__).parameters
    for key in settings:
        # An unknown setting would be dropped, and the default of another take its place.
        if not key.startswith("_") and key not in known:
            raise ModelError(
                f"{folder}: {file.name}: unknown setting {key!r}{did_you_mean(key, [*known])}; it "
                "is of another version of D2PLM, or damaged"
            )
    loaded = paradigm.from_config(settings)
    loaded.vocabulary = open_vocabulary(folder)
    return loaded


def _class_of(name: str, file: Path) -> "type[Paradigm]":
    if name in PARADIGMS:
        return getattr(importlib.import_module(PARADIGMS[name]), name)
    registered = entry_points(group=ENTRY_POINTS)
    if name not in registered.names:
        known = [*PARADIGMS, *sorted(registered.names)]
        raise ModelError(
            f"{file}: unknown paradigm {name!r}{did_you_mean(name, known)}; install the package "
            f"that registers it as an entry point in the group {ENTRY_POINTS} (known: "
            f"{', '.join(known)})"
        )
    try:
        return registered[name].load()
    except Exception as error:  # other packages may raise anything
        raise ModelError(
            f"{file}: the entry point {registered[name].value} of paradigm {name!r} cannot be "
            f"loaded: {first_line(error)}"
        ) from error
