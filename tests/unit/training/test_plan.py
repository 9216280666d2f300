"""The plan of a training: who shares what, refused before anything is built where it cannot be."""

import re

import pytest

from d2plm.config import compose
from d2plm.errors import ConfigError
from d2plm.training.distributed import Plan, plan_of_accelerate, setup_process, shares


@pytest.mark.parametrize(
    ("ranks", "budget", "tokens", "accumulation", "expected"),
    [
        (1, 100, None, "auto", (1, 1)),
        (4, 100, None, 3, (3, 1)),
        (1, 100, 800, "auto", (8, 1)),
        (4, 100, 800, "auto", (2, 1)),
        (2, 100, 800, 2, (2, 2)),
        (2, 100, 800, 1, (1, 4)),
    ],
)
def test_a_global_batch_is_shared_whatever_the_number_of_ranks(
    ranks: int,
    budget: int,
    tokens: int | None,
    accumulation: int | str,
    expected: tuple[int, int],
) -> None:
    found = shares(ranks, budget, tokens, accumulation)
    assert (found["micro_batches"], found["bins_per_micro_batch"]) == expected


@pytest.mark.parametrize(
    ("ranks", "tokens", "accumulation", "message"),
    [
        (3, 800, "auto", "use 1, 2, 4, 8 processes"),
        (1, 850, "auto", "multiple of data.token_budget=100, such as 800"),
        (1, 50, "auto", "multiple of data.token_budget=100, such as 100"),
        (2, 800, 3, "use auto or one of 1, 2, 4"),
        (2, 800, 0, "trainer.gradient_accumulation_steps=0"),
        (2, 800, 1.5, "trainer.gradient_accumulation_steps=1.5"),
        (2, 0, "auto", "trainer.global_batch_tokens=0"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_what_can(
    ranks: int, tokens: int, accumulation: int | str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        shares(ranks, 100, tokens, accumulation)


def test_the_shards_are_what_the_copies_leave() -> None:
    assert Plan().resolved(8).shard == 8
    assert Plan(replicate=2).resolved(8).shard == 4
    assert Plan(replicate=2, shard=4).resolved(8).shard == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicate": 3}, "use one of 1, 2, 4"),
        ({"replicate": 2, "shard": 4}, "is not the 4 processes"),
        ({"tensor": 2}, "there is no tensor parallelism yet"),
        ({"context": 2}, "there is no context parallelism yet"),
        ({"replicate": 0}, "distributed.replicate=0"),
        ({"shard": "all"}, "distributed.shard='all'"),
        ({"activation_checkpointing": -1}, "distributed.activation_checkpointing=-1"),
        ({"cpu_offload": "yes"}, "distributed.cpu_offload='yes'"),
    ],
)
def test_an_impossible_plan_is_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Plan(**settings).resolved(4)  # type: ignore[arg-type]  # what a user may write


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_offloading_is_refused_where_there_is_nothing_to_offload(
    world_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ConfigError, match=r"distributed\.cpu_offload=true"):
        setup_process("cpu", Plan(cpu_offload=True))


def test_accelerate_s_configuration_gives_the_plan_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What `accelerate launch` puts into its workers' environment.
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", "configs/accelerate/fsdp2.yaml", "script.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    for key, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(key, value)
    section = dict(compose("train", ["distributed=fsdp2"])["distributed"])
    section.pop("processes")
    assert Plan(**{**section, **plan_of_accelerate()}) == Plan(**section)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    assert plan_of_accelerate()["activation_checkpointing"] == 1
    assert plan_of_accelerate()["reshard_after_forward"] is False
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ConfigError, match="fsdp_version: 2"):
        plan_of_accelerate()


def test_without_accelerate_the_configuration_stands() -> None:
    assert plan_of_accelerate({}) == {}
