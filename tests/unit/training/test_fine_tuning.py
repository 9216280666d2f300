"""Fine-tuning: where training starts, what it leaves alone, what a resumed run insists on.

That a resumed run equals the unbroken one is in test_trainer.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from transformers import EsmForMaskedLM
from transformers.utils.logging import disable_progress_bar

from d2plm.assembly import training_run
from d2plm.commands import train
from d2plm.config import compose, read
from d2plm.core.errors import CheckpointError, ConfigError, ModelError
from d2plm.data.store import SequenceStore
from d2plm.export.exported_model import load_export, save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.model.esm import load_esm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings.commands import TrainSettings
from d2plm.settings.training import AdamWSettings
from d2plm.tracking import mlflow_run, registry
from d2plm.tracking.runs import Runs
from d2plm.training.optimizer import build_adamw
from tests.conftest import TINY_SIZES, DiTFactory, MonkeyPatch, Tokens, write_store
from tests.unit.model.test_esm import esm_like
from tests.unit.training.conftest import Build

disable_progress_bar()

STEPS = 4
FROZEN = ["token_embedding.*", "blocks.0.*"]


@pytest.fixture
def build(build: Build) -> Build:
    """Changes → a trainer of a tiny model."""
    return partial(
        build,
        paradigm=AbsorbingDiffusion(loss="mean"),
        optimizer=partial(build_adamw, settings=AdamWSettings(learning_rate=1e-2)),
        token_budget=512,
        max_length=128,
        max_steps=STEPS,
    )


@pytest.fixture(scope="module")
def esm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ESM-2 checkpoint with weights as transformers draws them."""
    torch.manual_seed(0)
    config = esm_like(2, 16, 2, 32, max_position_embeddings=130)
    folder = tmp_path_factory.mktemp("esm")
    EsmForMaskedLM(config).save_pretrained(folder)
    return folder


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "frozen"),
    [
        ({"lora_rank": 2, "precision": "bf16"}, lambda name: ".lora_" not in name),
        ({"freeze": FROZEN}, lambda name: name.startswith(("token_embedding.", "blocks.0."))),
    ],
    ids=["low rank", "frozen"],
)
def test_frozen_parameters_stay_as_they_are_and_the_others_move(
    changes: dict[str, Any], frozen: Any, build: Build, tiny_dit: DiTFactory
) -> None:
    trainer = build(model=tiny_dit(), **changes)
    before = weights(trainer.model)
    assert_equal(trainer.ema.shadow, before)
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) == frozen(name), name
        assert torch.equal(trainer.ema.shadow[name], before[name]) == frozen(name), name
        assert bool(trainer.optimizer.state[parameter]) != frozen(name), name


def test_what_cannot_be_trained_is_rejected(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"^lora_rank=2"):  # of no model to start from
        build(lora_rank=2)
    with pytest.raises(ConfigError, match=r"^freeze='block.1.*blocks.\{0-1}.attention"):
        build(freeze=["blocks.0.*", "block.1.*"])
    for freeze in (["*"], "blocks.0.*", [3]):
        with pytest.raises(ConfigError, match=r"^freeze="):
            build(freeze=freeze)


Configure = Callable[..., TrainSettings]


@pytest.fixture
def configure(tiny_store: SequenceStore, tmp_path: Path, monkeypatch: MonkeyPatch) -> Configure:
    """Overrides → the train command's configuration, on stores that are already there."""
    stores = {"train": tiny_store, "validation": tiny_store}
    monkeypatch.setattr(train, "training_stores", lambda config: stores)
    shared = ["experiment=debug", "tracking=none", f"work_dir={tmp_path / 'run'}"]
    shared += ["model.time_embedding_dim=8", "trainer.max_steps=2", "trainer.precision=fp32"]
    shared += ["data.token_budget=512", "callbacks.checkpoint.every=1"]
    return lambda *overrides: compose("train", [*shared, *overrides])


@pytest.fixture
def exported(tiny_dit: DiTFactory, tmp_path: Path) -> Path:
    """The folder of an exported model."""
    model = tiny_dit(num_attention_heads=4, qk_norm=False)
    lengths = LengthHistogram.of(np.array([50]), 126)
    return save_export(tmp_path / "exported", model, AbsorbingDiffusion(), lengths, {})


