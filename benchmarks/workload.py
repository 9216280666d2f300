"""The training benchmarks' workload: real proteins in the batches of our own loader.

Every arm gets the same description and builds the same weights and the same batches from it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from benchmarks.measure import Turns
from d2plm.core.batch import PackedBatch
from d2plm.core.files import config_dir
from d2plm.core.noise import Key
from d2plm.data.fasta import read_fasta
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.store import SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter
from d2plm.data.synthetic import SyntheticSequences
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.paradigm import Corrupted
from d2plm.settings.data import LoaderSettings
from d2plm.settings.training import AdamWSettings, ConstantSettings, TrainerSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.learning_rate import constant
from d2plm.training.optimizer import build_adamw
from d2plm.training.trainer import Trainer

LEARNING_RATE = 1e-4
ADAMW = AdamWSettings(learning_rate=LEARNING_RATE)
WITHOUT_WARM_UP = ConstantSettings(warmup_ratio=0.0)  # warm-up steps would change little
WITHOUT_END = 1_000_000  # steps; an arm is ended from outside


@dataclass(frozen=True)
class Workload:
    """A model, proteins and a budget.

    Attributes:
        store: folder of a sequence store.
        model: settings of a `DiTConfig`.
        token_budget: tokens of a step, one row.
        max_length: longest segment; longer proteins are cropped.
        seed: of weights, order and masks.
    """

    store: str
    token_budget: int
    max_length: int
    model: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def new_model(self) -> DiT:
        """The same weights for every arm, none of them zero."""
        model = DiT(DiTConfig(**self.model))
        fill_weights(model, self.seed, std=0.02)
        return model

    def collection(self, *, synthetic: bool = False) -> Collection:
        """The proteins, or random residues of the same lengths, which need no disk."""
        store = SequenceStore(Path(self.store))
        return Collection(SyntheticSequences(store.lengths) if synthetic else store)

    def loader(self, *, synthetic: bool = False) -> PackedLoader:
        """The batches of a trainer with one micro-batch per step."""
        return PackedLoader(
            [self.collection(synthetic=synthetic)],
            token_budget=self.token_budget,
            max_length=self.max_length,
            seed=self.seed,
        )

    def batches(self, number: int) -> list[PackedBatch]:
        """The batches of the first steps."""
        return list(islice(self._stream(), number))

    def corrupted_steps(self, number: int) -> list[tuple[PackedBatch, Corrupted]]:
        """The first steps' batches with the masks that the trainer draws for them, on the CPU."""
        paradigm = AbsorbingDiffusion()
        batches = enumerate(self.batches(number))
        return [(batch, paradigm.corrupt(batch, Key(self.seed, step))) for step, batch in batches]

    def _stream(self) -> Iterator[PackedBatch]:
        for batch in self.loader().stream(Position()):
            yield from batch.micro_batches

    def trainer(
        self, *, model: DiT | None = None, callbacks: tuple[Callback, ...] = (), **settings: Any
    ) -> Trainer:
        """A trainer of the workload that does not save, evaluate or track."""
        own = {one.name for one in fields(TrainerSettings)} & settings.keys()
        chosen = {"max_steps": WITHOUT_END, **{name: settings.pop(name) for name in own}}
        return Trainer(
            TrainerSettings(seed=self.seed, resume="none", **chosen),
            model or self.new_model(),
            AbsorbingDiffusion(),
            [self.collection()],
            Path(self.store, "output"),
            loading=LoaderSettings(
                token_budget=self.token_budget,
                max_length=self.max_length,
                async_prefetch=settings.pop("async_prefetch", True),
            ),
            callbacks=callbacks,
            **{
                "optimizer": partial(build_adamw, settings=ADAMW),
                "schedule": partial(constant, settings=WITHOUT_WARM_UP),
                **settings,
            },
        )


@contextmanager
def workload_of(
    proteins: Path,
    model: dict[str, Any],
    *,
    token_budget: int,
    max_length: int,
    longest_protein: int | None = None,
) -> Iterator[Workload]:
    """The proteins of a FASTA file, in a store that exists inside the block.

    Args:
        model: settings of a `DiTConfig`, to which the longest length is added.
        longest_protein: residues; longer proteins are left out.
    """
    with TemporaryDirectory(prefix="d2plm-bench-") as folder:
        store = Path(folder, "store")
        with SequenceStoreWriter(store, kind="raw") as writer:
            for record in read_fasta(proteins):
                if longest_protein is None or len(record.tokens) <= longest_protein:
                    writer.extend([record.name.encode()], [record.tokens.tobytes()])
        yield Workload(
            store=str(store),
            token_budget=token_budget,
            max_length=max_length,
            model={**model, "max_position_embeddings": max_length},
        )


def model_settings(name: str) -> dict[str, Any]:
    """Settings of a `DiTConfig` in configs/model, with those of its defaults; without Hydra."""
    settings = yaml.safe_load((config_dir() / "model" / f"{name}.yaml").read_text())
    merged: dict[str, Any] = {}
    for default in settings.pop("defaults", []):
        merged |= model_settings(default)
    return merged | settings


@torch.no_grad()
def fill_weights(model: DiT, seed: int, std: float) -> None:
    """Draw all weights, including those that training starts from zero."""
    model.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=std, generator=generator)


class TakeTurns(Callback):
    """Lets a trainer be an arm: its steps are those of the turns."""

    called_last = True

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.turns = turns

    def on_train_begin(self, trainer: Trainer) -> None:
        self.turns.begin()

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        self.turns(trainer.loss)
