"""GradientHealth: stops a run whose gradients are no longer numbers."""

import torch

from d2plm.errors import ModelError, require
from d2plm.training.callbacks.base import Callback
from d2plm.training.trainer import Trainer


class GradientHealth(Callback):
    """Stop on a NaN or infinite gradient or loss, before it reaches the weights.

    Looking forces a host synchronisation, so on an accelerator it is done every `every` steps.

    Args:
        every: optimizer steps between looks.
    """

    def __init__(self, every: int = 1) -> None:
        require(every >= 1, "callbacks.gradient_health.every", every, "≥ 1")
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
