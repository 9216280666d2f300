"""Train a D2PLM model with Lightning: a module, a data module and a callback to copy and change.

    d2plm prepare data.input=proteins.fasta.gz data.prepared_dir=prepared
    python examples/lightning.py prepared runs/lightning --steps 1000
    python examples/lightning.py prepared runs/lightning --steps 1000 --resume last
    python examples/lightning.py prepared runs/lightning --devices 2 --strategy fsdp2

Batches, losses, bound and export are D2PLM's: a run has the losses and the weights of `d2plm train`
with the same settings, and a resumed one continues exactly. The loop, devices, sharding,
checkpoints and logs are Lightning's. Needs `pip install 'd2plm[lightning]'`.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

# Lightning under its older name, as beside this file `import lightning` would import this file.
import numpy as np
import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint, ThroughputMonitor
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from d2plm.core.batch import PackedBatch
from d2plm.core.errors import D2PLMError
from d2plm.core.noise import Key
from d2plm.core.precision import resolve_precision
from d2plm.core.vocabulary import PAD
from d2plm.data.loader import Collection, GlobalBatch, PackedLoader, Position, Sequences, pack_all
from d2plm.data.manifest import open_prepared
from d2plm.data.prepare import prepare
from d2plm.export.exported_model import save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.paradigm import Paradigm, denoise
from d2plm.settings.training import AdamWSettings, MuonSettings, OptimizerSettings, TrainerSettings
from d2plm.training.ema import EMA
from d2plm.training.learning_rate import Schedule, cosine
from d2plm.training.muon import build_muon
from d2plm.training.optimizer import build_adamw
from d2plm.training.parallelise import in_precision, reshard
from d2plm.training.shards import LocalParameters, own_shard, sharded_like
from d2plm.training.training_length import flops_per_step, number_of_steps

OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], type[OptimizerSettings]]] = {
    "adamw": (build_adamw, AdamWSettings),
    "muon": (build_muon, MuonSettings),
}  # of sharded parameters: AdamW alone


class SequenceModule(lightning.LightningModule):
    """A model, and a paradigm whose loss it is trained on.

    Args:
        precision: of the matrix work; Lightning's own stays at its default.
        masks: draws of the bound for each validation sequence, the same at every validation.
    """

    def __init__(
        self,
        model: DiT,
        paradigm: Paradigm,
        *,
        optimizer: Callable[[DiT], Optimizer] = build_adamw,
        schedule: Callable[[int], Schedule] = cosine,
        precision: str = "auto",
        masks: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.paradigm, self.masks, self.seed = model, paradigm, masks, seed
        self.optimizer, self.schedule, self.precision = optimizer, schedule, precision

    def configure_model(self) -> None:
        """Shard each block over the devices (FSDP2) if the strategy has a mesh."""
        if self.device_mesh is not None:
            dtype = resolve_precision(self.precision, self.device)
            policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
            for unit in (*self.model.blocks, self.model):
                fully_shard(unit, mesh=self.device_mesh["data_parallel"], mp_policy=policy)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.model)
        schedule = LambdaLR(optimizer, self.schedule(self.trainer.max_steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_fit_start(self) -> None:
        flops = flops_per_step(self.trainer.datamodule.loader, self.model.config)
        self.flops_per_batch = round(flops / self.trainer.world_size)  # for ThroughputMonitor

    def denoiser(self) -> Callable[..., Tensor]:
        return in_precision(self.model, resolve_precision(self.precision, self.device))

    def training_step(self, batch: PackedBatch) -> Tensor:
        """The loss in nats per target, of which all devices' batches have different numbers."""
        key = Key(self.seed, self.global_step)
        torch.manual_seed(key.stream(f"dropout {self.global_rank}").as_int() >> 1)
        corrupted = self.paradigm.corrupt(batch, key)
        logits = denoise(self.denoiser(), batch, corrupted.tokens, corrupted.times)
        nats, count = self.paradigm.loss(logits, batch, corrupted)
        total = self.trainer.strategy.reduce(count.clone(), reduce_op="sum")
        # Times the devices, over which Lightning averages the gradients.
        loss = nats * self.trainer.world_size / total.to(nats.dtype).clamp(min=1)
        self.log("loss", loss.detach(), prog_bar=True, batch_size=1, sync_dist=True)
        return loss

    def validation_step(self, batch: PackedBatch) -> None:
        """The bound in nats per token, with masks that depend on the sequences alone."""
        bound = partial(self.paradigm.bound, self.denoiser(), batch, Key(0), draws=self.masks)
        nats = torch.stack([bound(draw=draw).nats for draw in range(self.masks)]).mean(dim=0).sum()
        count = int(self.paradigm.maskable(batch).sum())
        nelbo = (nats / max(count, 1)).float()
        self.log("validation_nelbo", nelbo, prog_bar=True, batch_size=count, sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        norm = get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.log("gradient_norm", whole(norm))  # before clipping


class SequenceData(lightning.LightningDataModule):
    """Packed batches of prepared sequences, epoch after epoch without end.

    Its state is the position of the training stream after the last batch that was trained on.

    Args:
        prepared: folder of the prepared stores.
        source: proteins to prepare there; None if it is prepared.
        sequences: number of validation sequences, a fixed random choice.
    """

    def __init__(
        self,
        prepared: Path,
        source: Path | None = None,
        *,
        token_budget: int = 8192,
        max_length: int = 1024,
        sequences: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.prepared, self.source, self.sequences, self.seed = prepared, source, sequences, seed
        self.sizes: dict[str, Any] = {"token_budget": token_budget, "max_length": max_length}
        self.position = Position()

    def prepare_data(self) -> None:
        if self.source is not None:
            prepare(self.source, self.prepared)

    def open_stores(self) -> Mapping[str, Sequences]:
        return open_prepared(self.prepared).splits

    def setup(self, stage: str) -> None:
        """Open the stores and plan this device's part of the training stream."""
        self.stores, trainer = self.open_stores(), self.trainer
        self.ranks, rank = (trainer.world_size, trainer.global_rank) if trainer else (1, 0)
        train, sizes = Collection(self.stores["train"]), self.sizes
        self.loader = PackedLoader(
            [train], seed=self.seed, world_size=self.ranks, rank=rank, **sizes
        )

    def train_dataloader(self) -> Iterator[GlobalBatch]:
        return self.loader.stream(self.position)

    def val_dataloader(self) -> list[DataLoader[PackedBatch]]:
        """Batches of whole sequences, as many on every device."""
        if (store := self.stores.get("validation")) is None:
            return []
        order = torch.randperm(len(store), generator=torch.Generator().manual_seed(0))
        batches = pack_all([store[int(i)] for i in order[: self.sequences]], **self.sizes)
        empty = PackedBatch.of_row(
            np.full_like(batches[0].tokens.numpy(), PAD), np.zeros(0, dtype=int)
        )
        batches += [empty] * (-len(batches) % self.ranks)
        return [DataLoader(batches[self.loader.rank :: self.ranks], batch_size=None)]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, _: int) -> PackedBatch:
        """Called when a batch is used: Lightning reads the stream one batch ahead."""
        if isinstance(batch, GlobalBatch):
            self.position, (batch,) = batch.following, batch.micro_batches
        return batch.to(device)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.position.epoch, "bins": self.position.bins}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = Position(**state)


