"""MetricLogger: a row of metrics every few steps, for `metrics.jsonl` and the tracking run.

Counts are taken on the host and tensors are read only when a row is due, so other steps are not
synchronised.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from d2plm.core.errors import DataError, TrackingError
from d2plm.core.files import write_text
from d2plm.settings.callbacks import MetricsSettings
from d2plm.settings.registry import find
from d2plm.training.callbacks.callback import Callback, MetricRun, RunContext
from d2plm.training.metrics import ExpertLoads, LayerNorms, MeanLoss, Metric, PeakMemory, StepState
from d2plm.training.throughput import CrowdedCores, Throughput
from d2plm.training.trainer import Trainer

METRICS_FILE = "metrics.jsonl"

log = logging.getLogger(__name__)


class MetricLogger(Callback):
    """Log loss, learning rate, norms, throughput and memory; every rank measures, rank 0 writes.

    Args:
        run: tracking run that also receives the rows.

    Raises:
        ConfigError: if a name in `more` is not a registered metric.
    """

    def __init__(
        self, settings: MetricsSettings | None = None, run: MetricRun | None = None
    ) -> None:
        settings = settings or MetricsSettings()
        self.every = settings.every
        self.throughput = Throughput(settings.peak_tflops)
        # The loss first: reading it waits for the device, so the rates refer to completed steps.
        self.loss = MeanLoss()
        self.metrics: list[Metric] = [
            *(self.loss, StepState(), self.throughput, PeakMemory(), CrowdedCores()),
            ExpertLoads(),
            *([LayerNorms()] if settings.layer_norms else []),
            *(find("metric", name, "more").factory() for name in settings.more),
        ]
        self.run = run
        self._warned = False

    @classmethod
    def create(cls, settings: MetricsSettings, context: RunContext) -> Self:
        return cls(settings, context.run)

    def state_dict(self) -> dict[str, Any]:
        """The losses since the last row, as a run may stop between two rows."""
        return {"losses": torch.stack(self.loss.losses).tolist()} if self.loss.losses else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss.losses = list(torch.tensor(state["losses"]).unbind())

    def on_train_begin(self, trainer: Trainer) -> None:
        self.file = trainer.output_dir / METRICS_FILE
        if trainer.process.is_main:
            _keep_rows_up_to(self.file, trainer.step)
        for metric in self.metrics:
            metric.begin(trainer)
        if self.run is not None and self.throughput.peak is not None and trainer.process.is_main:
            self.run.log_params({"mfu_peak_tflops": self.throughput.peak})

    def on_before_optimizer_step(self, trainer: Trainer, loss: Tensor, norm: Tensor, /) -> None:
        following = trainer.step + 1
        if following % self.every == 0 or following == trainer.max_steps:
            for metric in self.metrics:
                metric.see_gradients(trainer)

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        for metric in self.metrics:
            metric.see(trainer)
        if trainer.step % self.every == 0 or trainer.is_last_step:
            row: dict[str, float] = {}
            for metric in self.metrics:
                row |= metric.read(trainer)
            trainer.log(row)

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if not trainer.process.is_main:
            return
        try:
            with self.file.open("a") as stream:
                stream.write(json.dumps({"step": trainer.step, **metrics}) + "\n")
        except OSError as error:
            raise DataError(f"{self.file}: cannot be written ({error.strerror})") from error
        if self.run is not None:
            with self._surviving():
                self.run.log_metrics(metrics, trainer.step)

    on_evaluate = on_log

    def on_save(self, trainer: Trainer, *_: object) -> None:
        # A run resumed from this checkpoint does not send these rows again.
        if self.run is not None and trainer.process.is_main:
            with self._surviving():
                self.run.flush()

    on_train_end = on_save

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Rows are kept in memory and in the file, so a tracker outage does not end training."""
        try:
            yield
        except TrackingError as error:
            if not self._warned:
                log.warning("%s; training continues, and metrics are sent when it is back", error)
            self._warned = True
        else:
            self._warned = False


def read_metrics(file: Path) -> list[dict[str, float]]:
    """The rows logged by training, if any; raises DataError if the file is damaged."""
    if not file.is_file():
        return []
    try:
        return [json.loads(line) for line in file.read_text().splitlines()]
    except ValueError as error:
        raise DataError(f"{file}: {error}; delete it, it is only a log") from error


def _keep_rows_up_to(file: Path, step: int) -> None:
    """Drop rows that a resumed run will write again, and a truncated last row."""
    kept = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            break
    write_text(file, "".join(kept))
