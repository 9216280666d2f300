"""MetricLogger: a row of metrics every few steps, for `metrics.jsonl` and the tracking run.

Counts are taken on the host and tensors are read only when a row is due, so steps that do not log
are not synchronised.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from d2plm.core.errors import DataError, TrackingError, require, require_number
from d2plm.core.files import write_text
from d2plm.training.callbacks.callback import Callback
from d2plm.training.metrics import ExpertLoads, LayerNorms, MeanLoss, Metric, PeakMemory, StepState
from d2plm.training.throughput import CrowdedCores, Throughput
from d2plm.training.trainer import Trainer

METRICS_FILE = "metrics.jsonl"

log = logging.getLogger(__name__)


class MetricRun(Protocol):
    """The part of a tracking run that metrics are written to."""

    def log_params(self, params: dict[str, Any]) -> None: ...
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...
    def flush(self) -> None: ...


class MetricLogger(Callback):
    """Log loss, learning rate, norms, throughput and memory; every rank measures, rank 0 writes.

    Args:
        every: optimizer steps between rows.
        peak_tflops: peak of one device, for `mfu`; None looks up the datasheet's value.
        layer_norms: log the gradient's norm in each layer and the norms of the optimizer's state.
        more: additional metrics; of two with the same name the later one is used.
    """

    def __init__(
        self,
        every: int = 20,
        peak_tflops: float | None = None,
        layer_norms: bool = False,
        more: Sequence[Metric] = (),
        run: MetricRun | None = None,
    ) -> None:
        require_number("every", every, integer=True, low=1)
        metrics = isinstance(more, (list, tuple)) and all(isinstance(m, Metric) for m in more)
        wanted = "a list of d2plm.training.metrics.Metric, such as [{_target_: my_package.Mine}]"
        require(metrics, "more", more, wanted)
        self.every = every
        self.throughput = Throughput(peak_tflops)
        # The loss first: reading it waits for the device, so the rates refer to completed steps.
        self.metrics: list[Metric] = [
            *(MeanLoss(), StepState(), self.throughput, PeakMemory(), CrowdedCores()),
            ExpertLoads(),
            *([LayerNorms()] if layer_norms else []),
            *more,
        ]
        self.run = run
        self._warned = False

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
        # A run resumed from here does not send these again.
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
    """The rows that training logged, or none if there is no such file.

    Raises:
        DataError: if the file is damaged.
    """
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
