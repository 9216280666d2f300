"""LoRA: a low-rank update of each matrix of the blocks (Hu et al., arXiv:2106.09685).

The matrices themselves are not changed, so an adapter takes a few per cent of the model's size. The
layers are those of the peft library, which can read the saved folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from d2plm.core.errors import ModelError, require_number
from d2plm.core.files import write_text
from d2plm.model.dit import DiT

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SCALING = 2.0  # α/r, constant so that the rank can be changed at the same learning rate

_MALFORMED = (KeyError, RuntimeError, TypeError, ValueError)  # raised for wrong content
# Parts of peft's parameter names, in a model and in a file.
_BASE, _DOWN, _UP = ".base_layer", ".lora_A.default", ".lora_B.default"
_IN_FILE = "base_model.model."


def add_lora(model: DiT, rank: int, seed: int = 0) -> None:
    """Freeze the model and add a trainable update to each matrix of its blocks, initially zero.

    Raises `ConfigError` if the rank is not a positive integer.

    Args:
        rank: rank of the update BA: A is [rank, inputs], B [outputs, rank].
        seed: A is drawn from the seed and its name; B is zero.
    """
    require_number("lora_rank", rank, integer=True, low=1)
    from peft import inject_adapter_in_model  # takes a second

    named = model.blocks.named_modules(prefix="blocks")
    matrices = [name for name, module in named if isinstance(module, nn.Linear)]
    inject_adapter_in_model(_config(rank, matrices), model)
    for name, parameter in model.named_parameters():
        if _DOWN in name:
            with torch.no_grad():
                # Under another name, because some of the model's matrices start at zero.
                drawn = model.initial_value(name.replace(".", "/"), parameter.shape, seed)
                parameter.copy_(drawn)


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the plain model, by name, given those of a model with LoRA layers."""
    plain = {}
    for name, weight in weights.items():
        if _DOWN in name or _UP in name:
            continue
        matrix, is_changed, kind = name.partition(_BASE)
        if is_changed and kind == ".weight":
            down, up = (weights[f"{matrix}{part}.weight"].double() for part in (_DOWN, _UP))
            weight = (weight.double() + SCALING * (up @ down)).to(weight.dtype)
        plain[name.replace(_BASE, "")] = weight
    return plain


def save_adapter(folder: Path, weights: Mapping[str, Tensor], base: str, digest: str) -> None:
    """Write only the adapter into an existing folder.

    Args:
        weights: parameters of a model with LoRA layers, by name.
        base: location of the base model.
        digest: digest of the base model's weights.
    """
    own = {
        _IN_FILE + name.replace(".default", ""): weight
        for name, weight in weights.items()
        if _DOWN in name or _UP in name
    }
    ranks = [weight.shape[0] for name, weight in own.items() if ".lora_A." in name]
    matrices = [name.removesuffix(f"{_DOWN}.weight") for name in weights if _DOWN in name]
    config = _config(ranks[0], matrices)
    config.base_model_name_or_path, config.revision, config.inference_mode = base, digest, True
    config.target_modules = sorted(matrices)  # peft has a set, whose order differs between runs
    config.save_pretrained(folder)
    save_file({name: weight.contiguous() for name, weight in own.items()}, folder / WEIGHTS)


def base_of(folder: Path) -> tuple[str, str]:
    """Location and digest of the base model of an adapter; `ModelError` if the file is damaged."""
    try:
        settings = _settings(folder)
        return str(settings["base_model_name_or_path"]), str(settings["revision"])
    except (OSError, *_MALFORMED) as error:
        raise ModelError(f"{folder / CONFIG}: is damaged ({error}); save it again") from error


def apply_adapter(model: DiT, folder: Path) -> None:
    """Add the adapter in the folder to the weights of its base model.

    Raises `ModelError` if a file is missing or damaged, or belongs to another model.
    """
    try:
        changes, settings = load_file(folder / WEIGHTS), _settings(folder)
        scaling = settings["lora_alpha"] / settings["r"]
        matrices = dict(model.named_parameters())
        for name in [name for name in changes if ".lora_A." in name]:
            weight = matrices[name.removeprefix(_IN_FILE).replace(".lora_A.", ".")]
            up, down = changes[name.replace(".lora_A.", ".lora_B.")], changes[name]
            if len(down) != settings["r"]:
                raise ValueError(f"{name} has rank {len(down)}, {CONFIG} has r={settings['r']}")
            change = scaling * (up.double() @ down.double())
            weight.data = (weight.double() + change).to(weight.dtype)
    except (OSError, SafetensorError, ArithmeticError, *_MALFORMED) as error:
        raise ModelError(
            f"{folder}: the adapter cannot be added to its base model ({error}); save it again"
        ) from error


def scale_adapter(folder: Path, share: float) -> None:
    """Multiply the adapter in the folder by `share`, through its scale factor."""
    settings = _settings(folder)
    settings["lora_alpha"] *= share
    write_text(folder / CONFIG, json.dumps(settings, indent=2))


def is_changed(weights: Mapping[str, Tensor]) -> bool:
    """Whether these are the weights of a model with LoRA layers."""
    return any(_DOWN in name for name in weights)


def _settings(folder: Path) -> dict[str, Any]:
    return {**json.loads((folder / CONFIG).read_text(encoding="utf-8"))}


def _config(rank: int, matrices: list[str]) -> "LoraConfig":
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=int(SCALING * rank), target_modules=matrices, bias="none")
