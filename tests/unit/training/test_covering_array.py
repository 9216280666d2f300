"""Training is equal for any distribution and option: every pair of settings, in a few runs.

A run on one process, whose weights, averages, losses, norms and gradients of a step the others
have to reach in fp64, is made once for each model, optimizer and paradigm.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.settings.training import AdamWSettings, MuonSettings
from d2plm.training.muon import build_muon
from d2plm.training.optimizer import build_adamw
from tests.conftest import LLAMA, randomise
from tests.ranks import run
from tests.runs import SHAREABLE, assert_same_run, newest, tensors, train_each
from tests.runs import SIZES as ONE_BLOCK

# Sizes of which no shard of 4 is even, nor one of 2 of what tensor parallelism has split.
SIZES = {**ONE_BLOCK, **SHAREABLE, "num_hidden_layers": 3}
EXPERTS: dict[str, Any] = {"num_experts": 6, "experts_per_token": 2, "shared_expert_size": 9}
MODELS: dict[str, dict[str, Any]] = {
    "own": {},
    "llama": LLAMA,
    "esm": {"head": "esm", "qk_norm": False, "affine_norm": True, "feed_forward": "gelu"},
    "experts": EXPERTS,
}
PARADIGMS: dict[str, Any] = {
    "diffusion": AbsorbingDiffusion,
    "mean": lambda: AbsorbingDiffusion(loss="mean"),
    "uniform": UniformFlowMatching,
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(build_adamw, settings=AdamWSettings(learning_rate=1e-2)),
    "muon": partial(build_muon, settings=MuonSettings(learning_rate=1e-2)),
}
TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "frozen": {"freeze": ["*embedding.*", "head.*", "*norm*", "blocks.[01].feed_forward.*"]},
    "low rank": {"lora_rank": 3},
}
SPEED: dict[str, dict[str, Any]] = {
    "resharded": {},
    "gathered": {"reshard_after_forward": False},
    "resharded between micro-batches": {"reshard_between_micro_batches": True},
}
FACTORS: dict[str, list[Any]] = {
    "model": [*MODELS],
    "trained": [*TRAINED],
    "paradigm": [*PARADIGMS],
    "optimizer": ["adamw", "muon"],
    "max_grad_norm": [1.0, 0.01],
    "shard": [1, 2, 4],
    "replicate": [1, 2],
    "context": [1, 2],
    "tensor": [1, 2],
    "pipeline": [1, 2],
    "expert": [1, 2],
    "micro_batches": [1, 2],
    "activation_checkpointing": [0, 1, 2],
    "speed": [*SPEED],
}
DIMENSIONS = ("shard", "replicate", "context", "tensor", "pipeline")


def ranks_of(row: dict[str, Any]) -> int:
    return math.prod(row[dimension] for dimension in DIMENSIONS)


def cost_of(row: dict[str, Any]) -> int:
    """Processes of a row, its own and those of the run that it is compared with."""
    return 1 + ranks_of(row)


def is_possible(row: dict[str, Any]) -> bool:
    """Whether the plan fits four processes and the model, and can be rejected by none."""
    has_experts = row["model"] == "experts"
    return (
        ranks_of(row) <= 4
        and (row["pipeline"] == 1 or not has_experts)
        and (row["pipeline"] == 1 or row["micro_batches"] == 2)
        and (row["pipeline"] == 1 or "between" not in row["speed"])
        and (row["expert"] == 1 or (has_experts and row["shard"] * row["context"] > 1))
        and (row["tensor"] == 1 or row["trained"] != "low rank")
    )


def model_of(row: dict[str, Any]) -> DiT | DiTConfig:
    """Begun by the trainer; where not all is trained, one none of whose weights is zero."""
    config = DiTConfig(**{**SIZES, **MODELS[row["model"]]})
    if row["trained"] == "all":
        return config
    model = DiT(config).double()
    randomise(model)
    return model


def settings_of(row: dict[str, Any]) -> dict[str, Any]:
    """What one process and many have in common."""
    return {
        "model": lambda: model_of(row),
        "paradigm": PARADIGMS[row["paradigm"]](),
        "optimizer": OPTIMIZERS[row["optimizer"]],
        "max_grad_norm": row["max_grad_norm"],
        "max_steps": 3,
        **TRAINED[row["trained"]],
    }


def train_rows(store: Path, output: Path, rows: dict[str, dict[str, Any]]) -> None:
    """On one process without a plan or options, on many with those of the rows."""
    for name, row in rows.items():
        plan = {key: row[key] for key in (*DIMENSIONS, "expert")}
        plan |= {"activation_checkpointing": row["activation_checkpointing"], **SPEED[row["speed"]]}
        more = {"plan": plan, "gradient_accumulation_steps": row["micro_batches"]}
        settings = {**settings_of(row), **({} if output.name == "one" else more)}
        train_each(store, output, {name: settings})


def train_as_one(ranks: int, store: Path, folder: Path, strength: int = 2) -> None:
    """Train the rows of so many ranks on them, and on one process; compare everything."""
    rows = covering_array(FACTORS, is_possible, cost_of, strength)
    numbered = {str(n): row for n, row in enumerate(rows) if ranks_of(row) == ranks}
    run(train_rows, store, folder / "one", numbered, seconds=900)
    run(train_rows, store, folder / "many", numbered, world_size=ranks, seconds=900)
    for name, row in numbered.items():
        one = tensors(newest(folder / "one" / name))
        assert all(one[n].any() for n in one if n.endswith(".router.bias"))
        print(row)  # which is shown where it fails
        assert_same_run(folder / "many" / name, folder / "one" / name, 1e-10)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.thorough)])
def test_every_pair_of_settings_trains_as_one_process(
    ranks: int, store: Path, tmp_path: Path
) -> None:
    train_as_one(ranks, store, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_three_settings_train_as_one_process(ranks: int, store: Path, tmp_path: Path) -> None:
    train_as_one(ranks, store, tmp_path, strength=3)


SAMPLES = 4000


def covering_array(
    factors: Mapping[str, Sequence[Any]],
    is_possible: Callable[[dict[str, Any]], bool],
    cost: Callable[[dict[str, Any]], float],
    strength: int = 2,
) -> list[dict[str, Any]]:
    """Rows {factor: value} in which every possible combination of `strength` values occurs.

    The row that adds most new combinations for its cost is taken from a sample of the possible ones
    until the sample has no others; the sample is always the same.
    """
    random, names = np.random.default_rng(0), [*factors]
    drawn = [
        [int(random.integers(len(values))) for values in factors.values()] for _ in range(SAMPLES)
    ]
    levels = np.array([row for row in drawn if is_possible(_named(factors, row))])
    costs = np.array([cost(_named(factors, row)) for row in levels.tolist()])
    base = max(map(len, factors.values()))
    columns = []
    for number, chosen in enumerate(combinations(range(len(names)), strength)):
        code = np.full(len(levels), number)
        for factor in chosen:
            code = code * base + levels[:, factor]
        columns.append(code)
    codes = np.stack(columns, axis=1)
    missing = np.zeros(codes.max() + 1, dtype=bool)
    missing[codes] = True
    rows = []
    while missing.any():
        best = int((missing[codes].sum(axis=1) / costs).argmax())
        missing[codes[best]] = False
        rows.append(_named(factors, levels[best].tolist()))
    return rows


def _named(factors: Mapping[str, Sequence[Any]], levels: Sequence[int]) -> dict[str, Any]:
    return {
        name: values[level] for (name, values), level in zip(factors.items(), levels, strict=True)
    }
