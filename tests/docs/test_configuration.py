"""docs/configuration.md is what docs/configuration.py writes, and says what every key is."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from d2plm.config import compose
from d2plm.core.files import config_dir
from tests.docs.markdown import ROOT


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    """docs/configuration.py, which is in no package."""
    name = "docs_configuration"
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "configuration.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_current(writer: ModuleType) -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert writer.reference(config_dir()) == written, "run: make docs"


def test_it_has_every_key_of_the_composed_pipeline() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text()
    keys = {*compose("pipeline", [], complete=False).flat(), "launcher.claims"}
    keys -= {key for key in keys if key.endswith(("._target_", "._partial_"))}
    keys -= {"launcher.claims.d2plm-workspace"}  # a name of the user's
    assert "trainer.max_steps" in keys
    assert not {key for key in keys if f"| `{key}` |" not in written}


@pytest.mark.parametrize(
    ("file", "line", "key"),
    [
        ("data_head.yaml", "number: 5", "number"),
        ("trainer/cpu.yaml", "seed: 0", "seed"),
        ("score.yaml", "evaluation:\n  seed: 0", "evaluation.seed"),
        ("optimizer/adamw.yaml", "a_new_key: 1", "a_new_key"),
    ],
)
def test_a_key_without_a_description_is_rejected_by_name(
    writer: ModuleType, tmp_path: Path, file: str, line: str, key: str
) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(config_dir(), configs)
    with (configs / file).open("a") as stream:
        stream.write(f"\n{line}\n")
    with pytest.raises(writer.MissingDescriptionError, match=f"configs/{file}: {key}: has no"):
        writer.reference(configs)


def test_a_choice_s_keys_are_described_by_the_one_it_begins_with(writer: ModuleType) -> None:
    choices = writer.described(config_dir() / "model")
    (width,) = [key for key in choices["8m"].keys if key.name == "hidden_size"]
    assert (width.value, width.description) == ("320", "width of the residual stream")


def test_comments_above_and_behind_a_key_are_read_together(
    writer: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "group.yaml"
    file.write_text("# What it is.\n\n# Seconds,\nwait: '# 5'  # at most\nmany: {a: 1}  # more\n")
    choice = writer.read(file)
    assert choice.description == "What it is."
    found = [(key.name, key.value, key.description) for key in choice.keys]
    assert found == [("wait", "'# 5'", "Seconds, at most"), ("many", "{a: 1}", "more")]
