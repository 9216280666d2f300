"""Choices by name: those of modules that are given with --module, and of the user's in general."""

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from d2plm.config import compose, compose_arguments
from d2plm.core.errors import ConfigError, ModelError
from d2plm.paradigms import load_paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings import registry
from d2plm.settings.paradigm import DiffusionSettings
from d2plm.settings.registry import find, load_modules, module_words, register
from d2plm.settings.schema import key
from tests.commands import d2plm


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers and imports is forgotten after it."""
    entries = {group: dict(known) for group, known in registry._ENTRIES.items()}
    monkeypatch.setattr(registry, "_ENTRIES", entries)
    monkeypatch.setattr(registry, "_loaded", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@dataclass(frozen=True, kw_only=True)
class MineSettings(DiffusionSettings):
    """A paradigm of one's own."""

    type: str = key("mine")
    """registered name of the paradigm"""
    strength: float = key(0.5, low=0, high=1)
    """strength of it"""


class Mine(AbsorbingDiffusion):
    Settings = MineSettings


def test_a_registered_paradigm_is_configured_saved_and_loaded(tmp_path: Path) -> None:
    register("paradigm", "mine", Mine, MineSettings)
    config = compose("train", ["paradigm=mine", "paradigm.strength=0.25"])
    assert config.paradigm == MineSettings(name="mine", strength=0.25)
    paradigm = find("paradigm", "mine").factory(config.paradigm)
    paradigm.save_config(tmp_path)
    loaded = load_paradigm(tmp_path)
    assert isinstance(loaded, Mine)
    assert loaded.settings.strength == 0.25
    with pytest.raises(ConfigError, match="must be a number ≥ 0 and ≤ 1"):
        compose("train", ["paradigm.type=mine", "paradigm.strength=2"])
    del registry._ENTRIES["paradigm"]["mine"]
    with pytest.raises(ModelError, match=r"unknown paradigm.*--module FILE"):
        load_paradigm(tmp_path)


def test_a_name_and_a_group_that_are_taken_or_unknown_are_rejected() -> None:
    register("paradigm", "mine", Mine, MineSettings)
    register("paradigm", "mine", Mine, MineSettings)  # the module is imported twice
    with pytest.raises(ConfigError, match="the paradigm 'mine' exists already"):
        register("paradigm", "mine", AbsorbingDiffusion, MineSettings)
    with pytest.raises(ConfigError, match=r"unknown group 'paradigms' \(did you mean 'paradigm'"):
        register("paradigms", "mine", Mine)


def test_a_module_is_a_file_or_a_name_and_is_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "research_callback.py"
    file.write_text(
        textwrap.dedent(
            """
            from d2plm.settings.registry import register
            from d2plm.training.callbacks.callback import Callback

            class Quiet(Callback):
                pass

            register("callback", "quiet", Quiet)
            """
        )
    )
    config, _ = compose_arguments("train", ["--module", str(file), "callbacks.quiet={}"])
    assert list(config.callbacks)[-1] == "quiet"
    assert compose("train", ["callbacks={quiet: {}}"]).callbacks == config.callbacks
    assert module_words() == ["--module", str(file)]
    load_modules([str(file)])
    assert module_words() == ["--module", str(file)]


def test_a_module_that_is_missing_fails_or_has_another_s_name_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "failing_module.py").write_text("1 / 0")
    (tmp_path / "json.py").touch()
    for name, reason in (
        (str(tmp_path / "absent_module.py"), "No module named"),
        ("d2plm_absent", "No module named"),
        (str(tmp_path / "failing_module.py"), "division by zero"),
        (str(tmp_path / "json.py"), "json is another module; rename the file"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            load_modules([name])
        assert str(caught.value).startswith(f"--module {name}: ")


@pytest.mark.slow
def test_a_run_s_processes_know_what_the_module_registers(tmp_path: Path) -> None:
    (tmp_path / "mark.py").write_text(
        textwrap.dedent(
            """
            import os
            from d2plm.settings.registry import register
            from d2plm.training.callbacks.callback import Callback

            class Mark(Callback):
                def on_train_end(self, trainer):
                    (trainer.output_dir / f"mark-{trainer.process.rank}").touch()

            register("callback", "mark", Mark)
            """
        )
    )
    words = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.time_embedding_dim=4"]
    words += ["data.residues=random", "data.token_budget=1024", "trainer.max_steps=2"]
    words += ["model.intermediate_size=16", "trainer.global_batch_tokens=2048", "tracking=none"]
    result = d2plm(
        *("train", "--module", str(tmp_path / "mark.py"), "callbacks.mark={}", *words),
        *("distributed.processes=2", f"work_dir={tmp_path / 'run'}"),
    )
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "run" / "diffusion"
    assert sorted(file.name for file in folder.glob("mark-*")) == ["mark-0", "mark-1"]
