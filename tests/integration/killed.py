"""A callback for tests: the worker dies as if the kernel had killed it for its memory."""

import os
import signal

from d2plm.settings.registry import register
from d2plm.training.callbacks.callback import Callback
from d2plm.training.trainer import Trainer


class Killed(Callback):
    """Kills the process at the first step."""

    def on_step_begin(self, trainer: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


register("callback", "killed", Killed)
