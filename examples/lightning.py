"""Train a D2PLM model with Lightning: a module and a data module to copy and change.

    d2plm prepare data.input=proteins.fasta.gz data.prepared_dir=prepared
    python examples/lightning.py prepared my_model --steps 1000

The batches are D2PLM's packed ones, so nothing is spent on padding, and the losses are those of
`d2plm train` with the same settings. Sharding and the exact resumption of that are not here.
Needs `pip install 'd2plm[lightning]'`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Lightning under its older name, as beside this file `import lightning` would import this file.
import pytorch_lightning as lightning
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from d2plm.core.batch import PackedBatch
from d2plm.core.errors import D2PLMError
from d2plm.core.noise import Key
from d2plm.core.precision import resolve_precision
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.manifest import open_prepared
from d2plm.export.exported_model import save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.paradigm import Paradigm
from d2plm.training.ema import EMA
from d2plm.training.optimizer import build_adamw
from d2plm.training.parallelise import in_precision


class ProteinModule(lightning.LightningModule):
    """A model, and a paradigm whose loss it is trained on.

    Args:
        model: a `DiT`.
        precision: of the matrix work: fp32, bf16, or what the hardware is good at with auto.
            Parameters stay in fp32, and Lightning's own precision at its default.
        seed: of the masks.
    """

    def __init__(
        self,
        model: nn.Module,
        paradigm: Paradigm,
        *,
        learning_rate: float = 4e-4,
        precision: str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.paradigm = model, paradigm
        self.learning_rate, self.precision, self.seed = learning_rate, precision, seed

    def training_step(self, batch: PackedBatch) -> Tensor:
        """Corrupt the batch and give its loss in nats per residue."""
        denoiser = in_precision(self.model, resolve_precision(self.precision, self.device))
        corrupted = self.paradigm.corrupt(batch, Key(self.seed, self.global_step))
        logits = denoiser(corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times)
        nats, count = self.paradigm.loss(logits, batch, corrupted)
        loss = nats / count.to(nats.dtype).clamp(min=1)
        self.log("loss", loss, prog_bar=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> Optimizer:
        """AdamW, which decays matrices alone."""
        return build_adamw(self.model, learning_rate=self.learning_rate)


class ProteinDataModule(lightning.LightningDataModule):
    """Packed batches of proteins, epoch after epoch without end.

    Args:
        token_budget: tokens of a batch.
        max_length: longest segment in tokens; of longer proteins a random window is taken.
        seed: of the order and the windows.
    """

    def __init__(
        self,
        proteins: Collection,
        *,
        token_budget: int = 8192,
        max_length: int = 1024,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.loader = PackedLoader(
            [proteins], token_budget=token_budget, max_length=max_length, seed=seed
        )

    def train_dataloader(self) -> DataLoader[PackedBatch]:
        """The stream; Lightning moves each batch to its device."""
        return DataLoader(PackedStream(self.loader), batch_size=None)


class PackedStream(IterableDataset[PackedBatch]):
    """The batches of a `PackedLoader`, on one process, from the start."""

    def __init__(self, loader: PackedLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[PackedBatch]:
        for batch in self.loader.stream(Position()):
            yield from batch.micro_batches


class MovingAverage(lightning.Callback):
    """Keeps the moving average of a `ProteinModule`'s weights, which are the ones to export."""

    def __init__(self, decay: float = 0.9999) -> None:
        self.decay = decay

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.ema = EMA(dict(module.model.named_parameters()), self.decay)

    def on_train_batch_end(self, *_: Any) -> None:
        self.ema.update()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a D2PLM model with Lightning.")
    parser.add_argument("prepared", type=Path, help="folder that d2plm prepare wrote")
    parser.add_argument("output", type=Path, help="folder to export the model to")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--token-budget", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a protein")
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    proteins = open_prepared(options.prepared).splits["train"]
    model = DiT(DiTConfig(max_position_embeddings=options.max_length, initial_gate=1.0))
    model.initialise(options.seed)
    paradigm = AbsorbingDiffusion()
    average = MovingAverage()
    trainer = lightning.Trainer(
        callbacks=[average],
        max_steps=options.steps,
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        ProteinModule(
            model,
            paradigm,
            learning_rate=options.learning_rate,
            precision=options.precision,
            seed=options.seed,
        ),
        datamodule=ProteinDataModule(
            Collection(proteins),
            token_budget=options.token_budget,
            max_length=options.max_length,
            seed=options.seed,
        ),
    )
    lengths = LengthHistogram.of(proteins.lengths, options.max_length - 2)
    save_export(
        options.output,
        model,
        paradigm,
        lengths,
        {"step": trainer.global_step},
        weights=average.ema.shadow,
    )


if __name__ == "__main__":
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None
