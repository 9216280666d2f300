"""A replayed step is the step that was trained."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.data.loader import Collection
from d2plm.data.store import SequenceStore
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from d2plm.settings.training import AdamWSettings, CosineSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.learning_rate import cosine
from d2plm.training.optimizer import build_adamw
from d2plm.training.replay import replay
from d2plm.training.trainer import Trainer
from tests.conftest import TINY_SIZES
from tests.ranks import run
from tests.trainers import make_trainer


class Keep(Callback):
    def __init__(self, save_every: int) -> None:
        self.rows: list[tuple[float, float, float]] = []
        self.ids: list[list[int]] = []
        self.save_every = save_every

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        assert trainer.batch is not None
        rate = trainer.optimizer.param_groups[0]["lr"]
        self.rows.append((float(trainer.loss), float(trainer.grad_norm), rate))
        batches = trainer.batch.micro_batches
        self.ids.append([int(i) for b in batches for i in b.sequence_ids[b.real()]])
        if trainer.step % self.save_every == 0:
            trainer.save()


def trainer_of(
    store: Path, output: Path, *callbacks: Callback, paradigm: Paradigm | None = None, **more: Any
) -> Trainer:
    return make_trainer(
        model=DiTConfig(**TINY_SIZES),
        paradigm=paradigm or AbsorbingDiffusion(),
        collections=[Collection(SequenceStore(store))],
        output_dir=output,
        optimizer=partial(build_adamw, settings=AdamWSettings(learning_rate=1e-2)),
        schedule=partial(cosine, settings=CosineSettings(warmup_ratio=0.2)),
        token_budget=256,
        max_length=64,
        global_batch_tokens=512,
        max_steps=9,
        device="cpu",
        precision="fp32",
        save_total_limit=9,
        callbacks=callbacks,
        **more,
    )


@pytest.mark.parametrize("paradigm", [AbsorbingDiffusion, UniformFlowMatching])
def test_replayed_steps_are_the_trained_ones_and_the_run_stays_as_it_was(
    paradigm: Callable[[], Paradigm], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    keep = Keep(save_every=4)
    trainer_of(tiny_store.path, tmp_path, keep, paradigm=paradigm()).train()
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    for step in (1, 4, 9):
        found = replay(trainer_of(tiny_store.path, tmp_path, paradigm=paradigm()), step)
        assert (found.loss, found.grad_norm, found.learning_rate) == keep.rows[step - 1]
        assert sorted(one.sequence_id for one in found.sequences) == sorted(keep.ids[step - 1])
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before
    late = str(tmp_path / "checkpoints" / "step-00000008")
    with pytest.raises(CheckpointError, match="of step 8"):
        replay(trainer_of(tiny_store.path, tmp_path, paradigm=paradigm()), 3, late)
    for step in (0, 10):
        with pytest.raises(ConfigError, match="steps 1 to 9"):
            replay(trainer_of(tiny_store.path, tmp_path, paradigm=paradigm()), step)


def test_the_sequences_losses_and_the_gradients_make_up_the_steps(
    tiny_store: SequenceStore, tmp_path: Path
) -> None:
    found = replay(trainer_of(tiny_store.path, tmp_path), 2)
    tokens = sum(tiny_store.lengths[one.sequence_id] for one in found.sequences)
    assert all(one.predicted <= one.residues <= 64 for one in found.sequences)
    assert tokens >= sum(one.predicted for one in found.sequences)
    maskable = sum(min(one.residues, 64) for one in found.sequences)
    total = sum(one.nats for one in found.sequences)
    assert found.loss == pytest.approx(total / maskable, rel=0.1)  # of residues, not of tokens
    assert [one.nats for one in found.sequences] == sorted(
        (one.nats for one in found.sequences), reverse=True
    )
    norm = np.sqrt(sum(norm**2 for norm in found.gradients.values()))
    assert norm == pytest.approx(found.grad_norm, rel=1e-5)


def _train_on_two(store: Path, output: Path) -> None:
    keep = Keep(save_every=4)
    trainer = trainer_of(store, output, keep)
    trainer.train()
    if trainer.process.is_main:
        torch.save(torch.tensor(keep.rows, dtype=torch.float64), output / "rows.pt")


def test_a_step_of_two_ranks_is_replayed_on_one(tiny_store: SequenceStore, tmp_path: Path) -> None:
    run(_train_on_two, tiny_store.path, tmp_path, world_size=2)
    rows = torch.load(tmp_path / "rows.pt", weights_only=True)
    found = replay(trainer_of(tiny_store.path, tmp_path), 7)
    torch.testing.assert_close(
        torch.tensor([found.loss, found.grad_norm], dtype=torch.float64),
        rows[6, :2],
        rtol=1e-4,
        atol=1e-5,
    )
