"""LossScale: keeps fp16 gradients from vanishing, without looking at them from the host.

The loss is multiplied before the backward and the gradients divided after it; where one overflowed,
the fused optimizer leaves the step out and the scale is halved (Micikevicius et al.,
arXiv:1710.03740, section 3.2). Everything stays on the device.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

START = 2.0**16
GROWTH_INTERVAL = 2000


class LossScale:
    """A factor of the loss that halves on overflow and doubles after 2,000 steps without one.

    Attributes:
        scale: fp32, 0-d.
        good_steps: int32, 0-d; steps since the scale last changed.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), START, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, grad_norm: Tensor, optimizer: Optimizer) -> None:
        """Judge a step by its gradient norm and tell the optimizer whether to leave it out."""
        overflow = ~torch.isfinite(grad_norm)
        optimizer.found_inf = overflow.float()  # type: ignore[attr-defined]  # read by its kernels
        torch._amp_update_scale_(
            self.scale, self.good_steps, overflow.float(), 2.0, 0.5, GROWTH_INTERVAL
        )

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, live."""
        return {"scale": self.scale, "good_steps": self.good_steps}
