"""EarlyStopping: ends training when an evaluated metric no longer improves.

All ranks use rank 0's value, so that they end at the same step even if rounding differs.
"""

import math
from typing import Any

from d2plm.core.errors import ConfigError, did_you_mean, require_choice, require_number
from d2plm.training.callbacks.callback import Callback
from d2plm.training.trainer import Trainer


class EarlyStopping(Callback):
    """End training after `patience` evaluations in a row without a better value.

    A value that is not finite is not better. Checkpoints contain the best value and the count, so a
    resumed run continues to count.

    Args:
        monitor: the metric's name in an evaluation.
        patience: evaluations; None never stops.
        min_delta: improvement that a value must exceed to be better.
        mode: `min` or `max`, the direction of improvement.

    Raises:
        ConfigError: on an impossible setting, and at the first evaluation that has no such metric.
    """

    def __init__(
        self,
        monitor: str = "validation_nelbo",
        patience: int | None = None,
        min_delta: float = 0.0,
        mode: str = "min",
    ) -> None:
        require_number("patience", patience, optional=True, integer=True, low=1)
        require_number("min_delta", min_delta, low=0)
        require_choice("mode", mode, ("min", "max"))
        self.monitor, self.patience, self.min_delta, self.mode = monitor, patience, min_delta, mode
        self.best: float | None = None
        self.waited = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]

    def on_train_begin(self, trainer: Trainer) -> None:
        self._end_if_waited_enough(trainer)  # a run that has stopped does not start again

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if self.patience is None:
            return
        if self.monitor not in metrics:
            raise ConfigError(
                f"monitor={self.monitor!r}: no such metric in the "
                f"evaluation, which has {', '.join(metrics)}{did_you_mean(self.monitor, metrics)}"
            )
        value = trainer.process.on_main(lambda: metrics[self.monitor])
        sign = 1 if self.mode == "min" else -1
        gain = math.inf if self.best is None else sign * (self.best - value)
        if math.isfinite(value) and gain > self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        self._end_if_waited_enough(trainer)

    def _end_if_waited_enough(self, trainer: Trainer) -> None:
        if self.patience is not None and self.waited >= self.patience:
            trainer.end_training(
                f"{self.monitor} has not improved on {self.best} in the last "
                f"{self.waited} evaluations"
            )
