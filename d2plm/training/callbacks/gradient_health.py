"""GradientHealth: skips steps whose gradients are not finite, or stops the run and saves the step.

A check waits for the device, and skipping needs its result before the optimizer's step. On CUDA the
default is therefore to check only when metrics are read anyway; a run that may skip steps checks
every step.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any

import torch

from d2plm.core.errors import D2PLMError, ModelError
from d2plm.core.files import write_text
from d2plm.settings.callbacks import GradientHealthSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.metric_logger import MetricLogger
from d2plm.training.checkpoint import name_of
from d2plm.training.metrics import gradient_norms
from d2plm.training.trainer import Trainer

COUNTED = ("in_a_row", "in_total")
EVERY_ON_CUDA = 20  # without a MetricLogger

log = logging.getLogger(__name__)


class GradientHealth(Callback):
    """Skip a step whose loss or gradient is NaN or infinite; stop the run after too many of them.

    With a loss scale (fp16) gradient overflows are left to the scale. Before the run stops,
    `dump_step` writes `output_dir/failed-step-N`: `state/` as from `Trainer.save_state`;
    `batch.rankR.json`, the sequences of each rank's micro-batches; `gradients.json`, the norm of
    each parameter's gradient.

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
        folder = trainer.output_dir / f"failed-step-{number}"
        dump_step(trainer, folder)
        since = (
            f"; gradients are checked every {self.interval} steps, so the cause may be earlier: "
            "resume with every=1 for gradient_health"
            if self.interval > 1
            else ""
        )
        raise ModelError(
            f"step {number}: {what}{since}. The step is kept in {folder}; d2plm replay "
            f"{trainer.output_dir} --step {number} --checkpoint "
            f"{folder / 'state' / name_of(trainer.step)} repeats it. With max_skipped=3 training "
            "continues past single steps; for another learning_rate or precision choose another "
            "output_dir and start from the last checkpoint's model (d2plm export, then init_from)"
        )


def dump_step(trainer: Trainer, folder: Path) -> None:
    """Write everything needed to reproduce the current step; failures are logged. A collective."""
    rank, gradients = trainer.process.rank, described_gradients(trainer)
    batch = json.dumps(described_batch(trainer), indent=2)
    writes = [lambda: write_text(folder / f"batch.rank{rank}.json", batch)]
    if trainer.process.is_main:
        text = json.dumps(gradients, indent=2)
        writes.append(lambda: write_text(folder / "gradients.json", text))
    for write in (*writes, lambda: trainer.save_state(folder / "state")):
        try:
            write()
        except D2PLMError as error:
            log.warning("%s", error)


def described_gradients(trainer: Trainer) -> dict[str, Any]:
    """Loss, gradient norm, and each parameter's norm, as strings if not finite. A collective."""
    norms = {name: float(norm) for name, norm in gradient_norms(trainer).items()}
    return {
        "step": trainer.step + 1,
        "loss": _as_json(float(trainer.loss)),
        "grad_norm": _as_json(float(trainer.grad_norm)),
        "not_finite": [name for name, norm in norms.items() if not math.isfinite(norm)],
        "norms": {name: _as_json(norm) for name, norm in norms.items()},
    }


def described_batch(trainer: Trainer) -> dict[str, Any]:
    """This rank's micro-batches of the current step: sequences, draws and lengths."""
    assert trainer.batch is not None
    return {
        "step": trainer.step + 1,
        "rank": trainer.process.rank,
        "world_size": trainer.process.world_size,
        **vars(trainer.position),
        "micro_batches": [
            {
                "sequence_ids": packed.sequence_ids[packed.real()].tolist(),
                "draw_ids": packed.draw_ids[packed.real()].tolist(),
                "segment_lengths": packed.sequence_lengths(),
                "global_sequences": packed.global_sequences,
            }
            for packed in trainer.batch.micro_batches
        ],
    }


def _as_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _unforced_interval(trainer: Trainer) -> int:
    """Number of steps between checks that need no additional wait for the device."""
    if trainer.process.device.type == "cpu":
        return 1
    loggers = (c.every for c in trainer.callbacks if isinstance(c, MetricLogger))
    return next(loggers, EVERY_ON_CUDA)
