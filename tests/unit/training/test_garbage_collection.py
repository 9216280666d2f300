"""GarbageCollection: Python's collector runs at its steps alone, and is given back."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from d2plm.settings.callbacks import GarbageCollectionSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.garbage_collection import GarbageCollection
from d2plm.training.trainer import Trainer
from tests.unit.training.conftest import Build, Recorder


class Collections(Callback):
    """Counts the collections in each step by generation, and looks at the collector's state."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.enabled: list[bool] = []
        self.frozen: list[int] = []
        self.step = 0

    def note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.seen.append((self.step, info["generation"]))

    def on_step_begin(self, trainer: Trainer) -> None:
        self.step = trainer.step + 1
        self.enabled.append(gc.isenabled())
        self.frozen.append(gc.get_freeze_count())
        cycles: list[Any] = [[] for _ in range(5000)]  # enough for a collection at any other time
        for cycle in cycles:
            cycle.append(cycle)


@pytest.fixture
def collections() -> Iterator[Collections]:
    collections = Collections()
    gc.callbacks.append(collections.note)
    yield collections
    gc.callbacks.remove(collections.note)


def test_it_collects_at_its_steps_and_is_given_back(build: Build, collections: Collections) -> None:
    collector = GarbageCollection(GarbageCollectionSettings(every=2, generation=1))
    with pytest.raises(KeyboardInterrupt):
        build(collector, collections, Recorder(stop_after=5)).train()
    assert [seen for seen in collections.seen if 0 < seen[0] < 5] == [(2, 1), (4, 1)]
    assert not any(collections.enabled)
    assert min(collections.frozen) > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
