"""GradientHealth: skips steps whose gradients are not finite, or stops the run.

A check waits for the device, and skipping needs its result before the optimizer's step. On CUDA the
default is therefore to check only when metrics are read anyway; a run that may skip steps checks
every step.
"""

import logging
import math
from typing import Any

import torch

from d2plm.core.errors import ModelError
from d2plm.settings.callbacks import GradientHealthSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.metric_logger import MetricLogger
from d2plm.training.trainer import Trainer

COUNTED = ("in_a_row", "in_total")
EVERY_ON_CUDA = 20  # without a MetricLogger

log = logging.getLogger(__name__)


class GradientHealth(Callback):
    """Skip a step whose loss or gradient is NaN or infinite; stop the run after too many of them.

    With a loss scale (fp16) gradient overflows are left to the scale.

    With `every=None`, a positive `max_skipped` implies a check of every step; skipped steps
    `in_total` include those before a resume.
    """

    def __init__(self, settings: GradientHealthSettings | None = None) -> None:
        settings = settings or GradientHealthSettings()
        self.every, self.max_skipped = settings.every, settings.max_skipped
        self.counted = settings.counted
        self.skipped = dict.fromkeys(COUNTED, 0)
        self.interval = self.every or 1  # until training begins

    def state_dict(self) -> dict[str, Any]:
        return dict(self.skipped)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = {name: state[name] for name in COUNTED}

    def on_train_begin(self, trainer: Trainer) -> None:
        self.interval = self.every or (1 if self.max_skipped else _unforced_interval(trainer))

    def on_before_optimizer_step(self, trainer: Trainer, *_: object) -> None:
        following = trainer.step + 1  # checks the steps that log or save
        if following % self.interval and following < trainer.max_steps:
            return
        values = torch.stack([trainer.loss.double(), trainer.grad_norm.double()]).tolist()
        bad = [
            f"the {quantity} is {value}"
            for quantity, value in zip(("loss", "gradient norm"), values, strict=True)
            if not math.isfinite(value) and not (trainer.loss_scale and quantity != "loss")
        ]
        if not bad:
            self.skipped["in_a_row"] = 0
            return
        if self.skipped[self.counted] >= self.max_skipped:
            self._stop(trainer, bad[0])
        for name in COUNTED:
            self.skipped[name] += 1
        trainer.skip_update = True
        if trainer.process.is_main:
            skipped = (self.skipped[self.counted], self.max_skipped, self.counted.replace("_", " "))
            message = "step %d skipped: %s, gradient norm %g (%d of at most %d %s)"
            log.warning(message, following, bad[0], values[1], *skipped)

    def _stop(self, trainer: Trainer, what: str) -> None:
        number = trainer.step + 1  # as numbered in the logs and by d2plm replay
        advice = f"d2plm replay {trainer.output_dir} --step {number} repeats the step"
        if self.interval > 1:
            advice = f"checked every {self.interval} steps; set every=1 for gradient_health"
        raise ModelError(
            f"step {number}: {what}; {advice}. With max_skipped=3 training continues past single "
            "steps; for another learning_rate or precision choose another output_dir and start "
            "from the last checkpoint's model (d2plm export, then init_from)"
        )


def _unforced_interval(trainer: Trainer) -> int:
    """Number of steps between checks that need no additional wait for the device."""
    if trainer.process.device.type == "cpu":
        return 1
    loggers = (c.every for c in trainer.callbacks if isinstance(c, MetricLogger))
    return next(loggers, EVERY_ON_CUDA)
