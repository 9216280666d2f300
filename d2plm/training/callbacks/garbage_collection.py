"""GarbageCollection: run Python's collector at the same steps on every rank.

Otherwise it runs at different times on different ranks, and all others wait for each. Objects that
exist when training begins are never examined.
"""

import gc

from d2plm.settings.callbacks import GarbageCollectionSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.trainer import Trainer


class GarbageCollection(Callback):
    """Collect only every `every` optimizer steps; the automatic collector is restored at the end.

    Generations 0 and 1 take almost no time, but never free cycles of objects that survived two
    collections; 2 examines all objects created since the start.
    """

    def __init__(self, settings: GarbageCollectionSettings | None = None) -> None:
        self.settings = settings or GarbageCollectionSettings()
        self._taken_over = False

    def on_train_begin(self, trainer: Trainer) -> None:
        self._taken_over, self._was_enabled = True, gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.step % self.settings.every == 0:
            gc.collect(self.settings.generation)

    def on_stop(self, trainer: Trainer) -> None:
        if not self._taken_over:
            return
        self._taken_over = False
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
