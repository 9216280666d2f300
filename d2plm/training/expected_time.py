"""ExpectedTime: the duration of the training, estimated once from its first steps.

Ten steps, or half a minute of slower steps, are measured; the first step, which compiles, is
excluded. Evaluations and checkpoints count as often as they occur among the measured steps.
"""

import time
from typing import TYPE_CHECKING

import torch

from d2plm.core.number_text import duration
from d2plm.model.flops import training_flops
from d2plm.training.throughput import known_peak

if TYPE_CHECKING:
    from d2plm.training.trainer import Trainer

STEPS = 10
SECONDS = 30.0


class ExpectedTime:
    """Measures the first steps after a start, on one rank, without a collective."""

    def __init__(self) -> None:
        self.began = self.first_ended = time.monotonic()
        self.steps, self.tokens, self.flops = -1, 0, 0.0
        self.done = False

    def after_step(self, trainer: "Trainer") -> str | None:
        """Count a step; returns the line to show, once, when enough steps are measured."""
        if self.done:
            return None
        self.steps += 1
        if self.steps == 0:
            self.first_ended = _now(trainer)
            return None
        assert trainer.batch is not None
        self.tokens += sum(trainer.batch.segment_lengths)
        self.flops += training_flops(trainer.model.config, trainer.batch.segment_lengths)
        if self.steps + 1 < STEPS and time.monotonic() - self.began < SECONDS:
            return None
        self.done = True
        return None if trainer.is_last_step else self._line(trainer, _now(trainer))

    def _line(self, trainer: "Trainer", now: float) -> str:
        seconds, steps = max(now - self.first_ended, 1e-9), trainer.max_steps - trainer.step
        left = seconds / self.steps * steps
        rate = self.tokens * trainer.process.data_ranks / seconds
        peak = known_peak(trainer.process.device, trainer.dtype)
        processes = trainer.process.world_size / trainer.process.data_ranks
        tflops = self.flops / processes / seconds / 1e12
        share = "" if peak is None else f", {tflops / peak:.0%} of {peak:g} TFLOP/s"
        if trainer.first_step:
            what = f"{duration(left)} for the remaining {steps:,} of {trainer.max_steps:,} steps"
        else:
            total = duration(now - self.began + left)
            what = f"{total} for {trainer.max_steps:,} steps, {duration(left)} left"
        return f"expected: {what} ({rate / 1e3:.1f} k tokens/s{share})"


def _now(trainer: "Trainer") -> float:
    """The time at which the device has finished all work submitted to it."""
    if trainer.process.device.type == "cuda":
        torch.cuda.synchronize(trainer.process.device)
    return time.monotonic()
