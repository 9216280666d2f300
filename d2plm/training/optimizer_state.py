"""The state of any optimizer in a checkpoint: tensors by parameter name, plus numbers.

The tensors to load are listed in the checkpoint, so no optimizer's moments are hard-coded. A state
tensor is 0-d or has its parameter's shape and sharding, so any number of ranks can load it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.training.checkpoint import Layout

SECTION = "optimizer"  # key of a checkpoint's tensors
_NUMBERS = (bool, int, float, str, type(None))

State = dict[str, dict[str, Tensor]]


def collect(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> tuple[State, dict[str, Any]]:
    """(the live state tensors by parameter and kind, everything else as JSON).

    Raises:
        ConfigError: if a checkpoint cannot hold the state.
    """
    tensors: State = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, _NUMBERS):
                numbers.setdefault(name, {})[kind] = value
            elif isinstance(value, Tensor) and value.shape in (parameter.shape, ()):
                tensors.setdefault(name, {})[kind] = value
            else:
                raise ConfigError(
                    f"a checkpoint cannot hold the state {kind!r} that {_kind(optimizer)} keeps of "
                    f"{name}, which is neither a number nor a tensor of the parameter's shape; "
                    "choose another optimizer"
                )
    groups = [
        {key: value for key, value in group.items() if isinstance(value, _NUMBERS)}
        for group in optimizer.param_groups
    ]
    return tensors, {"kind": _kind(optimizer), "groups": groups, "numbers": numbers}


def allocate(layout: Layout, parameters: Mapping[str, Tensor]) -> State:
    """Zeros on this rank for the optimizer state of a checkpoint with this `layout`.

    Raises:
        CheckpointError: if the checkpoint has state of a parameter that is not trained.
    """
    tensors: State = {}
    for (section, name, *kind), entry in layout:
        if section != SECTION:
            continue
        parameter = parameters.get(name)
        if parameter is None or not parameter.requires_grad:
            raise CheckpointError(f"it holds optimizer state of {name}, which is not trained here")
        shape, dtype = parameter.shape if entry.size else (), entry.properties.dtype
        zeros = torch.zeros(shape, dtype=dtype, device=parameter.device)
        tensors.setdefault(name, {})[".".join(kind)] = zeros
    return tensors


def restore(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], tensors: State, rest: Mapping[str, Any]
) -> None:
    """Load the result of `collect` with the optimizer's `load_state_dict`.

    Raises:
        CheckpointError: if the kind of optimizer or its groups differ.
    """
    if rest["kind"] != _kind(optimizer):
        raise CheckpointError(
            f"it holds the state of {rest['kind']}, and the optimizer is {_kind(optimizer)}"
        )
    if len(rest["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"its optimizer has {len(rest['groups'])} groups of parameters, and this one has "
            f"{len(optimizer.param_groups)}"
        )
    packed = optimizer.state_dict()
    order = (id(p) for group in optimizer.param_groups for p in group["params"])
    number = {parameter: position for position, parameter in enumerate(order)}
    packed["state"] = {
        number[id(parameters[name])]: rest["numbers"].get(name, {}) | tensors.get(name, {})
        for name in {*tensors, *rest["numbers"]} & parameters.keys()
    }
    for group, saved in zip(packed["param_groups"], rest["groups"], strict=True):
        group.update(saved)
    optimizer.load_state_dict(packed)


def _kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
