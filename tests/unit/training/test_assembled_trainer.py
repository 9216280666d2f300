"""A trainer from a configuration: its class, and errors that name the keys."""

from pathlib import Path

import pytest

from d2plm.assembly.dry_run import forecast
from d2plm.assembly.training_run import build_trainer, on_one_process, trainer_keys, training_stores
from d2plm.config import compose
from d2plm.core.errors import ConfigError
from d2plm.settings.commands import TrainSettings
from d2plm.settings.registry import Entry, registered
from d2plm.settings.training import TrainerSettings
from d2plm.training.plan import Plan
from d2plm.training.trainer import Trainer


class Mine(Trainer):
    """A trainer of the user's own."""


def configuration(folder: Path, *overrides: str) -> TrainSettings:
    words = ["experiment=debug", "data.residues=random", f"work_dir={folder}", "tracking=none"]
    config: TrainSettings = compose("train", [*words, *overrides])
    return config


def built(config: TrainSettings) -> Trainer:
    return build_trainer(config, training_stores(config))


def test_a_configuration_names_the_class_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (Mine, dict):
        monkeypatch.setitem(registered("trainer"), kind.__name__, Entry(TrainerSettings, kind))
    assert type(built(configuration(tmp_path, "trainer.type=Mine"))) is Mine
    with pytest.raises(ConfigError, match=r"^trainer\.type='dict': must be the name of a class"):
        built(configuration(tmp_path, "trainer.type=dict"))


@pytest.mark.parametrize(
    "override",
    [
        *("trainer.gradient_accumulation_steps=3", "trainer.freeze=[nothing.*]"),
        *("data.token_budget=100", "distributed.replicate=3", "distributed.context=2"),
        *("schedule.warmup_steps=1000", "callbacks.early_stopping.mode=up"),
    ],
)
def test_an_impossible_setting_is_rejected_by_its_key(override: str, tmp_path: Path) -> None:
    for way in (forecast, built):
        with pytest.raises(ConfigError) as caught:
            way(configuration(tmp_path, override))
        assert str(caught.value).startswith(override.partition("=")[0])


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
    spread = [f"distributed.{key}=2" for key in (*sizes, "pipeline_stages_per_rank")]
    trainer = built(on_one_process(configuration(tmp_path, *spread)))
    assert trainer.plan == Plan(shard=1)


def test_an_error_in_training_names_its_key(tmp_path: Path) -> None:
    monitor = ["callbacks.early_stopping.patience=1", "callbacks.early_stopping.monitor=loss"]
    trainer = built(configuration(tmp_path, *monitor, "callbacks.evaluation.every=1"))
    with (
        pytest.raises(ConfigError, match=r"^callbacks\.early_stopping\.monitor='loss'"),
        trainer_keys(),
    ):
        trainer.train()