class MovingAverage(lightning.Callback):
    """The moving average of a `SequenceModule`'s weights, which is validated and exported."""

    def __init__(self, decay: float = 0.9999) -> None:
        self.decay, self.saved = decay, dict[str, Any]()

    def on_train_start(self, _: lightning.Trainer, module: SequenceModule) -> None:
        self.parameters = LocalParameters(module.model)
        self.ema = EMA(self.parameters.local, self.decay)
        for name, average in self.saved.get("weights", {}).items():
            self.ema.shadow[name].copy_(own_shard(average, self.parameters.sharded[name]))
        self.ema.updates = self.saved.get("updates", 0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.ema.update()

    def on_validation_start(self, trainer: lightning.Trainer, module: SequenceModule) -> None:
        reshard(module.model)
        self.swap = self.ema.swapped_in()
        self.swap.__enter__()

    def on_validation_end(self, trainer: lightning.Trainer, module: SequenceModule) -> None:
        reshard(module.model)
        self.swap.__exit__(None, None, None)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.ema.updates, "weights": self.weights()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state

    def weights(self) -> dict[str, Tensor]:
        """The averages by parameter name, gathered from all devices."""
        averages, like = self.ema.shadow, self.parameters.sharded
        return {name: whole(sharded_like(one, like[name])) for name, one in averages.items()}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a D2PLM model with Lightning.")
    add = parser.add_argument
    add("prepared", type=Path, help="folder that d2plm prepare wrote")
    add("output", type=Path, help="folder of the logs, the checkpoints and the model")
    add("--source", type=Path, help="proteins to prepare into that folder first")
    add("--steps", type=int, default=1000)
    add("--flops-budget", type=float, help="model FLOPs, in place of --steps")
    add("--token-budget", type=int, default=8192, help="tokens of a device's batch")
    add("--max-length", type=int, default=1024, help="tokens of a sequence")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--learning-rate", type=float, default=4e-4)
    add("--devices", type=int, default=1)
    add("--strategy", choices=("auto", "ddp", "fsdp2"), default="auto")
    add("--every", type=int, default=100, help="steps between validations and checkpoints")
    add("--resume", help="location of a checkpoint, or last")
    options = parser.parse_args()

    sizes = {"token_budget": options.token_budget, "max_length": options.max_length}
    data = SequenceData(options.prepared, options.source, **sizes)
    data.prepare_data()
    data.setup("fit")
    vocabulary = data.stores["train"].vocabulary
    config = DiTConfig(
        vocab_size=vocabulary.size, max_position_embeddings=options.max_length, initial_gate=1.0
    )
    steps = options.steps
    if options.flops_budget is not None:
        budget = options.flops_budget / options.devices
        steps = number_of_steps(data.loader, config, TrainerSettings(flops_budget=budget))
    model = DiT(config)
    model.initialise(seed=0)
    build, settings = OPTIMIZERS[options.optimizer]
    optimizer = partial(build, settings=settings(learning_rate=options.learning_rate))
    paradigm = AbsorbingDiffusion()
    paradigm.vocabulary = vocabulary
    module = SequenceModule(model, paradigm, optimizer=optimizer)
    fsdp2 = options.strategy == "fsdp2"
    folder, every = options.output / "checkpoints", options.every
    average = MovingAverage()
    trainer = lightning.Trainer(
        max_steps=steps,
        devices=options.devices,
        strategy=ModelParallelStrategy(options.devices, 1) if fsdp2 else options.strategy,
        gradient_clip_val=1.0,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        logger=CSVLogger(options.output, name="logs"),
        callbacks=[
            average,
            LearningRateMonitor("step"),
            ThroughputMonitor(lambda batch: batch.num_tokens),  # an item is a token
            ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, save_last=True),
        ],
    )
    trainer.fit(module, datamodule=data, ckpt_path=options.resume)
    weights = average.weights()
    if trainer.is_global_zero:
        lengths = LengthHistogram.of(data.stores["train"].lengths, options.max_length - 2)
        at = {"step": trainer.global_step}
        save_export(options.output / "model", DiT(config), paradigm, lengths, at, weights)


if __name__ == "__main__":
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None
