"""The callback interface: one method per event, each empty by default."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from d2plm.training.trainer import Trainer


class Callback:
    """Base class of all optional behaviour in training.

    Actions (checkpoints, evaluation, export, the progress bar) are callbacks; measurements are
    metrics of the `MetricLogger`. Hooks are called on every rank: only rank 0 writes files
    (`trainer.process.is_main`), and a change to the training must be identical on all ranks.
    """

    called_last = False  # true for callbacks that save: called after all others

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, as JSON, identical on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; called before `on_load`."""

    def on_init(self, trainer: "Trainer") -> None:
        """After the trainer is built, before it resumes."""

    def on_train_begin(self, trainer: "Trainer") -> None:
        """Before the first step, after loading a checkpoint."""

    def on_epoch_begin(self, trainer: "Trainer") -> None:
        """Before the first step of an epoch."""

    def on_epoch_end(self, trainer: "Trainer") -> None:
        """After the last step of an epoch."""

    def on_step_begin(self, trainer: "Trainer") -> None:
        """Before an optimizer step's first forward; `trainer.batch` is its batch."""

    def on_micro_step_begin(self, trainer: "Trainer") -> None:
        """Before the forward of each micro-batch; not called in a pipeline of stages."""

    def on_micro_step_end(self, trainer: "Trainer") -> None:
        """After the backward of each micro-batch; not called in a pipeline of stages."""

    def on_before_optimizer_step(
        self, trainer: "Trainer", loss: Tensor, grad_norm: Tensor, /
    ) -> None:
        """Gradients are complete and clipped; `trainer.skip_update = True` drops them.

        Args:
            loss: of the global batch, nats; 0-d, on the device.
            grad_norm: of the whole gradient before clipping; 0-d, on the device.
        """

    def on_step_end(self, trainer: "Trainer", loss: Tensor, grad_norm: Tensor, /) -> None:
        """After the optimizer and EMA; `trainer.step` counts the step. Arguments as above."""

    def on_log(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        """Metrics of the current step were reported; `trainer.history` contains them."""

    def on_evaluate(self, trainer: "Trainer", metrics: dict[str, float]) -> None:
        """A validation on the EMA weights is complete."""

    def on_save(self, trainer: "Trainer", location: str, /) -> None:
        """A checkpoint of the current step is being written to `location`, from a copy."""

    def on_load(self, trainer: "Trainer", location: str, /) -> None:
        """The checkpoint at `location` was loaded."""

    def on_train_end(self, trainer: "Trainer") -> None:
        """After the last step."""

    def on_stop(self, trainer: "Trainer") -> None:
        """Training ends at its limit, by a signal or by an error."""
