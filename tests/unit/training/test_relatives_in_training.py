"""Training on relatives: only where they fit, and from corrupted tokens alone."""

from typing import Any
from unittest import mock

import numpy as np
import pytest

from d2plm.core.errors import ConfigError
from d2plm.core.noise import Key
from d2plm.core.vocabulary import MASK
from d2plm.data.loader import Collection
from d2plm.data.relatives import RelativesIndex
from d2plm.data.store import SequenceStore
from d2plm.model import dit
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.training.trainer import Trainer
from tests.conftest import TINY_SIZES, MonkeyPatch
from tests.unit.training.conftest import Build


def test_relatives_are_for_models_and_paradigms_that_take_them(build: Build) -> None:
    taking = DiTConfig(**TINY_SIZES, relatives_dim=8)
    for number, named in ((None, "null"), (0, "0")):
        with pytest.raises(ConfigError, match=f"max_relatives={named}"):
            build(model=taking, max_relatives=number)
    with pytest.raises(ConfigError, match="max_relatives=2"):
        build(max_relatives=2)
    for paradigm in (UniformFlowMatching(), AbsorbingDiffusion(shift=True)):
        with pytest.raises(ConfigError, match="relatives_dim=8"):
            build(model=taking, max_relatives=2, paradigm=paradigm)


@pytest.fixture
def taking(build: Build, tiny_store: SequenceStore) -> Build:
    """Changes → a trainer of a model that takes relatives; each sequence has the next two."""

    def make(**changes: Any) -> Trainer:
        count = len(tiny_store)
        queries = np.repeat(np.arange(count), 2)
        targets = (queries + np.tile([1, 2], count)) % count
        index = RelativesIndex.of_hits(count, queries, targets, np.full(len(queries), 0.4), 2)
        settings: dict[str, Any] = {
            "model": DiTConfig(**TINY_SIZES, relatives_dim=8),
            "max_relatives": 2,
            "collections": [Collection(tiny_store, relatives=index)],
        }
        return build(**{**settings, **changes})

    return make


def test_only_corrupted_tokens_are_aligned(taking: Build, monkeypatch: MonkeyPatch) -> None:
    """In training and in the bound."""
    spy = mock.Mock(wraps=dit.align)
    monkeypatch.setattr(dit, "align", spy)
    trainer = taking(max_steps=2)
    corrupt = mock.Mock(wraps=trainer.paradigm.corrupt)
    monkeypatch.setattr(trainer.paradigm, "corrupt", corrupt)
    trainer.train()
    batches = [call.args[0] for call in corrupt.call_args_list]
    aligned = [call.args[0] for call in spy.call_args_list]
    assert len(aligned) == len(batches) == 2
    trainer.paradigm.bound(trainer.denoiser, batches[0], Key(0), draw=0, draws=1)
    aligned.append(spy.call_args.args[0])
    for tokens, batch in zip(aligned, [*batches, batches[0]], strict=True):
        changed = tokens != batch.tokens
        assert changed.any()
        assert (tokens[changed] == MASK).all()
