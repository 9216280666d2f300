"""SaveCheckpoint: a checkpoint at regular steps and at the end."""

from d2plm.core.errors import ConfigError
from d2plm.settings.callbacks import CheckpointSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.trainer import Trainer


class SaveCheckpoint(Callback):
    called_last = True

    def __init__(self, settings: CheckpointSettings | None = None) -> None:
        self.every = (settings or CheckpointSettings()).every

    def on_train_begin(self, trainer: Trainer) -> None:
        evaluations = [c.every for c in trainer.callbacks if isinstance(c, Evaluate)]
        if trainer.saver.keep_best and not any(self.every % every == 0 for every in evaluations):
            between = evaluations[0] if evaluations else "none are made"
            raise ConfigError(
                f"only evaluated steps have a bound, and checkpoints are saved every {self.every} "
                f"steps; make that a multiple of the steps between evaluations ({between})",
                {"save_top_k": trainer.saver.keep_best},
            )

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.step % self.every == 0 or trainer.is_last_step:
            trainer.save()
