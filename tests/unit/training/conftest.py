"""A trainer of a tiny model with any callbacks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from d2plm.data.loader import Collection
from d2plm.data.store import SequenceStore
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings.training import AdamWSettings, CosineSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.learning_rate import cosine
from d2plm.training.optimizer import build_adamw
from d2plm.training.trainer import Trainer
from tests.conftest import TINY_SIZES
from tests.runs import make_trainer

Build = Callable[..., Trainer]


class Recorder(Callback):
    """Keeps each step's loss and gradients; stops the run after step `stop_after`."""

    def __init__(self, stop_after: int | None = None, save_every: int | None = None) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.stop_after, self.save_every = stop_after, save_every

    def on_before_optimizer_step(self, trainer: Trainer, *_: object) -> None:
        self.gradients.append(
            {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
        )

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        self.losses.append(float(trainer.loss))
        if self.save_every and trainer.step % self.save_every == 0:
            trainer.save()
        if trainer.step == self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture
def store(tiny_store: SequenceStore) -> Path:
    """The folder of the tiny store, which other processes open."""
    return tiny_store.path


@pytest.fixture
def build(tiny_store: SequenceStore, tmp_path: Path) -> Build:
    """Callbacks → a trainer of a tiny model that writes into `tmp_path / "run"`."""

    def make(*callbacks: Callback, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
        settings: dict[str, Any] = {
            "model": DiTConfig(**TINY_SIZES),
            "paradigm": AbsorbingDiffusion(),
            "max_steps": 6,
            "callbacks": callbacks,
            "collections": [Collection(tiny_store)],
            "output_dir": tmp_path / "run",
            "optimizer": partial(build_adamw, settings=AdamWSettings(learning_rate=1e-3)),
            "schedule": partial(cosine, settings=CosineSettings(warmup_ratio=0.0)),
            "token_budget": 256,
            "max_length": 64,
            "device": "cpu",
            "precision": "fp32",
        }
        return make_trainer(kind, **{**settings, **changes})

    return make
