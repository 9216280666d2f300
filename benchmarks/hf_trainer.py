"""Arms of the peers benchmark: the HF Trainer, on a padded DiT and on EsmForMaskedLM.

It runs its own loop with D2PLM's loss, optimizer and clipping, without logging or saving. In its
favour, masks are drawn beforehand and it keeps no moving average.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import EsmForMaskedLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from benchmarks.measure import Turns
from benchmarks.padded import PaddedDiT, PaddingCollator, padded_loss
from benchmarks.workload import LEARNING_RATE, Workload
from d2plm.settings.training import AdamWSettings
from d2plm.training.optimizer import build_adamw


class PaddedTrainer(Trainer):
    """Trains a `PaddedDiT` on given steps in their order.

    Attributes:
        last_loss: of the last step.
    """

    last_loss: Tensor

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A step after another; HF Trainer itself would shuffle them."""
        return DataLoader(
            self.train_dataset,
            collate_fn=self.data_collator,
            pin_memory=self.args.device.type == "cuda",
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The paradigm's loss, in place of that of the model."""
        loss = padded_loss(self.logits(model, inputs), inputs)
        self.last_loss = loss.detach()
        return loss

    def logits(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Of every position [B, L, V]."""
        return model(inputs["input_ids"], inputs["attention_mask"], inputs["times"])


class EsmTrainer(PaddedTrainer):
    """Trains an `EsmForMaskedLM`, which takes no time."""

    def logits(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return outputs.logits


class TakeTurns(TrainerCallback):
    """Lets the trainer be an arm."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.trainer: PaddedTrainer | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.turns.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        self.turns(self.trainer.last_loss)


def train_dit(turns: Turns, *, workload: Workload, **settings: Any) -> None:
    """Arm: the HF Trainer on a padded DiT."""
    _train(turns, PaddedTrainer, workload, PaddedDiT(workload.new_model()), **settings)


def train_esm(turns: Turns, *, workload: Workload, checkpoint: str, **settings: Any) -> None:
    """Arm: the HF Trainer on an EsmForMaskedLM."""
    disable_progress_bar()
    model = EsmForMaskedLM.from_pretrained(
        checkpoint, attn_implementation="sdpa", dtype=torch.float32
    )
    _train(turns, EsmTrainer, workload, model, **settings)


def _train(
    turns: Turns,
    kind: type[PaddedTrainer],
    workload: Workload,
    model: nn.Module,
    *,
    pad_to: int | None,
    steps: int,
    device: str,
    precision: str,
    learning_rate: float = LEARNING_RATE,
) -> None:
    optimizer = build_adamw(model.to(device), settings=AdamWSettings(learning_rate=learning_rate))
    callback = TakeTurns(turns)
    callback.trainer = kind(
        model=model,
        args=TrainingArguments(
            output_dir=str(Path(workload.store, "hf_trainer")),
            max_steps=steps,
            max_grad_norm=1.0,
            per_device_train_batch_size=1,
            use_cpu=device == "cpu",
            bf16=precision == "bf16",
            remove_unused_columns=False,
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it reads the loss at every step
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        data_collator=PaddingCollator(pad_to),
        train_dataset=workload.corrupted_steps(steps),
        optimizers=(optimizer, LambdaLR(optimizer, lambda _: 1.0)),
        callbacks=[callback],
    )
    callback.trainer.train()
