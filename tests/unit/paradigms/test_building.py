"""A paradigm is built from its YAML, and read back from the folder of a model."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.configuration_utils import ConfigMixin

from d2plm.assembly.training_run import build_paradigm
from d2plm.config import compose
from d2plm.core.errors import ConfigError, ModelError
from d2plm.core.files import config_dir
from d2plm.paradigms import PARADIGMS, load_paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching, flow_matching
from d2plm.paradigms.noise_schedules import Cubic, Polynomial
from d2plm.paradigms.paradigm import Paradigm

CHOICES: dict[str, type[Paradigm]] = {
    "diffusion": AbsorbingDiffusion,
    "flow_matching": MaskFlowMatching,
    "flow_matching_uniform": UniformFlowMatching,
}
PARADIGM_FILES = sorted(file.stem for file in (config_dir() / "paradigm").glob("*.yaml"))


def composed(choice: str, *overrides: str) -> Paradigm:
    return build_paradigm(compose("pipeline", [f"paradigm={choice}", *overrides]))


def test_every_paradigm_has_a_file_and_every_file_a_paradigm() -> None:
    assert sorted(CHOICES) == PARADIGM_FILES
    assert sorted(PARADIGMS) == sorted(kind.__name__ for kind in CHOICES.values())


@pytest.mark.parametrize("choice", PARADIGM_FILES)
def test_a_file_builds_its_paradigm_under_its_own_name(choice: str) -> None:
    config = compose("pipeline", [f"paradigm={choice}"])
    paradigm = composed(choice)
    assert type(paradigm) is CHOICES[choice]
    assert paradigm.name == config["paradigm"]["name"] == choice
    assert paradigm.source == ("uniform" if choice == "flow_matching_uniform" else "mask")
    assert paradigm.samplers and not set(paradigm.samplers) & set(paradigm.refused_samplers)


@pytest.mark.parametrize("choice", PARADIGM_FILES)
def test_a_file_states_every_default_as_the_class_has_it(choice: str) -> None:
    assert composed(choice).config == CHOICES[choice]().config


@pytest.mark.parametrize(
    "choice, override, attribute, value",
    [
        ("diffusion", "paradigm.num_train_timesteps=null", "steps", None),
        ("diffusion", "paradigm.num_train_timesteps=7", "steps", 7),
        ("diffusion", "paradigm.time_sampling=low_variance", "time_sampling", "low_variance"),
        ("flow_matching", "paradigm.schedule=cubic", "schedule", Cubic(0.0, 0.0)),
        ("flow_matching_uniform", "paradigm.loss=generalised_kl", "loss_kind", "generalised_kl"),
        ("flow_matching_uniform", "paradigm.schedule=polynomial", "schedule", Polynomial(2.0)),
    ],
)
def test_an_override_reaches_the_paradigm(
    choice: str, override: str, attribute: str, value: Any
) -> None:
    assert getattr(composed(choice, override), attribute) == value


def test_the_source_chooses_the_class() -> None:
    assert type(flow_matching()) is MaskFlowMatching
    assert type(flow_matching("mask", schedule="linear")) is MaskFlowMatching
    assert type(flow_matching("uniform", loss="generalised_kl")) is UniformFlowMatching
    assert type(composed("flow_matching", "paradigm.source=uniform")) is UniformFlowMatching
    with pytest.raises(ConfigError, match=r"^loss='generalised_kl'"):
        flow_matching("mask", loss="generalised_kl")
    with pytest.raises(ConfigError, match=r"did you mean 'uniform'"):
        flow_matching("unifrom")


@pytest.mark.parametrize(
    "paradigm",
    [
        AbsorbingDiffusion(num_train_timesteps=None),
        AbsorbingDiffusion(
            num_train_timesteps=17, schedule="linear_beta", beta_end=0.3, loss="mean", shift=True
        ),
        AbsorbingDiffusion(
            num_train_timesteps=None, schedule="cosine", time_sampling="low_variance"
        ),
        AbsorbingDiffusion(
            num_train_timesteps=None,
            schedule="linear_beta",
            beta_start=1e-3,
            beta_end=0.1,
            loss="mean",
        ),
        MaskFlowMatching(schedule="cubic", cubic_end_slope=1.5, num_flow_steps=9),
        UniformFlowMatching(),
        UniformFlowMatching(schedule="polynomial", polynomial_degree=1.5, loss="generalised_kl"),
        UniformFlowMatching(schedule="cubic", cubic_start_slope=2.0, time_sampling="low_variance"),
        UniformFlowMatching(schedule="linear", loss="mean", num_flow_steps=9),
    ],
)
def test_settings_survive_saving(paradigm: Any, tmp_path: Path) -> None:
    paradigm.save_config(tmp_path)
    loaded: Any = load_paradigm(tmp_path)
    assert type(loaded) is type(paradigm)
    assert loaded.config == paradigm.config
    times = torch.linspace(0, 1, 50, dtype=torch.float64)
    assert torch.equal(loaded.corrupted_fraction(times), paradigm.corrupted_fraction(times))
    assert torch.equal(loaded.corruption_rate(times[1:]), paradigm.corruption_rate(times[1:]))
    for own, other in zip(loaded.times_of(times[:-1]), paradigm.times_of(times[:-1]), strict=True):
        assert torch.equal(own, other)
    for name in ("loss_kind", "time_sampling", "default_steps", "max_steps", "shift"):
        assert getattr(loaded, name, None) == getattr(paradigm, name, None)
    saved = json.loads((tmp_path / "paradigm_config.json").read_text())
    assert saved["_class_name"] in PARADIGMS


def test_settings_that_diffusers_has_written_are_read_and_it_reads_ours(tmp_path: Path) -> None:
    file = tmp_path / "paradigm_config.json"
    settings = {"_class_name": "MaskFlowMatching", "schedule": "linear", "num_flow_steps": 7}
    file.write_text(json.dumps({**settings, "_diffusers_version": "0.35.0"}))
    loaded: Any = load_paradigm(tmp_path)
    assert (loaded.config["schedule"], loaded.default_steps) == ("linear", 7)
    loaded.save_config(tmp_path)
    mixin = type("Theirs", (ConfigMixin,), {"config_name": file.name})
    assert mixin.load_config(tmp_path) == {"_class_name": "MaskFlowMatching", **loaded.config}


# --- paradigms of other packages ---------------------------------------------------------------

MODULE = """
from d2plm.paradigms.flow_matching import MaskFlowMatching
from d2plm.paradigms.paradigm import register_to_config
from d2plm.paradigms.noise_schedules import NoiseSchedule


