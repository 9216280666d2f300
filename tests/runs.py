"""Small training runs that record their steps, for tests that interrupt them.

A run's folder holds its checkpoints, `history-RANK.jsonl` (a row a step; a resumed run drops the
rows that it does again, as the metrics do) and `log-RANK.txt`.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.utils._pytree import tree_flatten_with_path

from d2plm.data.loader import Collection
from d2plm.data.relatives import RelativesIndex
from d2plm.data.store import SequenceStore
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings.callbacks import CheckpointSettings
from d2plm.settings.data import LoaderSettings
from d2plm.settings.training import AdamWSettings, CosineSettings, TrainerSettings
from d2plm.training import checkpoint
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.save_checkpoint import SaveCheckpoint
from d2plm.training.learning_rate import cosine
from d2plm.training.optimizer import build_adamw
from d2plm.training.plan import Plan
from d2plm.training.trainer import Trainer

BUDGET, BINS = 96, 4
# Of these, two ranks can share heads and rows of matrices.
SHAREABLE = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 26}
SHORT: dict[str, Any] = {"max_steps": 10, "precision": "fp64", "global_batch_tokens": 8 * BUDGET}
SHORT |= {"every": 99, "deterministic": False}  # saved at the end
# Odd sizes: no shard of 2 or 4 is even.
SIZES: dict[str, Any] = {
    "hidden_size": 18,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "intermediate_size": 25,
    "time_embedding_dim": 10,
    "max_position_embeddings": 48,
}


def make_trainer(kind: type[Trainer] = Trainer, /, **named: Any) -> Trainer:
    """A trainer; fields of `TrainerSettings` and `LoaderSettings` are given by name."""

    def taken(settings: type[Any]) -> dict[str, Any]:
        return {one.name: named.pop(one.name) for one in fields(settings) if one.name in named}

    settings = TrainerSettings(**taken(TrainerSettings))
    return kind(
        settings, loading=LoaderSettings(**{"token_budget": 8192, **taken(LoaderSettings)}), **named
    )


class Logged(Trainer):
    """The error that ends it is in its log."""

    def train(self) -> None:
        try:
            super().train()
        except Exception:
            logging.exception("training ended")
            raise


class History(Callback):
    """One row a step: loss, norm, epoch and the sequences of this rank's part of the batch."""

    def on_train_begin(self, trainer: Trainer) -> None:
        if trainer.process.is_main:  # the others write after a step, which waits for this rank
            for file in trainer.output_dir.glob("history-*.jsonl"):
                kept = [row for row in rows(file) if row["step"] <= trainer.step]
                cut = file.with_suffix(".partial")
                cut.write_text("".join(json.dumps(row) + "\n" for row in kept))
                os.replace(cut, file)
        self.file = trainer.output_dir / f"history-{trainer.process.rank}.jsonl"

    def on_step_begin(self, trainer: Trainer) -> None:
        self.epoch = trainer.position.epoch

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        assert trainer.batch is not None
        batches = trainer.batch.micro_batches
        ids = [int(i) for packed in batches for i in packed.sequence_ids if i >= 0]
        if trainer.process.rank != trainer.process.data_rank * trainer.process.row_ranks:
            ids = []  # of rows that another rank writes
        row = {"step": trainer.step, "loss": float(trainer.loss), "epoch": self.epoch, "ids": ids}
        row |= {"grad_norm": float(trainer.grad_norm), "pid": os.getpid()}
        with self.file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


class At(Callback):
    """Does something at an event of a step on one rank, or on all."""

    def __init__(
        self, event: str, step: int, action: Callable[[Trainer], object], rank: int | None = None
    ) -> None:
        def act(trainer: Trainer, *_: object) -> None:
            if trainer.step == step and rank in (None, trainer.process.rank):
                action(trainer)

        setattr(self, event, act)


def interrupt(trainer: Trainer) -> None:
    trainer.save()
    trainer.saver.wait()
    raise KeyboardInterrupt


