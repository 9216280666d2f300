"""EarlyStopping: ends training when an evaluated metric no longer improves.

All ranks use rank 0's value, so that they stop at the same step despite rounding.
"""

import math
from typing import Any

from d2plm.core.errors import ConfigError, did_you_mean
from d2plm.settings.callbacks import EarlyStoppingSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.trainer import Trainer


class EarlyStopping(Callback):
    """End training after `patience` consecutive evaluations without a better, finite value.

    The best value and the count are saved in checkpoints.

    Raises:
        ConfigError: at the first evaluation without such a metric.
    """

    def __init__(self, settings: EarlyStoppingSettings | None = None) -> None:
        self.settings = settings or EarlyStoppingSettings()
        self.best: float | None = None
        self.waited = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]

    def on_train_begin(self, trainer: Trainer) -> None:
        self._end_if_waited_enough(trainer)  # a stopped run does not restart

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if self.settings.patience is None:
            return
        monitor = self.settings.monitor
        if monitor not in metrics:
            near = did_you_mean(monitor, metrics)
            raise ConfigError(
                f"no such metric in the evaluation, which has {', '.join(metrics)}{near}",
                {"monitor": monitor},
            )
        value = trainer.process.on_main(lambda: metrics[monitor])
        sign = 1 if self.settings.mode == "min" else -1
        gain = math.inf if self.best is None else sign * (self.best - value)
        if math.isfinite(value) and gain > self.settings.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        self._end_if_waited_enough(trainer)

    def _end_if_waited_enough(self, trainer: Trainer) -> None:
        if self.settings.patience is not None and self.waited >= self.settings.patience:
            trainer.end_training(
                f"{self.settings.monitor} has not improved on {self.best} in the last "
                f"{self.waited} evaluations"
            )
