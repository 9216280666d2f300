"""Choices by name: those of modules that are given with --module, and of the user's in general."""

import json
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from d2plm.cli import main
from d2plm.completion import candidates
from d2plm.config import compose, compose_arguments
from d2plm.core.errors import ConfigError, ModelError
from d2plm.paradigms import load_paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings import registry
from d2plm.settings.paradigm import DiffusionSettings
from d2plm.settings.registry import find, load_modules, module_words, register
from d2plm.settings.schema import key
from tests.commands import ROOT, d2plm
from tests.conftest import Captured, MonkeyPatch


@pytest.fixture(autouse=True)
def as_before(monkeypatch: MonkeyPatch) -> Iterator[None]:
    """What a test registers and imports is forgotten after it."""
    entries = {group: dict(known) for group, known in registry._ENTRIES.items()}
    monkeypatch.setattr(registry, "_ENTRIES", entries)
    monkeypatch.setattr(registry, "_loaded", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("my_research", "failing_module"):
        sys.modules.pop(name, None)


@dataclass(frozen=True, kw_only=True)
class MineSettings(DiffusionSettings):
    type: str = key("mine")
    """registered name of the paradigm"""
    strength: float = key(0.5, low=0, high=1)
    """strength of it"""


class Mine(AbsorbingDiffusion):
    Settings = MineSettings


def test_a_registered_paradigm_is_configured_saved_and_loaded(tmp_path: Path) -> None:
    register("paradigm", "mine", Mine, MineSettings)
    register("paradigm", "mine", Mine, MineSettings)  # the module is imported twice
    config = compose("train", ["paradigm=mine", "paradigm.strength=0.25"])
    assert config.paradigm == MineSettings(name="mine", strength=0.25)
    paradigm = find("paradigm", "mine").factory(config.paradigm)
    paradigm.save_config(tmp_path)
    loaded = load_paradigm(tmp_path)
    assert isinstance(loaded, Mine)
    assert loaded.settings.strength == 0.25
    with pytest.raises(ConfigError, match="the paradigm 'mine' exists already"):
        register("paradigm", "mine", AbsorbingDiffusion, MineSettings)
    with pytest.raises(ConfigError, match=r"unknown group 'paradigms' \(did you mean 'paradigm'"):
        register("paradigms", "mine", Mine)
    del registry._ENTRIES["paradigm"]["mine"]
    with pytest.raises(ModelError, match=r"unknown paradigm.*--module FILE"):
        load_paradigm(tmp_path)


def test_a_field_is_a_key_in_help_completion_documents_and_validation(capsys: Captured) -> None:
    register("paradigm", "mine", Mine, MineSettings)
    said = "strength of it (≥ 0 and ≤ 1)"
    assert main(["train", "--help", "--all"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["paradigm.strength=0.5", said] in rows
    assert candidates("d2plm train paradigm.str") == ["paradigm.strength="]
    page, *_, schema = runpy.run_path(f"{ROOT}/docs/configuration.py")["generated"]().values()
    assert "- `paradigm.strength=0.5`: strength of it (≤ 1) (mine)\n" in page
    paradigm = json.loads(schema)["properties"]["paradigm"]["properties"]
    assert paradigm["strength"]["description"] == "strength of it"
    with pytest.raises(ConfigError) as caught:
        compose("train", ["paradigm.type=mine", "paradigm.strength=2"])
    assert caught.value.settings == {"paradigm.strength": 2}
    assert Mine(MineSettings(strength=1)).settings.strength == 1


# A researcher's single file: one of every kind.
RESEARCH = """
from dataclasses import dataclass

from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings.paradigm import DiffusionSettings
from d2plm.settings.registry import register
from d2plm.settings.schema import key
from d2plm.settings.training import AdamWSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.metrics import Metric
from d2plm.training.optimizer import build_adamw
from d2plm.training.trainer import Trainer

@dataclass(frozen=True, kw_only=True)
class MySettings(DiffusionSettings):
    type: str = key("my_paradigm")
    strength: float = key(0.5, low=0, high=1)

class MyParadigm(AbsorbingDiffusion):
    Settings = MySettings

class MyMetric(Metric):
    def read(self, trainer):
        return {"strength": trainer.paradigm.settings.strength}

class Mark(Callback):
    def on_train_end(self, trainer):
        name = f"{type(trainer).__name__}-{type(trainer.optimizer).__name__}-{trainer.process.rank}"
        (trainer.output_dir / name).touch()

class MyTrainer(Trainer):
    pass

def my_optimizer(model, parameters, settings):
    optimizer = build_adamw(model, parameters, settings)
    optimizer.__class__ = type("Mine", (type(optimizer),), {})
    return optimizer

register("paradigm", "my_paradigm", MyParadigm, MySettings)
register("metric", "my_metric", MyMetric)
register("callback", "mark", Mark)
register("trainer", "my_trainer", MyTrainer)
register("optimizer", "my_optimizer", my_optimizer, AdamWSettings)
"""
CHOICES = ["paradigm=my_paradigm", "trainer.type=my_trainer", "optimizer.type=my_optimizer"]
CHOICES += ["callbacks.mark={}", "callbacks.metrics.more=[my_metric]", "paradigm.strength=0.25"]


@pytest.fixture
def research(tmp_path: Path) -> list[str]:
    file = tmp_path / "my_research.py"
    file.write_text(RESEARCH)
    return ["--module", str(file)]


def test_a_module_of_the_command_line_is_passed_on(research: list[str], tmp_path: Path) -> None:
    config, _ = compose_arguments("train", [*research, *CHOICES])
    assert config.paradigm.strength == 0.25
    assert list(config.callbacks)[-1] == "mark"
    load_modules(research[1:])  # a second time
    assert module_words() == research
    (tmp_path / "failing_module.py").write_text("1 / 0")
    (tmp_path / "json.py").touch()
    for name, reason in (
        (str(tmp_path / "absent_module.py"), "no Python file"),
        ("d2plm_absent", "No module named"),
        (str(tmp_path / "failing_module.py"), "division by zero"),
        (str(tmp_path / "json.py"), "another module"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            load_modules([name])
        assert str(caught.value).startswith(f"--module {name}: ")


def test_processes_of_a_training_have_the_module(
    research: list[str], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def run(torchrun: list[str], *_: object) -> int:
        assert "--nproc-per-node=2" in torchrun
        ran = d2plm(*torchrun[torchrun.index("train") :], WORLD_SIZE="1")  # one of its ranks
        assert ran.returncode == 0, ran.stderr
        return ran.returncode

    monkeypatch.setattr("d2plm.core.processes.run", run)
    words = ["train", *research, *CHOICES, f"work_dir={tmp_path}", "tracking=none"]
    words += ["model.hidden_size=16", "model.num_hidden_layers=1", "model.time_embedding_dim=4"]
    words += ["model.intermediate_size=16", "data.residues=random", "data.token_budget=1024"]
    words += ["trainer.max_steps=2", "trainer.global_batch_tokens=2048", "trainer.compile=false"]
    assert main([*words, "callbacks.evaluation=null", "distributed.processes=2"]) == 0
    output_dir = tmp_path / "my_paradigm"
    assert (output_dir / "MyTrainer-Mine-0").exists()
    row = (output_dir / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(row)["strength"] == 0.25
    words = ["generate", str(output_dir / "model"), "generation.number=1"]
    words += [f"output={tmp_path / 'a.fasta'}", "generation.steps=2", "generation.length=9"]
    assert "--module FILE" in d2plm(*words).stderr
    assert d2plm(*words, *research).returncode == 0
