"""A trainer from a configuration: class, callbacks and vocabulary; errors name the keys."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from d2plm.assembly import training_run
from d2plm.assembly.dry_run import forecast
from d2plm.assembly.preparation import build_vocabulary
from d2plm.assembly.training_run import (
    build_callbacks,
    build_optimizer,
    build_schedule,
    build_trainer,
    on_one_process,
    open_stores,
    trainer_keys,
    training_stores,
)
from d2plm.config import compose
from d2plm.core.errors import ConfigError, ModelError
from d2plm.core.vocabulary import DNA, Codons, Vocabulary
from d2plm.data.store import SequenceStore
from d2plm.data.synthetic import SyntheticSequences, plausible_lengths
from d2plm.export.exported_model import load_export
from d2plm.settings.callbacks import CallbackSettings
from d2plm.settings.commands import CALLBACKS, TrainSettings
from d2plm.settings.registry import Entry, registered
from d2plm.settings.schema import Settings, key
from d2plm.settings.training import TrainerSettings
from d2plm.tracking.runs import Runs
from d2plm.training.callbacks.callback import Callback, RunContext
from d2plm.training.metrics import Metric
from d2plm.training.plan import Plan
from d2plm.training.trainer import Trainer
from tests.conftest import DiTFactory, MonkeyPatch

IMPOSSIBLE = [
    *("trainer.gradient_accumulation_steps=3", "data.token_budget=100", "distributed.replicate=3"),
    *("schedule.warmup_steps=1000", "callbacks.early_stopping.mode=up"),
]


class MyTrainer(Trainer):
    """A trainer of the user's own."""


def configuration(folder: Path, *overrides: str) -> TrainSettings:
    words = ["experiment=debug", "data.residues=random", f"work_dir={folder}", "tracking=none"]
    config: TrainSettings = compose("train", [*words, *overrides])
    return config


def built(config: TrainSettings) -> Trainer:
    return build_trainer(config, training_stores(config))


