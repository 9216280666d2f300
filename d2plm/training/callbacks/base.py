"""The callback interface: one method an event, each empty by default."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d2plm.training.trainer import Trainer


class Callback:
    """Base class of everything optional in training.

    What acts (checkpoints, evaluation, export, the progress bar) is a callback of its own; what
    only measures is a metric of the `MetricLogger`. Callbacks are called on every rank: what
    writes does so on rank 0 (`trainer.process.is_main`), and what changes the training decides the
    same everywhere.
    """

    called_last = False  # whether to be called after all that are not: what saves

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know of this callback; JSON, the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; called before `on_load`."""

    def on_init(self, trainer: "Trainer") -> None:
        """After the trainer was built, before it resumes."""

    def on_train_begin(self, trainer: "Trainer") -> None:
        """Before the first step, after a checkpoint was loaded."""

    def on_epoch_begin(self, trainer: "Trainer") -> None:
        """Before the first step of an epoch."""

    def on_epoch_end(self, trainer: "Trainer") -> None:
        """After the last step of an epoch."""

    def on_step_begin(self, trainer: "Trainer") -> None:
        """Before an optimizer step's first forward; `trainer.batch` is its batch."""

    def on_micro_step_begin(self, trainer: "Trainer") -> None:
        """Before the forward of each micro-batch."""

    def on_micro_step_end(self, trainer: "Trainer") -> None:
        """After the backward of each micro-batch."""

    def on_before_optimizer_step(self, trainer: "Trainer") -> None:
        """Gradients are complete and clipped; `trainer.skip_update = True` drops them."""

    def on_step_end(self, trainer: "Trainer") -> None:
        """After the optimizer and EMA; `trainer.step` counts the step."""

    def on_log(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        """Metrics of the present step were reported."""

    def on_evaluate(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        """A validation was done on the EMA weights."""

    def on_save(self, trainer: "Trainer") -> None:
        """A checkpoint of the present step is being written; the state is copied already."""

    def on_load(self, trainer: "Trainer") -> None:
        """A checkpoint was loaded."""

    def on_train_end(self, trainer: "Trainer") -> None:
        """After the last step."""

    def on_stop(self, trainer: "Trainer") -> None:
        """Training ends, be it by its limit, a signal or an error."""