class Halfway(NoiseSchedule):
    def __init__(self, power): self.power = power
    def kept(self, times): return times**self.power
    def rate(self, times): return self.power * times ** (self.power - 1)
    def time_at(self, corrupted): return (1 - corrupted) ** (1 / self.power)


class ElsewhereFlow(MaskFlowMatching):
    name = "elsewhere"

    @register_to_config
    def __init__(self, power: float = 3.0) -> None:
        super().__init__()
        self.schedule = Halfway(power)
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution on the path, installed as pip does, whose module is `elsewhere`."""
    site = tmp_path / "site"
    information = site / "elsewhere-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[d2plm.paradigms]\nElsewhereFlow = elsewhere:ElsewhereFlow\nGone = elsewhere:Gone\n"
    )
    (site / "elsewhere.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("elsewhere", None)


def test_an_external_paradigm_is_built_by_target_and_its_export_loaded_by_entry_point(
    elsewhere: Path, tmp_path: Path
) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(config_dir(), configs)
    (configs / "paradigm" / "elsewhere.yaml").write_text(
        "_target_: elsewhere.ElsewhereFlow\nname: elsewhere\npower: 3.0\n"
    )
    config = compose("pipeline", ["paradigm=elsewhere", "paradigm.power=5"], configs)
    paradigm: Any = build_paradigm(config)
    paradigm.save_config(tmp_path)
    sys.modules.pop("elsewhere")
    loaded: Any = load_paradigm(tmp_path)
    assert type(loaded).__name__ == "ElsewhereFlow"
    assert loaded.schedule.power == 5.0
    assert loaded.kept(0.5) == pytest.approx(0.5**5)


@pytest.mark.parametrize(
    "name, message",
    [
        ("ElsewhereFloe", r"unknown paradigm .*did you mean 'ElsewhereFlow'.*entry point"),
        ("Gaussian", r"unknown paradigm 'Gaussian'; install the package .*d2plm\.paradigms"),
        ("Gone", r"entry point elsewhere:Gone of paradigm 'Gone' cannot be loaded"),
    ],
)
def test_an_export_of_a_paradigm_that_is_not_installed_says_what_to_install(
    name: str, message: str, elsewhere: Path, tmp_path: Path
) -> None:
    (tmp_path / "paradigm_config.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(ModelError, match=message):
        load_paradigm(tmp_path)