def test_training_starts_from_an_export_with_its_architecture(
    exported: Path, configure: Configure, tiny_store: SequenceStore
) -> None:
    others = ("paradigm=flow_matching", "model=nano", "model.hidden_dropout_prob=0.1")
    config = configure(f"init_from='{exported}'", *others)
    stores = {"train": tiny_store, "validation": tiny_store}
    trainer = training_run.build_trainer(config, stores, Runs())
    assert_equal(weights(trainer.model), weights(load_export(exported).model))
    assert trainer.model.config.hidden_dropout_prob == 0.1
    train.run(config)
    written = yaml.safe_load((Path(config.output_dir) / "config.yaml").read_text())
    assert written["init_from"] == str(exported)
    keys = ("num_attention_heads", "qk_norm", "hidden_dropout_prob")
    assert [written["model"][key] for key in keys] == [4, False, 0.1]
    assert load_export(config.model_dir).paradigm.name == "flow_matching"
    again = read("train", Path(config.output_dir, "config.yaml"))
    trainer = training_run.build_trainer(again, stores, Runs())
    trainer.load(trainer.saver.root.of("step-00000002"))
    assert trainer.step == 2


def test_training_starts_from_an_esm2_folder(esm_folder: Path, configure: Configure) -> None:
    config = configure(f"init_from='{esm_folder}'", "optimizer.learning_rate=1e-5")
    train.run(config)
    tuned, start = load_export(config.model_dir).model, load_esm(esm_folder)
    found = tuned.config
    assert (found.feed_forward, found.hidden_size, found.head) == ("gelu", 16, "esm")
    assert found.time_embedding_dim == 8
    assert found.rope_frequencies == start.config.rope_frequencies
    assert tuned.head.modulation.weight.any()  # the time begins to count
    for name, tensor in weights(tuned).items():
        if "time_embedding" not in name and "modulation" not in name:
            torch.testing.assert_close(tensor, weights(start)[name], atol=1e-3, rtol=0)


def test_a_start_in_the_registry(
    exported: Path, configure: Configure, monkeypatch: MonkeyPatch
) -> None:
    download = mock.Mock(return_value=exported)
    monkeypatch.setattr(registry, "download", download)
    monkeypatch.setattr(registry, "version_of", lambda client, name, alias: "7")
    monkeypatch.setattr(mlflow_run, "open_client", lambda uri: None)
    _, start = training_run.load_start(configure("init_from='models:/proteins@champion'"))
    download.assert_called_once_with(None, "proteins", "7")
    assert start is not None
    assert start.location == "models:/proteins/7"  # which stays where the alias moves
    assert_equal(weights(start.model), weights(load_export(exported).model))


def test_a_start_that_is_not_a_model_is_rejected(configure: Configure) -> None:
    with pytest.raises(ModelError, match=r"^init_from="):
        train.run(configure("init_from=nowhere"))
    with pytest.raises(ConfigError, match=r"^init_from="):
        train.run(configure("init_from=models:/proteins"))


def test_resuming_under_another_start_or_freeze_or_on_other_data_is_rejected(
    exported: Path, configure: Configure, proteins: list[Tokens], monkeypatch: MonkeyPatch
) -> None:
    frozen = "trainer.freeze=[blocks.0.*,token_embedding.*]"
    train.run(configure(f"init_from='{exported}'", frozen))
    moved = exported.rename(exported.with_name("moved"))
    train.run(configure(f"init_from='{moved}'", frozen))  # the same weights in another place
    model = load_export(moved)
    with torch.no_grad():
        model.model.head.proj.bias += 1
    other = save_export(moved.with_name("other"), model.model, model.paradigm, model.lengths, {})
    architecture = [f"model.{key}={value}" for key, value in TINY_SIZES.items()]
    architecture += ["model.num_attention_heads=4", "model.qk_norm=false"]
    for words, key in (
        ([f"init_from='{moved}'"], "trainer.freeze"),
        ([f"init_from='{other}'", frozen], "init_from"),
        ([*architecture, frozen], "init_from"),
    ):
        with pytest.raises(CheckpointError, match=f"{key}: "):
            train.run(configure(*words))
    changed = write_store(moved.with_name("changed"), proteins[1:40])
    stores = {"train": changed, "validation": changed}
    monkeypatch.setattr(train, "training_stores", lambda config: stores)
    with pytest.raises(CheckpointError, match=r"data\.collections\.0\.digest: "):
        train.run(configure(f"init_from='{moved}'", frozen))
