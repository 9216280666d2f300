"""Plans that cannot be are refused by name, with what can; errors of one rank reach the others."""

import pickle
from typing import Any

import pytest

from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.training.distributed import (
    portable,
    setup_process,
)
from d2plm.training.plan import (
    Plan,
    batch_partition,
)


@pytest.mark.parametrize(
    ("plan", "world_size", "shard"),
    [
        (Plan(), 1, 1),
        (Plan(), 8, 8),
        (Plan(replicate=2), 8, 4),
        (Plan(replicate=8), 8, 1),
        (Plan(replicate=2, shard=3), 6, 3),
    ],
)
def test_shards_are_what_replicas_leave(plan: Plan, world_size: int, shard: int) -> None:
    resolved = plan.resolved(world_size)
    assert (resolved.replicate, resolved.shard) == (plan.replicate, shard)


@pytest.mark.parametrize(
    ("plan", "world_size", "message"),
    [
        (
            Plan(replicate=3),
            4,
            "replicate=3: does not divide the 4 processes; use one of 1, 2, 4",
        ),
        (
            Plan(replicate=2, shard=3),
            4,
            "replicate=2, shard=3: their product is not the 4 processes "
            "there are; set one of them to 2, or shard=auto",
        ),
        (
            Plan(shard=2),
            1,
            "replicate=1, shard=2: their product is not the 1 processes "
            "there are; set one of them to 1, or shard=auto",
        ),
    ],
)
def test_a_plan_for_another_number_of_processes_is_refused(
    plan: Plan, world_size: int, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        plan.resolved(world_size)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor": 2},
            "tensor=2: must be 1: there is no tensor parallelism yet; shard over more "
            "processes instead",
        ),
        (
            {"context": 2},
            "context=2: must be 1: there is no context parallelism yet; shard over "
            "more processes instead",
        ),
        ({"replicate": 0}, "replicate=0: must be an integer ≥ 1"),
        ({"shard": "all"}, "shard='all': must be an integer ≥ 1"),
        (
            {"activation_checkpointing": -1},
            "activation_checkpointing=-1: must be an integer ≥ 0",
        ),
        (
            {"reshard_after_forward": "yes"},
            "reshard_after_forward='yes': must be true or false",
        ),
    ],
)
def test_impossible_plans_are_refused_by_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Plan(**settings)
    assert str(error.value) == message


def test_offloading_to_the_host_is_refused_where_the_model_is_there() -> None:
    with pytest.raises(ConfigError) as error:
        setup_process("cpu", Plan(cpu_offload=True))
    message = "cpu_offload=True: the model is in host memory already"
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("ranks", "global_batch_tokens", "accumulation", "expected"),
    [
        (1, None, "auto", (1, 1)),
        (4, None, 3, (3, 1)),
        (2, 800, "auto", (4, 1)),
        (2, 800, 2, (2, 2)),
        (4, 800, 1, (1, 2)),
    ],
)
def test_a_global_batch_is_shared_evenly(
    ranks: int, global_batch_tokens: int | None, accumulation: int | str, expected: tuple[int, int]
) -> None:
    found = batch_partition(ranks, 100, global_batch_tokens, accumulation)
    assert (found["micro_batches"], found["bins_per_micro_batch"]) == expected


@pytest.mark.parametrize(
    ("ranks", "global_batch_tokens", "accumulation", "message"),
    [
        (
            1,
            850,
            "auto",
            "global_batch_tokens=850: must be a multiple of token_budget=100, such as 800",
        ),
        (
            1,
            50,
            "auto",
            "global_batch_tokens=50: must be a multiple of token_budget=100, such as 100",
        ),
        (
            3,
            800,
            "auto",
            "global_batch_tokens=800: its 8 bins of token_budget=100 tokens cannot "
            "be shared by 3 processes; use 1, 2, 4, 8 processes, or another of the two",
        ),
        (
            2,
            800,
            3,
            "gradient_accumulation_steps=3: each process has 4 bins of a step; use auto "
            "or one of 1, 2, 4",
        ),
        (1, 800, 0, "gradient_accumulation_steps=0: must be an integer ≥ 1"),
        (1, 800, "some", "gradient_accumulation_steps='some': must be an integer ≥ 1"),
        (1, 0.5, "auto", "global_batch_tokens=0.5: must be an integer ≥ 1"),
    ],
)
def test_a_global_batch_that_cannot_be_shared_is_refused_with_what_can(
    ranks: int, global_batch_tokens: Any, accumulation: int | str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        batch_partition(ranks, 100, global_batch_tokens, accumulation)
    assert str(error.value) == message


class TwoWordsError(Exception):
    """As some storage clients have: pickled by its message alone, it cannot be made again."""

    def __init__(self, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: {reason}")


def test_an_error_reaches_other_ranks_whatever_it_is() -> None:
    for error in (OSError(28, "No space left"), CheckpointError("damaged")):
        assert portable(error) is error
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(TwoWordsError("PutObject", "denied")))
    found = portable(TwoWordsError("PutObject", "denied"))
    assert str(pickle.loads(pickle.dumps(found))) == "TwoWordsError: PutObject: denied"
