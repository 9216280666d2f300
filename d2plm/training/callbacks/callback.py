"""The callback interface: one method per event, each empty by default."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch import Tensor

from d2plm.settings.callbacks import CallbackSettings

if TYPE_CHECKING:
    from d2plm.data.loader import Sequences
    from d2plm.training.trainer import Trainer


class MetricRun(Protocol):
    """The part of a tracking run that metrics are written to."""

    def log_params(self, params: dict[str, Any]) -> None: ...
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...
    def flush(self) -> None: ...


@dataclass(frozen=True)
class RunContext:
    """The parts of a run that callbacks may use.

    Attributes:
        validation: held-out sequences.
        max_length: longest sequence of the model in tokens.
        model_dir: folder of the exported model.
        run: tracking run, if any.
        provenance: the origin recorded in an export.
    """

    validation: "Sequences"
    max_length: int
    model_dir: Path
    run: MetricRun | None = None
    provenance: dict[str, Any] = field(default_factory=dict)


class Callback:
    """Base class of all optional behaviour in training.

    Actions (checkpoints, evaluation, export, the progress bar) are callbacks; measurements are
    metrics of the `MetricLogger`. Hooks are called on every rank: only rank 0 writes files
    (`trainer.process.is_main`), and a change to the training must be identical on all ranks.
    """

    called_last = False  # True for callbacks that save: called after all others

    @classmethod
    def create(cls, settings: Any, context: RunContext) -> Self:
        """Create it for a configured run; a subclass may use the `context`."""
        return cls(settings)

    def __init__(self, settings: CallbackSettings | None = None) -> None:
        """A subclass may declare its own class of settings."""

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

        `loss` of the global batch in nats and `grad_norm` before clipping are 0-d device tensors.
        """

    def on_step_end(self, trainer: "Trainer", loss: Tensor, grad_norm: Tensor, /) -> None:
        """After the optimizer and EMA; `trainer.step` includes the step."""

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
