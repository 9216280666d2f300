"""ProgressBar: how far, how fast and how long yet; a bar on a terminal, sparse lines elsewhere."""

from d2plm.progress import Progress
from d2plm.training.callbacks.base import Callback
from d2plm.training.trainer import Trainer


class ProgressBar(Callback):
    """Show the step, the loss and the rate."""

    def on_train_begin(self, trainer: Trainer) -> None:
        self.progress = Progress("training", trainer.max_steps, start=trainer.step)
        self.note = ""

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.note = (
            f"loss {metrics['loss']:.4f}  {metrics['tokens_per_second'] / 1e3:.1f} k tokens/s"
        )

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.progress.say(
            f"step {trainer.step}: perplexity {metrics['validation_perplexity']:.3f} on "
            "held-out proteins (subset, EMA weights)"
        )

    def on_step_end(self, trainer: Trainer) -> None:
        self.progress.update(trainer.step, self.note)

    def on_stop(self, trainer: Trainer) -> None:
        self.progress.close()
