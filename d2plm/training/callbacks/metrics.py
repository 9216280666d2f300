"""MetricLogger: what is measured, every so many steps, for `metrics.jsonl` and the tracking run.

Counts are taken on the host and tensors are read only when a row is due, so a step that does not
log is not synchronised.
"""

import json
import os
from pathlib import Path

import torch

from d2plm.errors import require_number
from d2plm.tracking.runs import NoRun, Run
from d2plm.training.callbacks.base import Callback
from d2plm.training.throughput import Throughput
from d2plm.training.trainer import Trainer

FILE = "metrics.jsonl"


class MetricLogger(Callback):
    """Log the loss, learning rate, gradient norm and throughput.

    Args:
        every: optimizer steps between rows; the loss is their mean.
        run: the tracking run, if any.
    """

    def __init__(self, every: int = 20, run: Run | None = None) -> None:
        require_number("callbacks.metrics.every", every, integer=True, low=1)
        self.every = every
        self.run: Run = run or NoRun()

    def on_train_begin(self, trainer: Trainer) -> None:
        self.file = trainer.output_dir / FILE
        _keep_rows_up_to(self.file, trainer.step)
        self.throughput = Throughput(trainer.model.config)
        self.losses: list[torch.Tensor] = []

    def on_step_end(self, trainer: Trainer) -> None:
        assert trainer.batch is not None
        self.throughput.add(trainer.batch.segment_lengths, trainer.data_wait)
        self.losses.append(trainer.loss)
        if trainer.step % self.every == 0 or trainer.is_last_step:
            loss = float(torch.stack(self.losses).mean())
            self.losses.clear()
            trainer.log(
                {
                    "loss": loss,
                    "learning_rate": trainer.optimizer.param_groups[0]["lr"],
                    "grad_norm": float(trainer.grad_norm),
                    "epoch": trainer.loader.epochs_done(trainer.position),
                    **self.throughput.report(),
                }
            )

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._write(trainer, metrics)

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self._write(trainer, metrics)

    def on_save(self, trainer: Trainer) -> None:
        self.run.flush()  # a run resumed from here does not send these again

    def on_train_end(self, trainer: Trainer) -> None:
        self.run.flush()

    def _write(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        with self.file.open("a") as stream:
            stream.write(json.dumps({"step": trainer.step, **metrics}) + "\n")
        self.run.log_metrics(metrics, trainer.step)


def _keep_rows_up_to(file: Path, step: int) -> None:
    """Drop rows that a resumed run will write again, and a last one that was cut off."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        return
    kept = []
    for line in file.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break
    partial = file.with_suffix(".partial")
    partial.write_text("".join(kept))
    os.replace(partial, file)
