"""A paradigm is built from its YAML, and read back from the folder of a model."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from d2plm.assembly.training_run import build_paradigm
from d2plm.config import compose
from d2plm.core.errors import ConfigError
from d2plm.core.files import config_dir
from d2plm.paradigms import load_paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from d2plm.settings import registry
from tests.conftest import MonkeyPatch

CHOICES: dict[str, type[Paradigm]] = {
    "diffusion": AbsorbingDiffusion,
    "flow_matching": MaskFlowMatching,
    "flow_matching_uniform": UniformFlowMatching,
}
PARADIGM_FILES = sorted(file.stem for file in (config_dir() / "paradigm").glob("*.yaml"))


def composed(choice: str, *overrides: str) -> Paradigm:
    return build_paradigm(compose("pipeline", [f"paradigm={choice}", *overrides]))


@pytest.mark.parametrize("choice", PARADIGM_FILES)
def test_a_file_builds_its_paradigm_under_its_own_name(choice: str) -> None:
    config = compose("pipeline", [f"paradigm={choice}"])
    paradigm = composed(choice)
    assert type(paradigm) is CHOICES[choice]
    assert paradigm.name == config.paradigm.name == choice
    assert paradigm.source == ("uniform" if choice == "flow_matching_uniform" else "mask")
    assert paradigm.samplers and not set(paradigm.samplers) & set(paradigm.refused_samplers)


def test_the_source_chooses_the_class() -> None:
    assert type(composed("flow_matching", "paradigm.source=uniform")) is UniformFlowMatching
    for override, key in (("loss=generalised_kl", "loss"), ("source=unifrom", "source")):
        with pytest.raises(ConfigError, match=rf"^(paradigm\.)?{key}="):
            composed("flow_matching", f"paradigm.{override}")


@pytest.mark.parametrize(
    "paradigm",
    [
        AbsorbingDiffusion(num_train_timesteps=17, schedule="linear_beta", beta_end=0.3),
        AbsorbingDiffusion(num_train_timesteps=None, loss="mean", shift=True),
        MaskFlowMatching(schedule="cubic", cubic_end_slope=1.5, num_flow_steps=9),
        UniformFlowMatching(schedule="polynomial", polynomial_degree=1.5, loss="generalised_kl"),
    ],
)
def test_settings_survive_saving(paradigm: Any, tmp_path: Path) -> None:
    paradigm.save_config(tmp_path)
    loaded: Any = load_paradigm(tmp_path)
    assert type(loaded) is type(paradigm)
    assert loaded.settings == paradigm.settings
    times = torch.linspace(0, 1, 50, dtype=torch.float64)
    assert torch.equal(loaded.corrupted_fraction(times), paradigm.corrupted_fraction(times))


MODULE = """
from d2plm.paradigms.flow_matching import MaskFlowMatching
from d2plm.settings.registry import register

register("paradigm", "elsewhere", MaskFlowMatching, MaskFlowMatching.Settings)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Path]:
    """Entry points of a distribution on the path, installed as pip does, with this module."""
    site = tmp_path / "site"
    information = site / "elsewhere-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "entry_points.txt").write_text("[d2plm]\nelsewhere = elsewhere\n")
    (site / "elsewhere.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(site))
    registry._load_installed.cache_clear()
    yield information / "entry_points.txt"
    sys.modules.pop("elsewhere", None)
    registry._ENTRIES["paradigm"].pop("elsewhere", None)
    registry._load_installed.cache_clear()


def test_a_paradigm_of_an_installed_package_is_known_by_name(installed: Path) -> None:
    assert registry.find("paradigm", "elsewhere").factory is MaskFlowMatching
    registry._load_installed.cache_clear()
    installed.write_text("[d2plm]\ngone = elsewhere_gone\n")
    with pytest.raises(ConfigError, match="elsewhere_gone"):
        composed("diffusion")
