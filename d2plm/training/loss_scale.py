"""LossScale: keeps fp16 gradients from underflowing, without reading them on the host.

The loss is multiplied before the backward and the gradients are divided after it. If a gradient
overflows, the fused optimizer skips the step and the scale is halved (Micikevicius et al.,
arXiv:1710.03740, section 3.2).
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from d2plm.core.errors import ConfigError

START = 2.0**16
GROWTH_INTERVAL = 2000


class LossScale:
    """A factor of the loss that halves on overflow and doubles after 2,000 steps without one.

    Attributes:
        scale: fp32, 0-d.
        good_steps: int32, 0-d; steps since the scale last changed.
        overflow: bool, 0-d; whether a gradient of the current step is not finite.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), START, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.overflow = torch.zeros((), dtype=torch.bool, device=device)

    @staticmethod
    def require_skipping(optimizer: Optimizer) -> None:
        """Raise ConfigError unless the optimizer can skip a step without synchronisation."""
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ConfigError(
                f"{type(optimizer).__name__} cannot skip a step whose gradient overflows; use bf16 "
                "or fp32, or an optimizer that takes fused=True (Adam, AdamW, SGD)",
                {"precision": "fp16"},
            )

    def update(self, grad_norm: Tensor) -> None:
        """Record whether the step's gradient overflows, and update the scale."""
        self.overflow = ~torch.isfinite(grad_norm)
        torch._amp_update_scale_(
            self.scale, self.good_steps, self.overflow.float(), 2.0, 0.5, GROWTH_INTERVAL
        )

    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step, which changes neither weights nor state on overflow."""
        is_first = not optimizer.state
        optimizer.found_inf = self.overflow.float()  # type: ignore[attr-defined]  # read by its kernels
        optimizer.step()
        if is_first:  # SGD leaves newly allocated momentum uninitialised on overflow
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.masked_fill_(self.overflow.to(value.device, non_blocking=True), 0)

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors saved in a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}
