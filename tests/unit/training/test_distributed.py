"""Invalid plans are rejected with a valid alternative; errors of one rank reach the others.

`accelerate launch` sets the same plan as the configuration.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from d2plm.config import compose
from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.data.loader import Collection, PackedLoader
from d2plm.data.synthetic import SyntheticSequences
from d2plm.model.dit_config import DiTConfig
from d2plm.settings.data import LoaderSettings
from d2plm.settings.schema import part
from d2plm.settings.training import Parallelism, TrainerSettings
from d2plm.training.distributed import portable, setup_process
from d2plm.training.plan import (
    ACCEPTED_OF_ACCELERATE,
    Plan,
    packed_loader,
    plan_of_accelerate,
    precision_of_accelerate,
)
from tests.conftest import MonkeyPatch


def test_shards_are_what_the_others_leave() -> None:
    assert Plan().resolved(8) == Plan(shard=8)
    assert Plan(replicate=8).resolved(8) == Plan(replicate=8, shard=1)
    assert Plan(replicate=2, shard=3).resolved(6) == Plan(replicate=2, shard=3)
    assert Plan(context=2, tensor=2).resolved(8) == Plan(context=2, tensor=2, shard=2)


PIPELINE: dict[str, Any] = {"num_hidden_layers": 5, "intermediate_size": 32}
# What starts the message → what is rejected by it.
REFUSED: dict[str, Callable[[], object]] = {
    "replicate=3: does not divide the 4 processes": lambda: Plan(replicate=3).resolved(4),
    "replicate=1, shard=2": lambda: Plan(shard=2).resolved(1),
    "context=2, tensor=2: the model's num_attention_heads=6": lambda: fits(context=2, tensor=2),
    "tensor=2: tensor does not": lambda: fits({"intermediate_size": 25}, tensor=2),
    "tensor=2: a model with linear_bias": lambda: fits({"linear_bias": True}, tensor=2),
    "expert=2: the model's num_experts=3": lambda: fits({"num_experts": 3}, expert=2),
    "expert=3": lambda: Plan(expert=3).resolved(4),
    "pipeline=2: a model with num_experts": lambda: fits({"num_experts": 4}, pipeline=2),
    "pipeline=2: a model with relatives_dim": lambda: fits({"relatives_dim": 12}, pipeline=2),
    "pipeline=6: the model's num_hidden_layers=5": lambda: fits(PIPELINE, pipeline=6),
    "pipeline=4: a step has 2": lambda: Plan(pipeline=4).require_micro_batches(2),
    "reshard_between_micro_batches=True": (
        lambda: Plan(pipeline=2, reshard_between_micro_batches=True)
    ),
    "lora_rank=4": lambda: Plan(tensor=2).require_adapters(4),
    "activation_checkpointing=-1": lambda: Plan(activation_checkpointing=-1),
    "cpu_offload=True": lambda: setup_process("cpu", Plan(cpu_offload=True)),
    "global_batch_tokens=850: must be a multiple of token_budget=100, such as 800": (
        lambda: shared(1, 850)
    ),
    "global_batch_tokens=800": lambda: shared(3, 800),
    "gradient_accumulation_steps=3": lambda: shared(2, 800, 3),
    "gradient_accumulation_steps='some'": lambda: shared(1, 800, "some"),
}


def fits(model: dict[str, Any] | None = None, **plan: Any) -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 32}
    Plan(**plan).require_fits(DiTConfig(**{**sizes, **(model or {})}))


def shared(ranks: int, tokens: Any, accumulation: Any = "auto") -> PackedLoader:
    settings = TrainerSettings(global_batch_tokens=tokens, gradient_accumulation_steps=accumulation)
    rows = [Collection(SyntheticSequences(np.full(999, 98, np.int32)))]
    return packed_loader(rows, settings, LoaderSettings(token_budget=100), 100, rank=0, ranks=ranks)


@pytest.mark.parametrize("beginning", REFUSED)
def test_impossible_plans_are_rejected_by_name(beginning: str) -> None:
    with pytest.raises(ConfigError) as caught:
        REFUSED[beginning]()
    assert str(caught.value).startswith(beginning)


def test_a_global_batch_is_shared_evenly() -> None:
    for given, expected in (
        ((1, None, "auto"), (1, 1)),
        ((4, None, 3), (3, 1)),
        ((2, 800, "auto"), (4, 1)),
        ((2, 800, 2), (2, 2)),
        ((4, 800, 1), (1, 2)),
    ):
        found = shared(*given)
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
    assert "pipeline" not in plan_of_accelerate(), "what it does not set stays as configured"


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


def test_accelerate_s_precision_is_ours(monkeypatch: MonkeyPatch) -> None:
    for given, expected in (("no", "auto"), ("bf16", "bf16")):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", given)
        assert precision_of_accelerate() == expected
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match="mixed_precision='fp8'"):
        precision_of_accelerate()


@pytest.mark.parametrize("variable", [*ACCEPTED_OF_ACCELERATE, "PARALLELISM_CONFIG_SP_SIZE"])
def test_what_training_does_not_do_is_rejected(variable: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv(variable, "2" if variable.endswith("SIZE") else "true")
    for fsdp in ("true", "false"):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", fsdp)
        with pytest.raises(ConfigError):
            Plan(**plan_of_accelerate())
