"""ProgressBar: steps done, rate and remaining time, and a table row for each evaluation."""

import math
import time

from d2plm.core.number_text import duration, short_number
from d2plm.core.progress import Progress
from d2plm.settings.callbacks import CallbackSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.trainer import Trainer

HEADING = f"{'step':>9}  {'loss':>8}  {'perplexity':>10}  {'best':>8}  {'tokens':>7}  {'time':>13}"


class ProgressBar(Callback):
    def __init__(self, settings: CallbackSettings | None = None) -> None:
        super().__init__(settings)
        self.progress: Progress | None = None
        self.note = ""
        self.loss, self.best = math.nan, math.inf
        self.has_heading = False

    def on_train_begin(self, trainer: Trainer) -> None:
        if trainer.process.is_main:
            self.began = time.monotonic()
            self.progress = Progress("training", trainer.max_steps, trainer.step, "steps")

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.loss = metrics.get("loss", self.loss)
        if {"loss", "tokens_per_second"} <= metrics.keys():
            rate = metrics["tokens_per_second"] / 1e3
            self.note = f"loss {metrics['loss']:.4f}  {rate:.1f} k tokens/s"

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if self.progress is None or "validation_perplexity" not in metrics:
            return
        if not self.has_heading:
            self.has_heading = True
            self.progress.say(f"{_evaluated_sequences(trainer)}\n{HEADING}")
        perplexity = metrics["validation_perplexity"]
        is_best = perplexity < self.best
        self.best = min(perplexity, self.best)
        loss = "" if math.isnan(self.loss) else f"{self.loss:.4f}"
        tokens = short_number(trainer.step * trainer.global_batch_tokens)
        self.progress.say(
            f"{trainer.step:>9,}  {loss:>8}  {perplexity:>10.3f}  "
            f"{'now' if is_best else f'{self.best:.3f}':>8}  {tokens:>7}  "
            f"{duration(time.monotonic() - self.began):>13}"
        )

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        if self.progress is not None:
            self.progress.update(trainer.step, note=self.note)

    def on_stop(self, trainer: Trainer) -> None:
        if self.progress is not None:
            self.progress.close()


def _evaluated_sequences(trainer: Trainer) -> str:
    """A line on the evaluated sequences, and their perplexity under the best unordered baseline."""
    evaluate = next((one for one in trainer.callbacks if isinstance(one, Evaluate)), None)
    if evaluate is None:
        return "perplexity: averaged weights (EMA)"
    things = f"{len(evaluate.sequences):,} held-out {evaluate.vocabulary.nouns.sequence}s"
    line = f"perplexity: of {things}, averaged weights (EMA)"
    if len(trainer.collections) > 1:  # the baseline needs a single collection
        return line
    perplexity = evaluate.reference_perplexity(trainer.collections[0].sequences)
    reference = {"composition": "the composition of each, without order,"}.get(
        evaluate.reference, f"the {evaluate.reference} baseline"
    )
    return f"{line}; {reference} gives {perplexity:.3f}"
