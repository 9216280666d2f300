"""Arms of `bench peers`: Lightning with the module of examples/lightning.py, packed and padded.

The packed arm is the example as it is. The padded one trains a padded DiT in its place, on masks
drawn beforehand, which is in its favour.
"""

import importlib.util
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytorch_lightning as lightning
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import d2plm
from d2plm.bench.arms import Turns, serve_arms
from d2plm.bench.padded import PaddedDiT, PaddingCollator, corrupted_steps, padded_loss
from d2plm.bench.workload import Workload
from d2plm.core.errors import BenchError
from d2plm.paradigms.diffusion import AbsorbingDiffusion

EXAMPLE = Path(d2plm.__file__).parents[1] / "examples" / "lightning.py"


def load_example(path: Path = EXAMPLE) -> ModuleType:
    """The example as a module.

    Raises:
        BenchError: if this is an installation without the examples.
    """
    specification = importlib.util.spec_from_file_location("d2plm_lightning_example", path)
    if not path.is_file() or specification is None or specification.loader is None:
        raise BenchError(f"{path} is missing, which the Lightning arms are: run a source checkout")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


example = load_example()


class PaddedModule(example.ProteinModule):  # type: ignore[name-defined,misc]  # loaded above
    """The example's module with a `PaddedDiT` on batches of a `PaddingCollator`."""

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


def _work_packed(
    turns: Turns,
    *,
    workload: dict[str, Any],
    device: str,
    precision: str,
    learning_rate: float,
) -> None:
    given = Workload(**workload)
    module = example.ProteinModule(
        given.new_model(),
        AbsorbingDiffusion(),
        learning_rate=learning_rate,
        precision=precision,
        seed=given.seed,
    )
    data = example.ProteinDataModule(
        given.collection(),
        token_budget=given.token_budget,
        max_length=given.max_length,
        seed=given.seed,
    )
    _trainer(turns, device, "32-true").fit(module, datamodule=data)


def _work_padded(
    turns: Turns,
    *,
    workload: dict[str, Any],
    pad_to: int | None,
    steps: int,
    device: str,
    precision: str,
    learning_rate: float,
) -> None:
    given = Workload(**workload)
    module = PaddedModule(
        PaddedDiT(given.new_model()), AbsorbingDiffusion(), learning_rate=learning_rate
    )
    batches: DataLoader[Any] = DataLoader(
        corrupted_steps(given, steps),  # type: ignore[arg-type]  # a list is a dataset
        collate_fn=PaddingCollator(pad_to),
        pin_memory=device == "cuda",
    )
    kind = "bf16-mixed" if precision == "bf16" else "32-true"
    _trainer(turns, device, kind).fit(module, batches)


if __name__ == "__main__":
    serve_arms({"packed": _work_packed, "padded": _work_padded})
