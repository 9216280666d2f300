"""`accelerate launch` sets the same plan as the configuration."""

from dataclasses import replace

import pytest

from d2plm.config import compose
from d2plm.core.errors import ConfigError
from d2plm.settings.schema import part
from d2plm.settings.training import Parallelism
from d2plm.training.plan import (
    ACCEPTED_OF_ACCELERATE,
    Plan,
    plan_of_accelerate,
    precision_of_accelerate,
)
from tests.conftest import MonkeyPatch


def launch(monkeypatch: MonkeyPatch, *words: str) -> None:
    """Set what `accelerate launch` puts into its workers' environment."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ("--config_file", "configs/accelerate/fsdp2.yaml", *words, "script.py")
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    for key, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(key, value)


def test_accelerate_s_parallelism_is_the_plan_s(monkeypatch: MonkeyPatch) -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 4}
    words = [f"--parallelism_config_{key}_size={size}" for key, size in sizes.items()]
    launch(monkeypatch, "--use_fsdp", "--fsdp_version=2", "--use_parallelism_config", *words)
    plan = Plan(**plan_of_accelerate())
    assert (plan.replicate, plan.shard, plan.tensor, plan.context) == (2, 2, 2, 4)


def test_accelerate_s_configuration_gives_the_plan_of_the_group(monkeypatch: MonkeyPatch) -> None:
    launch(monkeypatch)
    plan = Plan(**vars(part(Parallelism, compose("train", ["distributed=fsdp2"]).distributed)))
    assert replace(plan, **plan_of_accelerate()) == plan
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    assert plan_of_accelerate()["activation_checkpointing"] == 1
    assert plan_of_accelerate()["reshard_after_forward"] is False
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ConfigError, match="fsdp_version: 2"):
        plan_of_accelerate()


def test_what_accelerate_does_not_set_stays_as_configured(monkeypatch: MonkeyPatch) -> None:
    for key, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(key, value)
    assert not {"replicate", "activation_checkpointing"} & plan_of_accelerate().keys()
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    assert plan_of_accelerate()["replicate"] == 2


def test_accelerate_s_precision_is_ours(monkeypatch: MonkeyPatch) -> None:
    for given, expected in (("no", "auto"), ("bf16", "bf16")):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", given)
        assert precision_of_accelerate() == expected
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match="mixed_precision='fp8'"):
        precision_of_accelerate()


@pytest.mark.parametrize(
    "variable",
    [*ACCEPTED_OF_ACCELERATE, "PARALLELISM_CONFIG_SP_SIZE"],
)
def test_what_training_does_not_do_is_rejected(variable: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv(variable, "2" if variable.endswith("SIZE") else "true")
    for fsdp in ("true", "false"):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", fsdp)
        with pytest.raises(ConfigError):
            Plan(**plan_of_accelerate())
