"""ProgressBar: how far, how fast and how long yet; a bar on a terminal, sparse lines elsewhere."""

from d2plm.progress import Progress
from d2plm.training.callbacks.base import Callback
from d2plm.training.expected_time import ExpectedTime
from d2plm.training.trainer import Trainer


class ProgressBar(Callback):
    """Show the step, the loss, the rate and, after the first steps, the expected time."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.note = ""

    def on_train_begin(self, trainer: Trainer) -> None:
        if trainer.process.is_main:
            self.progress = Progress("training", trainer.max_steps, start=trainer.step)
            self.expected = ExpectedTime()

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if {"loss", "tokens_per_second"} <= metrics.keys():
            rate = metrics["tokens_per_second"] / 1e3
            self.note = f"loss {metrics['loss']:.4f}  {rate:.1f} k tokens/s"

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if self.progress is not None and "validation_perplexity" in metrics:
            self.progress.say(
                f"step {trainer.step}: perplexity {metrics['validation_perplexity']:.3f} on "
                "held-out proteins (subset, EMA weights)"
            )

    def on_step_end(self, trainer: Trainer) -> None:
        if self.progress is None:
            return
        self.progress.update(trainer.step, self.note)
        line = self.expected.after_step(trainer)
        if line is not None:
            self.progress.say(line)

    def on_stop(self, trainer: Trainer) -> None:
        if self.progress is not None:
            self.progress.close()
