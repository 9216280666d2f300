"""A trainer of a tiny model, with whatever callbacks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from d2plm.data.loader import Collection
from d2plm.data.store import SequenceStore
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.training.callbacks.callback import Callback
from d2plm.training.optimizer import build_adamw
from d2plm.training.schedule import cosine
from d2plm.training.trainer import Trainer
from tests.conftest import TINY_SIZES


@pytest.fixture
def build(tiny_store: SequenceStore, tmp_path: Path) -> Callable[..., Trainer]:
    """Callbacks → a trainer of a tiny model that writes into `tmp_path / "run"`."""

    def make(*callbacks: Callback, max_steps: int = 6, **changes: Any) -> Trainer:
        settings: dict[str, Any] = {
            "collections": [Collection(tiny_store)],
            "output_dir": tmp_path / "run",
            "optimizer": partial(build_adamw, learning_rate=1e-3),
            "schedule": partial(cosine, warmup_ratio=0.0),
            "token_budget": 256,
            "max_length": 64,
            "device": "cpu",
            "precision": "fp32",
        }
        return Trainer(
            model=DiTConfig(**TINY_SIZES),
            paradigm=AbsorbingDiffusion(),
            max_steps=max_steps,
            callbacks=callbacks,
            **{**settings, **changes},
        )

    return make
