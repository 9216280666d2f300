"""SaveCheckpoint: a checkpoint every so many steps, and at the end."""

from d2plm.errors import require_number
from d2plm.training.callbacks.base import Callback
from d2plm.training.trainer import Trainer


class SaveCheckpoint(Callback):
    """Save every `every` steps and after the last.

    Args:
        every: optimizer steps between checkpoints.
    """

    def __init__(self, every: int = 500) -> None:
        require_number("callbacks.checkpoint.every", every, integer=True, low=1)
        self.every = every

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step % self.every == 0 or trainer.is_last_step:
            trainer.save()
