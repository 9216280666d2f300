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
from benchmarks.workload import OPTIMIZER, Workload


class PaddedTrainer(Trainer):
    """Trains on given steps in their order."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A step after another; HF Trainer itself would shuffle them."""
        pin = self.args.device.type == "cuda"
        return DataLoader(self.train_dataset, collate_fn=self.data_collator, pin_memory=pin)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **_: Any) -> Tensor:
        """The paradigm's loss, in place of that of the model."""
        loss = padded_loss(model, inputs)
        self.state.last_loss = loss.detach()  # for the callback
        return loss


class TimelessEsm(nn.Module):
    """An `EsmForMaskedLM` as a model of tokens and times."""

    def __init__(self, esm: EsmForMaskedLM) -> None:
        super().__init__()
        self.esm = esm

    def forward(self, input_ids: Tensor, attention_mask: Tensor, _: Tensor) -> Tensor:
        logits: Tensor = self.esm(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


class TakeTurns(TrainerCallback):
    """Lets the trainer be an arm."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.turns.begin()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        self.turns(state.last_loss)


def train(
    turns: Turns,
    *,
    workload: Workload,
    pad_to: int | None,
    steps: int,
    device: str,
    precision: str,
    checkpoint: str | None = None,
) -> None:
    """Arm: the HF Trainer on a padded DiT, or on the EsmForMaskedLM of a checkpoint."""
    if checkpoint is None:
        model: nn.Module = PaddedDiT(workload.new_model())
    else:
        disable_progress_bar()
        sdpa = {"attn_implementation": "sdpa", "dtype": torch.float32}
        model = TimelessEsm(EsmForMaskedLM.from_pretrained(checkpoint, **sdpa))
    optimizer = OPTIMIZER(model.to(device))
    PaddedTrainer(
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
        callbacks=[TakeTurns(turns)],
    ).train()