def test_a_configuration_names_the_class(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    for kind in (MyTrainer, dict):
        monkeypatch.setitem(registered("trainer"), kind.__name__, Entry(TrainerSettings, kind))
    assert type(built(configuration(tmp_path, "trainer.type=MyTrainer"))) is MyTrainer
    with pytest.raises(ConfigError, match=r"^trainer\.type='dict': must be the name of a class"):
        built(configuration(tmp_path, "trainer.type=dict"))


@pytest.mark.parametrize(
    ("words", "beginning"),
    [
        *((word, word.partition("=")[0]) for word in IMPOSSIBLE),
        ("data.window=127 data.max_length=null", "data.window=127: must be at most model."),
        ("data.alphabet=tokenizer", "data.tokenizer=null"),
        ("data.alphabet=dna model.relatives_dim=8", "model.relatives_dim=8"),
    ],
)
def test_an_impossible_setting_is_rejected_by_its_key(
    words: str, beginning: str, tmp_path: Path
) -> None:
    for way in (forecast, built):
        with pytest.raises(ConfigError) as caught:
            way(configuration(tmp_path, *words.split()))
        assert str(caught.value).startswith(beginning)


def test_a_dry_run_knows_the_processes_that_share_rows(tmp_path: Path) -> None:
    four = ["distributed.processes=4", "distributed.tensor=2", "trainer.global_batch_tokens=null"]
    config = configuration(tmp_path, *four)
    described = forecast(config)
    assert described["processes"] == "4 = 2 shards × tensor 2"
    assert described["step"].startswith(f"{2 * config.data.token_budget:,} tokens")
    three = configuration(tmp_path, "distributed.processes=3", "distributed.context=3")
    with pytest.raises(ConfigError, match=r"^distributed\.context=3: the model's num_attention_he"):
        forecast(three)


def test_a_run_of_any_plan_is_taken_up_by_one_process(tmp_path: Path) -> None:
    sizes = ("processes", "replicate", "tensor", "context", "expert", "pipeline")
    spread = [f"distributed.{key}=2" for key in sizes]
    trainer = built(on_one_process(configuration(tmp_path, *spread)))
    assert trainer.plan == Plan(shard=1)


def test_an_error_in_training_names_its_key(tmp_path: Path) -> None:
    monitor = ["callbacks.early_stopping.patience=1", "callbacks.early_stopping.monitor=loss"]
    trainer = built(
        configuration(
            tmp_path, *monitor, "callbacks.evaluation.every=1", "callbacks.evaluation.sequences=2"
        )
    )
    named = r"^callbacks\.early_stopping\.monitor='loss'"
    with pytest.raises(ConfigError, match=named), trainer_keys():
        trainer.train()


def test_a_run_of_codons_is_exported_with_its_vocabulary(tmp_path: Path) -> None:
    words = ["data.alphabet=codon", "trainer.max_steps=1", "callbacks.evaluation=null"]
    config = configuration(tmp_path, *words)
    trainer = built(config)
    assert trainer.identity["data"]["vocabulary"] == Codons().describe()
    trainer.train()
    exported = load_export(config.model_dir)
    assert exported.vocabulary == Codons()
    assert exported.model.config.vocab_size == Codons().size
    with pytest.raises(ModelError, match=r"init_from=.*\(codon\)"):
        built(configuration(tmp_path / "other", f"init_from={config.model_dir}"))


def prepared(monkeypatch: MonkeyPatch, vocabulary: Vocabulary) -> None:
    store = SyntheticSequences(plausible_lengths(9), vocabulary=vocabulary)
    data = SimpleNamespace(splits={"train": store})
    monkeypatch.setattr(training_run, "open_prepared", lambda folder: data)


def test_data_of_another_vocabulary_are_refused(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    for vocabulary, configured in ((DNA, "protein"), (Codons(), "dna")):
        prepared(monkeypatch, vocabulary)
        words = f"data.alphabet='{configured}': .*data.alphabet={vocabulary.name};"
        with pytest.raises(ConfigError, match=words):
            open_stores(configuration(tmp_path, f"data.alphabet={configured}"))


def test_prepared_data_contain_their_tokenizer(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    config = configuration(tmp_path, "data.alphabet=tokenizer")
    file, other = "examples/data/king_james_bible_bpe.json", tmp_path / "other.json"
    own = build_vocabulary(replace(config.data, tokenizer=file))
    prepared(monkeypatch, own)
    assert open_stores(config)["train"].vocabulary == own
    other.write_text(Path(file).read_text().replace('"truncation": null', '"truncation" : null'))
    changed = configuration(tmp_path, "data.alphabet=tokenizer", f"data.tokenizer={other}")
    with pytest.raises(ConfigError, match=r"with data\.alphabet=tokenizer and another"):
        open_stores(changed)


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


def by_class(callbacks: list[Callback]) -> dict[str, Any]:
    return {type(callback).__name__: callback for callback in callbacks}


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
    found = by_class(chosen())
    assert [*found] == DEFAULT
    # What only the command has is given to those that take it.
    assert found["MetricLogger"].run is offered.run
    assert found["Evaluate"].max_length == 64
    assert found["Export"].folder == offered.model_dir
    assert found["Export"].provenance == offered.provenance
    left = chosen(*(f"callbacks.{name}=null" for name in CALLBACKS[::2]))
    assert [*by_class(left)] == DEFAULT[1::2]


def test_a_user_s_class_is_called_before_what_saves(chosen: Choose, offered: RunContext) -> None:
    found = by_class(chosen("callbacks.mine.size=3", "callbacks.metrics.more=[my_metric]"))
    assert isinstance(found["MetricLogger"].metrics[-1], MyMetric)
    assert [name for name in found if found[name].called_last] == ["SaveCheckpoint", "Export"]
    assert found["Mine"].provenance is offered.provenance
    assert found["Mine"].settings == MySettings(size=3)


@pytest.mark.parametrize(
    ("word", "key"),
    [
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
