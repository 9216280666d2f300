"""The training benchmarks' workload: real proteins in the batches of our own loader.

Every arm gets the same description and builds the same weights and the same batches from it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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

OPTIMIZER = partial(build_adamw, settings=AdamWSettings(learning_rate=1e-4))  # of every arm
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

    @property
    def sizes(self) -> dict[str, Any]:
        """Those of the batches."""
        return {"token_budget": self.token_budget, "max_length": self.max_length}

    @torch.no_grad()
    def new_model(self) -> DiT:
        """The same weights for every arm, none of them zero, as some are when training starts."""
        model = DiT(DiTConfig(**self.model))
        model.initialise(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02, generator=generator)
        return model

    def collection(self, *, synthetic: bool = False) -> Collection:
        """The proteins, or random residues of the same lengths, which need no disk."""
        store = SequenceStore(Path(self.store))
        return Collection(SyntheticSequences(store.lengths) if synthetic else store)

    def loader(self, *, synthetic: bool = False) -> PackedLoader:
        """The batches of a trainer with one micro-batch per step."""
        return PackedLoader([self.collection(synthetic=synthetic)], seed=self.seed, **self.sizes)

    def batches(self, number: int) -> list[PackedBatch]:
        """The batches of the first steps."""
        steps = islice(self.loader().stream(Position()), number)
        return [batch for step in steps for batch in step.micro_batches]

    def corrupted_steps(self, number: int) -> list[tuple[PackedBatch, Corrupted]]:
        """The first steps' batches with the masks that the trainer draws for them, on the CPU."""
        paradigm = AbsorbingDiffusion()
        batches = enumerate(self.batches(number))
        return [(batch, paradigm.corrupt(batch, Key(self.seed, step))) for step, batch in batches]

    def trainer(
        self, *, model: DiT | None = None, callbacks: tuple[Callback, ...] = (), **settings: Any
    ) -> Trainer:
        """A trainer of the workload with these `TrainerSettings`; it does not save or track."""
        always = {"seed": self.seed, "resume": "none"}
        return Trainer(
            TrainerSettings(**{"max_steps": WITHOUT_END, **always, **settings}),
            model or self.new_model(),
            AbsorbingDiffusion(),
            [self.collection()],
            Path(self.store, "output"),
            loading=LoaderSettings(**self.sizes),
            callbacks=callbacks,
            optimizer=OPTIMIZER,
            # Warm-up steps would change little.
            schedule=partial(constant, settings=ConstantSettings(warmup_ratio=0.0)),
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
