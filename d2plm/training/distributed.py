"""Where training runs: the process, its device and precision, and how the model is applied to it.

One process for now; the model file knows nothing of what happens here. Precision follows FSDP2's
policy: fp32 master weights, the matrix work in bf16, gradients summed in fp32.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import PartialState
from torch import Tensor, nn

from d2plm.errors import ConfigError, require
from d2plm.precision import resolve_device

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Process:
    """This process among the data-parallel ones, and its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that logs."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all ranks."""
        return value


def setup_process(device: str = "auto") -> Process:
    """Find this process's rank and device from what `torchrun` or `accelerate launch` set.

    Raises:
        ConfigError: on a device that this machine lacks, or more than one process.
    """
    state = PartialState(cpu=resolve_device(device) == "cpu")
    if state.num_processes > 1:
        raise ConfigError(
            f"distributed.processes={state.num_processes}: training runs in one process; "
            "start one per run"
        )
    return Process(state.process_index, state.num_processes, torch.device(state.device))


def compile_blocks(blocks: nn.ModuleList, setting: bool | str, device: torch.device) -> bool:
    """Compile each block in place where it can be done; returns whether it was.

    `auto` compiles on CUDA alone: on a CPU it pays only in runs of minutes, and needs a compiler
    and Python's headers. Where these are missing, that is said once and the run goes on without.
    """
    require(setting in (True, False, "auto"), "trainer.compile", setting, "auto, true or false")
    if setting is False or (setting == "auto" and device.type == "cpu"):
        return False
    try:
        torch.compile(lambda x: x + 1)(torch.ones(8, device=device))
    except Exception as error:  # the compiler tool chain fails in as many ways as it has parts
        reason = str(error).strip().splitlines()[0]
        log.warning("trainer.compile: running uncompiled, as the compiler fails here: %s", reason)
        return False
    for block in blocks:
        block.compile(fullgraph=True)
    return True


def in_precision(model: nn.Module, dtype: torch.dtype) -> Callable[..., Tensor]:
    """`model` as a function whose parameters are cast to `dtype` at each call.

    The single-process counterpart of FSDP2's `MixedPrecisionPolicy`: the parameters stay fp32
    masters and their gradients come out in fp32.
    """
    if all(parameter.dtype == dtype for parameter in model.parameters()):
        return model

    def forward(*inputs: object) -> Tensor:
        cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, cast, inputs)

    return forward
