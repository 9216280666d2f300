"""What the training benchmarks train on: real proteins in the batches of our own loader.

Every arm is given the same description, and builds from it the same weights and the same batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from d2plm.bench.arms import Turns
from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.data.fasta import read_fasta
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.store import SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter
from d2plm.data.synthetic import SyntheticSequences
from d2plm.model.config import DiTConfig
from d2plm.model.dit import DiT
from d2plm.paradigms.base import Corrupted
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.training.callbacks.base import Callback
from d2plm.training.optimizer import build_adamw
from d2plm.training.schedule import constant
from d2plm.training.trainer import Trainer

LEARNING_RATE = 1e-4
WITHOUT_END = 1_000_000  # steps; an arm is ended from outside


@dataclass(frozen=True)
class Workload:
    """A model, proteins and a budget; JSON by `asdict`.

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

    def arguments(self) -> dict[str, Any]:
        """For an arm, which makes a workload of them again."""
        return asdict(self)

    def new_model(self) -> DiT:
        """The same weights everywhere, none of them zero, so that all of the model counts."""
        model = DiT(DiTConfig(**self.model))
        model.initialise(self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.02, generator=generator)
        return model

    def collection(self, *, synthetic: bool = False) -> Collection:
        """The proteins, or random residues of their lengths that need no disk."""
        store = SequenceStore(Path(self.store))
        return Collection(SyntheticSequences(store.lengths) if synthetic else store)

    def batches(self, number: int) -> list[PackedBatch]:
        """The first batches that the trainer is given."""
        return list(islice(self._stream(), number))

    def corrupted_batches(self) -> Iterator[tuple[PackedBatch, Corrupted]]:
        """The batches of every step, with the masks that the trainer draws for them, on the CPU."""
        paradigm = AbsorbingDiffusion()
        for step, batch in enumerate(self._stream()):
            yield batch, paradigm.corrupt(batch, Key(self.seed, step))

    def _stream(self) -> Iterator[PackedBatch]:
        loader = PackedLoader(
            [self.collection()],
            token_budget=self.token_budget,
            max_length=self.max_length,
            seed=self.seed,
        )
        for batch in loader.stream(Position()):
            yield from batch.micro_batches

    def trainer(
        self,
        *,
        model: DiT | None = None,
        synthetic: bool = False,
        callbacks: tuple[Callback, ...] = (),
        **settings: Any,
    ) -> Trainer:
        """A trainer of the workload, without anything that saves, evaluates or tracks."""
        return Trainer(
            model=model or self.new_model(),
            paradigm=AbsorbingDiffusion(),
            collections=[self.collection(synthetic=synthetic)],
            output_dir=Path(self.store, "output"),
            optimizer=lambda *both: build_adamw(*both, learning_rate=LEARNING_RATE),
            schedule=partial(constant, warmup_ratio=0.0),  # or no step of these would change much
            token_budget=self.token_budget,
            max_length=self.max_length,
            max_steps=settings.pop("max_steps", WITHOUT_END),
            seed=self.seed,
            resume="none",
            callbacks=callbacks,
            **settings,
        )


@contextmanager
def workload_of(
    proteins: Path,
    model: dict[str, Any],
    *,
    token_budget: int,
    max_length: int,
    longest_protein: int | None = None,
    temporary_dir: Path | None = None,
) -> Iterator[Workload]:
    """The proteins of a FASTA file, in a store that is there inside the block.

    Args:
        model: settings of a `DiTConfig`, to which the longest length is added.
        longest_protein: residues; longer proteins are left out.
    """
    with TemporaryDirectory(prefix="d2plm-bench-", dir=temporary_dir) as folder:
        store = Path(folder, "store")
        with SequenceStoreWriter(store, kind="raw") as writer:
            for record in read_fasta(proteins):
                if longest_protein is None or len(record.tokens) <= longest_protein:
                    writer.append(record.name, record.tokens)
        yield Workload(
            store=str(store),
            token_budget=token_budget,
            max_length=max_length,
            model={**model, "max_position_embeddings": max_length},
        )


@contextmanager
def without_average(trainer: Trainer) -> Iterator[None]:
    """What the moving average costs is what is not taken inside the block."""
    trainer.ema.update = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del trainer.ema.update  # the class's own again


class TakeTurns(Callback):
    """Lets a trainer be an arm: its steps are those of the turns."""

    called_last = True

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_begin(self, trainer: Trainer) -> None:
        self.turns.begin()

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        self.turns(trainer.loss)
