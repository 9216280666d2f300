"""GradientHealth: stops a run whose gradients are no longer numbers."""

import torch

from d2plm.errors import ModelError, require_number
from d2plm.training.callbacks.base import Callback
from d2plm.training.trainer import Trainer


class GradientHealth(Callback):
    """Stop on a NaN or infinite gradient or loss; with `every=1`, before it reaches the weights.

    Looking forces a host synchronisation: on an accelerator, look less often.

    Args:
        every: optimizer steps between looks.
    """

    def __init__(self, every: int = 1) -> None:
        require_number("callbacks.gradient_health.every", every, integer=True, low=1)
        self.every = every

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        if trainer.step % self.every:
            return
        for quantity, value in (("loss", trainer.loss), ("gradient norm", trainer.grad_norm)):
            if not torch.isfinite(value):
                raise ModelError(
                    f"step {trainer.step}: the {quantity} is {value.item()}; lower "
                    "optimizer.learning_rate or set trainer.precision=fp32, and resume from the "
                    "last checkpoint"
                )
