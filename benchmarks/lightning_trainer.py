"""Arms of the peers benchmark: Lightning with the module of examples/lightning.py.

The packed arm is the example itself. The padded one trains a padded DiT on masks drawn beforehand,
which is in its favour.
"""

import logging
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.measure import Turns
from benchmarks.padded import PaddedDiT, PaddingCollator, padded_loss
from benchmarks.workload import LEARNING_RATE, Workload
from d2plm.data.loader import Sequences
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings.training import AdamWSettings
from d2plm.training.learning_rate import constant
from d2plm.training.optimizer import build_adamw

OPTIMIZER = partial(build_adamw, settings=AdamWSettings(learning_rate=LEARNING_RATE))
EXAMPLE = Path(__file__).parents[1] / "examples" / "lightning.py"
_example = runpy.run_path(str(EXAMPLE), run_name="d2plm_lightning_example")
SequenceModule: Any = _example["SequenceModule"]
SequenceData: Any = _example["SequenceData"]


class WorkloadData(SequenceData):  # type: ignore[misc]  # loaded above
    """The example's data module on the sequences of a workload, without validation."""

    def __init__(self, workload: Workload) -> None:
        sizes = {"token_budget": workload.token_budget, "max_length": workload.max_length}
        super().__init__(Path(workload.store), seed=workload.seed, **sizes)
        self.workload = workload

    def open_stores(self) -> dict[str, Sequences]:
        return {"train": self.workload.collection().sequences}


class PaddedModule(SequenceModule):  # type: ignore[misc]  # loaded above
    """The example's module with a `PaddedDiT` on batches of a `PaddingCollator`."""

    def on_fit_start(self) -> None:
        """There is no packed loader whose FLOPs could be counted."""

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"], batch["attention_mask"], batch["times"])
        return padded_loss(logits, batch)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """As Lightning clips; under autocast it refuses to with a fused AdamW, for fp16's sake."""
        assert gradient_clip_val is not None
        nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)


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


def _trainer(turns: Turns, device: str, precision: str) -> lightning.Trainer:
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # it advertises
    return lightning.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        precision=precision,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[TakeTurns(turns)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train_packed(turns: Turns, *, workload: Workload, device: str, precision: str) -> None:
    """Arm: the example on our packed batches."""
    module = SequenceModule(
        workload.new_model(),
        AbsorbingDiffusion(),
        optimizer=OPTIMIZER,
        schedule=constant,
        precision=precision,
        seed=workload.seed,
    )
    _trainer(turns, device, "32-true").fit(module, datamodule=WorkloadData(workload))


def train_padded(
    turns: Turns, *, workload: Workload, pad_to: int | None, steps: int, device: str, precision: str
) -> None:
    """Arm: the example on a padded DiT."""
    module = PaddedModule(
        PaddedDiT(workload.new_model()),
        AbsorbingDiffusion(),
        optimizer=OPTIMIZER,
        schedule=constant,
    )
    batches: DataLoader[Any] = DataLoader(
        workload.corrupted_steps(steps),  # type: ignore[arg-type]  # a list is a dataset
        collate_fn=PaddingCollator(pad_to),
        pin_memory=device == "cuda",
    )
    kind = "bf16-mixed" if precision == "bf16" else "32-true"
    _trainer(turns, device, kind).fit(module, batches)
