"""ExpectedTime: how long the training will take, said once the first steps have been measured.

Ten steps, or half a minute of slower ones, are enough to plan by; the first one, which compiles, is
left out. Evaluations and checkpoints count as often as they came among the measured steps.
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
        self.began = time.monotonic()
        self.first_ended: float | None = None
        self.steps, self.tokens, self.flops = 0, 0, 0.0
        self.said = False

    def after_step(self, trainer: "Trainer") -> str | None:
        """Count a step; once, when enough have been seen, the line to show."""
        if self.said:
            return None
        if self.first_ended is None:
            self.first_ended = _now(trainer)
            return None
        assert trainer.batch is not None
        self.steps += 1
        self.tokens += sum(trainer.batch.segment_lengths)
        self.flops += training_flops(trainer.model.config, trainer.batch.segment_lengths)
        if self.steps + 1 < STEPS and time.monotonic() - self.began < SECONDS:
            return None
        self.said = True
        return None if trainer.is_last_step else self._line(trainer, _now(trainer))

    def _line(self, trainer: "Trainer", now: float) -> str:
        assert self.first_ended is not None
        seconds = max(now - self.first_ended, 1e-9)
        left = seconds / self.steps * (trainer.max_steps - trainer.step)
        rate = self.tokens * trainer.process.world_size / seconds
        peak = known_peak(trainer.process.device, trainer.dtype)
        share = "" if peak is None else f", {self._share_of(peak, seconds)}"
        if trainer.first_step:
            remaining = f"{trainer.max_steps - trainer.step:,} of {trainer.max_steps:,} steps"
            what = f"{duration(left)} for the remaining {remaining}"
        else:
            total = duration(now - self.began + left)
            what = f"{total} for {trainer.max_steps:,} steps, {duration(left)} left"
        return f"expected: {what} ({rate / 1e3:.1f} k tokens/s{share})"

    def _share_of(self, peak: float, seconds: float) -> str:
        return f"{self.flops / seconds / 1e12 / peak:.0%} of {peak:g} TFLOP/s"


def _now(trainer: "Trainer") -> float:
    """The time at which the device has done all that it was given."""
    if trainer.process.device.type == "cuda":
        torch.cuda.synchronize(trainer.process.device)
    return time.monotonic()
