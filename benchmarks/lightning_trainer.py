"""Arms of the peers benchmark: Lightning with the module of examples/lightning.py.

The packed arm is the example itself. The padded one trains a padded DiT on masks drawn beforehand,
which is in its favour.
"""

import logging
import runpy
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measure import Turns
from benchmarks.padded import PaddedDiT, PaddingCollator, padded_loss
from benchmarks.workload import OPTIMIZER, Workload
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.training.learning_rate import constant

EXAMPLE = Path(__file__).parents[1] / "examples" / "lightning.py"
_example = runpy.run_path(str(EXAMPLE), run_name="d2plm_lightning_example")
SequenceModule: Any = _example["SequenceModule"]
SequenceData: Any = _example["SequenceData"]


class PaddedModule(SequenceModule):  # type: ignore[misc]  # loaded above
    """The example's module with a `PaddedDiT` on batches of a `PaddingCollator`."""

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        # Not by the trainer's "bf16-mixed", which refuses to clip beside a fused AdamW.
        low = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=low):
            return padded_loss(self.model, batch)


class TakeTurns(lightning.Callback):
    """Lets the trainer be an arm."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_start(self, *_: Any) -> None:
        self.turns.begin()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: dict[str, Tensor], *_: Any
    ) -> None:
        self.turns(outputs["loss"])


def train_packed(turns: Turns, *, workload: Workload, device: str, precision: str) -> None:
    """Arm: the example on our packed batches, without validation."""
    sizes = {"token_budget": workload.token_budget, "max_length": workload.max_length}
    data = SequenceData(Path(workload.store), seed=workload.seed, **sizes)
    data.open_stores = lambda: {"train": workload.collection().sequences}
    _fit(turns, workload, SequenceModule, precision, device, datamodule=data)


def train_padded(
    turns: Turns, *, workload: Workload, pad_to: int | None, steps: int, device: str, precision: str
) -> None:
    """Arm: the example on a padded DiT."""
    batches: DataLoader[Any] = DataLoader(
        workload.corrupted_steps(steps),  # type: ignore[arg-type]  # a list is a dataset
        collate_fn=PaddingCollator(pad_to),
        pin_memory=device == "cuda",
    )
    _fit(turns, workload, PaddedModule, precision, device, batches)


def _fit(
    turns: Turns,
    workload: Workload,
    kind: Any,
    precision: str,
    device: str,
    *data: Any,
    **more: Any,
) -> None:
    model = workload.new_model()
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # it advertises
    trainer = lightning.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[TakeTurns(turns)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = kind(
        PaddedDiT(model) if kind is PaddedModule else model,
        AbsorbingDiffusion(),
        optimizer=OPTIMIZER,
        schedule=constant,
        precision=precision,
        seed=workload.seed,
    )
    trainer.fit(module, *data, **more)
