"""Invalid plans are rejected with a valid alternative; errors of one rank reach the others."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.data.loader import Collection, PackedLoader
from d2plm.data.synthetic import SyntheticSequences
from d2plm.model.dit_config import DiTConfig
from d2plm.settings.data import LoaderSettings
from d2plm.settings.training import TrainerSettings
from d2plm.training.distributed import portable, setup_process
from d2plm.training.plan import Plan, packed_loader


@pytest.mark.parametrize(
    ("plan", "world_size", "shard"),
    [
        (Plan(), 1, 1),
        (Plan(), 8, 8),
        (Plan(replicate=2), 8, 4),
        (Plan(replicate=8), 8, 1),
        (Plan(replicate=2, shard=3), 6, 3),
        (Plan(context=2, tensor=2), 8, 2),
    ],
)
def test_shards_are_what_replicas_leave(plan: Plan, world_size: int, shard: int) -> None:
    resolved = plan.resolved(world_size)
    assert (resolved.replicate, resolved.shard) == (plan.replicate, shard)


REFUSED: dict[str, Callable[[], object]] = {
    "replicate=3: does not divide the 4 processes; use one of 1, 2, 4": lambda: Plan(
        replicate=3
    ).resolved(4),
    "replicate=2, shard=3: their product is not the 4 processes there are; set one of them to 2": (
        lambda: Plan(replicate=2, shard=3).resolved(4)
    ),
    "shard=2: their product is not the 1 processes": lambda: Plan(shard=2).resolved(1),
    "context=3: does not divide the 4 processes": (lambda: Plan(context=3).resolved(4)),
    "context=2, tensor=2, shard=2: their product is not the 4 processes": (
        lambda: Plan(context=2, tensor=2, shard=2).resolved(4)
    ),
    "context=2, tensor=2: the model's num_attention_heads=6 cannot be shared by 4 processes; use "
    "a product of 1, 2, 3, 6": lambda: Plan(context=2, tensor=2).require_fits(six_heads()),
    "tensor=2: tensor does not divide the model's intermediate_size=25; use 1": (
        lambda: Plan(tensor=2).require_fits(six_heads(intermediate_size=25))
    ),
    "tensor=2: a model with linear_bias=True cannot be split; use context instead": (
        lambda: Plan(tensor=2).require_fits(six_heads(linear_bias=True))
    ),
    "context=2: a model with relatives_dim=12 aligns whole rows and cannot be divided": (
        lambda: Plan(context=2).require_fits(six_heads(relatives_dim=12))
    ),
    "expert=2: the model's num_experts=None cannot be shared by 2 processes": (
        lambda: Plan(expert=2).require_fits(six_heads())
    ),
    "expert=2: the model's num_experts=3 cannot be shared by 2 processes; use 1, 3": (
        lambda: Plan(expert=2).require_fits(six_heads(num_experts=3))
    ),
    "expert=3: does not divide the 4 processes of shard=4 × context=1": (
        lambda: Plan(expert=3).resolved(4)
    ),
    "pipeline=2: a model with num_experts=4 cannot be divided into stages": (
        lambda: Plan(pipeline=2).require_fits(six_heads(num_experts=4))
    ),
    "lora_rank=4: must be null with tensor=2": lambda: Plan(tensor=2).require_adapters(4),
    "context=0: must be an integer ≥ 1": lambda: Plan(context=0),
    "replicate=0: must be an integer ≥ 1": lambda: Plan(replicate=0),
    "shard='all': must be an integer ≥ 1": lambda: Plan(shard="all"),
    "activation_checkpointing=-1: must be": lambda: Plan(activation_checkpointing=-1),
    "reshard_after_forward='yes': must be": lambda: Plan(reshard_after_forward="yes"),
    "cpu_offload=True: the model is in host memory already": lambda: setup_process(
        "cpu", Plan(cpu_offload=True)
    ),
    "850: must be a multiple of token_budget=100, such as 800": lambda: shared(1, 850),
    "50: must be a multiple of token_budget=100, such as 100": lambda: shared(1, 50),
    "cannot be shared by 3 processes; use 1, 2, 4, 8 processes, or": lambda: shared(3, 800),
    "gradient_accumulation_steps=3: each process has 4 bins of a step; use auto or one of 1, 2": (
        lambda: shared(2, 800, 3)
    ),
    "gradient_accumulation_steps=0: must be an integer ≥ 1": lambda: shared(1, 800, 0),
    "gradient_accumulation_steps='some': must be": lambda: shared(1, 800, "some"),
    "global_batch_tokens=0.5: must be an integer ≥ 1": lambda: shared(1, 0.5),
}


def six_heads(**changes: Any) -> DiTConfig:
    return DiTConfig(hidden_size=24, num_attention_heads=6, **{"intermediate_size": 32} | changes)


def shared(ranks: int, tokens: Any, accumulation: Any = "auto") -> PackedLoader:
    settings = TrainerSettings(global_batch_tokens=tokens, gradient_accumulation_steps=accumulation)
    rows = [Collection(SyntheticSequences(np.full(999, 98, np.int32)))]
    return packed_loader(rows, settings, LoaderSettings(token_budget=100), 100, rank=0, ranks=ranks)


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_rejected_by_name_with_what_can(message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        REFUSED[message]()


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
    found = shared(ranks, global_batch_tokens, accumulation)
    assert (found.micro_batches, found.bins_per_micro_batch) == expected


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
