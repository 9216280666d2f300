"""SaveCheckpoint: a checkpoint at regular steps and at the end."""

from d2plm.core.errors import ConfigError, require_number
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.trainer import Trainer


class SaveCheckpoint(Callback):
    """Save every `every` optimizer steps and after the last one."""

    called_last = True

    def __init__(self, every: int = 500) -> None:
        require_number("every", every, integer=True, low=1)
        self.every = every

    def on_train_begin(self, trainer: Trainer) -> None:
        evaluations = [c.every for c in trainer.callbacks if isinstance(c, Evaluate)]
        if trainer.saver.keep_best and not any(self.every % every == 0 for every in evaluations):
            raise ConfigError(
                f"save_top_k={trainer.saver.keep_best}: only evaluated steps have a bound, and "
                f"checkpoints are saved every {self.every} steps; make that a multiple of the "
                f"steps between evaluations ({evaluations[0] if evaluations else 'none are made'})"
            )

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.step % self.every == 0 or trainer.is_last_step:
            trainer.save()
