"""The chosen callbacks, schedule and optimizer: each builds, and what the user may change."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from d2plm.assembly.training_run import build_callbacks, build_optimizer, build_schedule
from d2plm.config import compose
from d2plm.core.errors import ConfigError
from d2plm.data.store import SequenceStore
from d2plm.export.export_callback import Export
from d2plm.settings.callbacks import CallbackSettings
from d2plm.settings.commands import CALLBACKS
from d2plm.settings.registry import Entry, registered
from d2plm.settings.schema import Settings, key
from d2plm.tracking.runs import Runs
from d2plm.training.callbacks.callback import Callback, RunContext
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.callbacks.metric_logger import MetricLogger
from d2plm.training.metrics import Metric
from tests.conftest import DiTFactory, MonkeyPatch

DEFAULT = [
    *("GradientHealth", "GarbageCollection", "Profiler", "MetricLogger", "ProgressBar"),
    *("Evaluate", "EarlyStopping", "SaveCheckpoint", "Export"),
]

Choose = Callable[..., list[Callback]]


@pytest.fixture
def offered(tiny_store: SequenceStore, tmp_path: Path) -> RunContext:
    """What a run has for its callbacks."""
    provenance = {"name": "t", "digests": {}}
    return RunContext(tiny_store, 64, tmp_path / "model", run=Runs(), provenance=provenance)


@pytest.fixture
def chosen(offered: RunContext) -> Choose:
    """Overrides → the callbacks."""
    return lambda *words: build_callbacks(compose("train", [*words]), offered)


def of_class(callbacks: list[Callback], kind: type) -> Any:
    (found,) = [callback for callback in callbacks if isinstance(callback, kind)]
    return found


def names(callbacks: list[Callback]) -> list[str]:
    return [type(callback).__name__ for callback in callbacks]


@dataclass(frozen=True, kw_only=True)
class MySettings(CallbackSettings):
    size: int = key()
    folder: str | None = key(None)


class Mine(Callback):
    """A callback of the user's."""

    def __init__(self, settings: MySettings, provenance: dict[str, Any]) -> None:
        self.settings, self.provenance = settings, provenance

    @classmethod
    def create(cls, settings: MySettings, context: RunContext) -> "Mine":
        return cls(settings, context.provenance)


class MyMetric(Metric):
    """A metric of the user's."""


@pytest.fixture(autouse=True)
def of_the_user_s(monkeypatch: MonkeyPatch) -> None:
    callbacks = registered("callback")
    monkeypatch.setitem(callbacks, "mine", Entry(MySettings, Mine))
    monkeypatch.setitem(callbacks, "no_callback", Entry(CallbackSettings, dict))
    monkeypatch.setitem(registered("metric"), "my_metric", Entry(Settings, MyMetric))


def test_every_schedule_and_optimizer_is_built(tiny_dit: DiTFactory) -> None:
    for choice in registered("schedule"):
        schedule = build_schedule(compose("train", [f"schedule={choice}"]))(1000)
        assert 0 < schedule(0) < schedule(100) == 1
        assert schedule(1000) == (1 if choice == "constant" else 0)
    for choice in registered("optimizer"):
        factory = build_optimizer(compose("train", [f"optimizer={choice}"]))
        assert isinstance(factory(tiny_dit()), torch.optim.Optimizer)


def test_the_default_ones_come_in_their_order(chosen: Choose, offered: RunContext) -> None:
    callbacks = chosen()
    assert names(callbacks) == DEFAULT
    # What only the command has is given to those that take it.
    assert of_class(callbacks, MetricLogger).run is offered.run
    assert of_class(callbacks, Evaluate).max_length == 64
    export = of_class(callbacks, Export)
    assert (export.folder, export.provenance) == (offered.model_dir, offered.provenance)


def test_null_leaves_one_out(chosen: Choose) -> None:
    assert names(chosen(*(f"callbacks.{name}=null" for name in CALLBACKS[::2]))) == DEFAULT[1::2]


def test_a_user_s_class_is_called_before_what_saves(chosen: Choose, offered: RunContext) -> None:
    callbacks = chosen("callbacks.mine.size=3", "callbacks.metrics.more=[my_metric]")
    assert isinstance(of_class(callbacks, MetricLogger).metrics[-1], MyMetric)
    assert names([one for one in callbacks if one.called_last]) == ["SaveCheckpoint", "Export"]
    mine = of_class(callbacks, Mine)
    assert not mine.called_last
    assert mine.provenance is offered.provenance
    assert mine.settings == MySettings(size=3)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("callbacks.evaluation.evry=3", "callbacks.evaluation.evry"),
        ("callbacks.checkpoint.every=0", "callbacks.checkpoint.every=0"),
        ("callbacks.progress=3", "callbacks.progress=3"),
        ("callbacks.mine.folder=a", "callbacks.mine.size"),
        ("callbacks.nowhere={}", "nowhere"),
        ("callbacks.no_callback={}", "no_callback"),
        ("callbacks.metrics.more=[my_metrix]", "callbacks.metrics.more='my_metrix'"),
    ],
)
def test_what_cannot_be_built_is_rejected_by_name(word: str, key: str, chosen: Choose) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        chosen(word)
