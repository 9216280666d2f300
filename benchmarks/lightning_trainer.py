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

    def on_fit_start(self) -> None:
        """Counts no FLOPs: there is no packed loader."""

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


def train(
    turns: Turns,
    *,
    workload: Workload,
    device: str,
    precision: str,
    pad_to: int | None = None,
    steps: int | None = None,
) -> None:
    """Arm: the example on our packed batches, or, for a number of steps, on a padded DiT."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # it advertises
    model: Any = workload.new_model()
    if steps is None:
        kind: Any = SequenceModule
        data: Any = SequenceData(Path(workload.store), seed=workload.seed, **workload.sizes)
        data.open_stores = lambda: {"train": workload.collection().sequences}
    else:
        batches: Any = workload.corrupted_steps(steps)
        collate, pin_memory = PaddingCollator(pad_to), device == "cuda"
        data = DataLoader(batches, collate_fn=collate, pin_memory=pin_memory)
        model, kind = PaddedDiT(model), PaddedModule
    module = kind(
        model,
        AbsorbingDiffusion(),
        optimizer=OPTIMIZER,
        schedule=constant,
        precision=precision,
        seed=workload.seed,
    )
    lightning.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[TakeTurns(turns)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, data)