def build(
    store: Path,
    output: Path,
    *,
    sizes: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    every: int = 2,
    log: bool = True,
    model: Callable[[], DiT | DiTConfig] | None = None,
    relatives: Callable[[int], RelativesIndex] | None = None,
    **changes: Any,
) -> Trainer:
    output.mkdir(parents=True, exist_ok=True)
    if log:
        rank = os.environ.get("RANK", 0)
        logging.basicConfig(filename=output / f"log-{rank}.txt", level=logging.INFO, force=True)
    settings: dict[str, Any] = {
        "max_steps": 12,
        "precision": "fp32",
        "deterministic": True,
        "global_batch_tokens": BINS * BUDGET,
        "gradient_accumulation_steps": 1,
        "ema_decay": 0.99,
        "optimizer": lambda *both: build_adamw(*both, settings=AdamWSettings(learning_rate=1e-2)),
        "paradigm": AbsorbingDiffusion(),
    }
    settings |= changes
    sequences = SequenceStore(store)
    saves = [SaveCheckpoint(CheckpointSettings(every=every))] if every else []
    return make_trainer(
        Logged,
        model=DiTConfig(**{**SIZES, **(sizes or {})}) if model is None else model(),
        collections=[Collection(sequences, relatives=relatives and relatives(len(sequences)))],
        output_dir=output,
        schedule=lambda steps: cosine(steps, settings=CosineSettings(warmup_ratio=0.1)),
        token_budget=BUDGET,
        max_length=48,
        device="cpu",
        plan=Plan(**(plan or {})),
        callbacks=[History(), *callbacks, *saves],
        **settings,
    )


def train(store: Path, output: Path, settings: dict[str, Any] | None = None) -> None:
    build(store, output, **(settings or {})).train()


def train_each(store: Path, output: Path, runs: dict[str, dict[str, Any]]) -> None:
    for name, settings in runs.items():
        train(store, output / name, {**SHORT, **settings})


def rows(file: Path) -> list[dict[str, Any]]:
    """The complete rows of a history; the last may have been cut off."""
    found = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def history(output: Path) -> list[dict[str, Any]]:
    """{step, loss, epoch, ids} of every step in the order of the file; the ids of all ranks."""
    files = sorted(output.glob("history-*.jsonl"))
    ids: dict[int, list[int]] = {}
    for file in files:
        for row in rows(file):
            ids.setdefault(row["step"], []).extend(row["ids"])
    return [{**row, "ids": sorted(ids[row["step"]])} for row in rows(files[0])]


def checkpoints(output: Path) -> list[str]:
    return checkpoint.Root(str(output / "checkpoints")).names()


def newest(output: Path) -> Path:
    """The newest whole checkpoint of a run."""
    root = checkpoint.Root(str(output / "checkpoints"))
    name = checkpoint.newest_whole(root)
    assert name is not None
    return Path(root.of(name))


def progress(folder: Path) -> dict[str, Any]:
    """What a checkpoint that is whole says of its run."""
    return checkpoint.verify(*checkpoint.split_location(str(folder)))


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, whatever number of ranks wrote it; by path."""
    found: dict[str, Any] = {}
    _load_state_dict(
        found,
        storage_reader=dcp.FileSystemReader(str(folder)),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    leaves, _ = tree_flatten_with_path(found)
    return {"/".join(key.key for key in path): tensor for path, tensor in leaves}


def assert_same_run(found: Path, expected: Path, tolerance: float = 0.0) -> None:
    """The same weights, averages, moments, and losses, norms and sequences at every step."""
    ours, theirs = tensors(newest(found)), tensors(newest(expected))
    assert {path.split("/")[0] for path in ours} >= {"model", "ema", "optimizer"}
    same = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance, equal_nan=True)
    same(ours, theirs)
    mine, yours = progress(newest(found)), progress(newest(expected))
    for key in ("step", "epoch", "bins", "ema_updates"):
        assert mine[key] == yours[key]
    rows, wanted = history(found), history(expected)
    assert [row["step"] for row in rows] == list(range(1, len(wanted) + 1))
    for row, other in zip(rows, wanted, strict=True):
        assert row["ids"] == other["ids"]
        for key in ("loss", "grad_norm"):
            same(row[key], other[key])


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    """Return when `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)
