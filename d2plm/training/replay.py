"""Replay of a step of a run with the same batch, crops, masks and weights, to examine a spike.

Training is repeated from the nearest earlier checkpoint without writing anything. Noise is keyed by
seed and step, so a step is the same on other machines and numbers of ranks, up to kernel rounding;
only dropout depends on the ranks.
"""

from dataclasses import dataclass, replace

import torch

from d2plm.core.batch import PackedBatch
from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.core.noise import Key
from d2plm.paradigms.paradigm import denoise
from d2plm.training import checkpoint
from d2plm.training.callbacks.callback import Callback
from d2plm.training.metrics import gradient_norms
from d2plm.training.trainer import Trainer


@dataclass(frozen=True)
class SequenceLoss:
    """The contribution of one sequence to a step.

    Attributes:
        sequence_id: its index in the training store; in a mixture, numbered across all stores.
        residues: number of its tokens in the batch, including `<cls>` and `<eos>`.
        time: its time in the paradigm.
        predicted: number of residues with a weight in the loss.
        nats: its weighted loss, a summand of the batch's.
    """

    sequence_id: int
    residues: int
    time: float
    predicted: int
    nats: float


@dataclass(frozen=True)
class Replayed:
    """A repeated step.

    Attributes:
        step: number of the step in the logs: the updates done after it.
        loss: loss of the global batch.
        grad_norm: norm of its gradient before clipping.
        sequences: largest loss first.
        gradients: parameter name → norm of its gradient before clipping.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    sequences: list[SequenceLoss]
    gradients: dict[str, float]


def replay(trainer: Trainer, step: int, location: str | None = None) -> Replayed:
    """Repeat a step of the run that `trainer` was built for, on one process.

    Args:
        trainer: has the run's settings; its training is not saved.
        step: number of the step in the logs, from 1.
        location: checkpoint to start from; None takes the newest complete one before the step, or
            the initial weights.

    Raises:
        CheckpointError: if the checkpoint is too late.
        ConfigError: if the run does not have this step.
    """
    if not 1 <= step <= trainer.max_steps:
        raise ConfigError(f"the run has steps 1 to {trainer.max_steps}", {"step": step})
    if location is None:
        name = checkpoint.newest_whole(trainer.saver.root, before=step)
        location = None if name is None else trainer.saver.root.of(name)
    if location is not None:
        trainer.load(location)
    if trainer.step >= step:
        raise CheckpointError(
            f"{location} is of step {trainer.step}, too late to repeat step {step}; choose an "
            "earlier one, or leave it out"
        )
    recorder = _Recorder(step)
    trainer.add_callback(recorder)
    batches = trainer.loader.stream(trainer.position)
    while trainer.step < step:
        batch = next(batches)
        moved = [packed.to(trainer.device) for packed in batch.micro_batches]
        trainer.train_step(replace(batch, micro_batches=moved))
    assert recorder.gradients is not None
    return Replayed(
        step=step,
        loss=float(trainer.loss),
        grad_norm=float(trainer.grad_norm),
        learning_rate=trainer.optimizer.param_groups[0]["lr"],
        sequences=sorted(recorder.sequences, key=lambda one: -one.nats),
        gradients=recorder.gradients,
    )


class _Recorder(Callback):
    def __init__(self, step: int) -> None:
        self.step, self.sequences = step, list[SequenceLoss]()
        self.gradients: dict[str, float] | None = None

    def on_step_begin(self, trainer: Trainer) -> None:
        if trainer.step + 1 == self.step:
            assert trainer.batch is not None
            for packed in trainer.batch.micro_batches:
                self.sequences += _sequence_losses(trainer, packed)

    def on_before_optimizer_step(self, trainer: Trainer, *_: object) -> None:
        # A run that continued after such a step skipped it; a loss scale does so itself.
        finite = torch.isfinite(trainer.loss + trainer.grad_norm)
        trainer.skip_update = trainer.loss_scale is None and not bool(finite)
        if trainer.step + 1 != self.step:
            return
        self.gradients = {name: float(norm) for name, norm in gradient_norms(trainer).items()}


@torch.no_grad()
def _sequence_losses(trainer: Trainer, packed: PackedBatch) -> list[SequenceLoss]:
    noised = trainer.paradigm.corrupt(packed, Key(trainer.seed, trainer.step))
    logits = denoise(trainer.denoiser, packed, noised.tokens, noised.times)
    segments, losses = packed.segment_ids(), []
    for number, length in enumerate(packed.sequence_lengths()):
        own = torch.where(segments == number, noised.weights, 0.0)
        nats, _ = trainer.paradigm.loss(logits, packed, replace(noised, weights=own))
        losses.append(
            SequenceLoss(
                sequence_id=int(packed.sequence_ids[number]),
                residues=length,
                time=float(noised.times[number]),
                predicted=int((own != 0).sum()),
                nats=float(nats),
            )
        )
    return losses
