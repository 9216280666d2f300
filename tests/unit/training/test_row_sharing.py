"""Processes that share rows, by context or tensor parallelism, train as one process does."""

from pathlib import Path
from typing import Any

import pytest

from d2plm.data.store import SequenceStore
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.training.muon import build_muon
from tests.conftest import randomise
from tests.ranks import run
from tests.unit.training.test_equality import assert_close, result, train_each

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "time_embedding_dim": 10,
    "max_position_embeddings": 48,
}
RUNS: dict[str, dict[str, Any]] = {
    "diffusion": {"model": DiTConfig(**SIZES), "paradigm": AbsorbingDiffusion()},
    "recomputed": {"model": DiTConfig(**SIZES), "plan": {"activation_checkpointing": 1}},
    "flow": {"model": DiTConfig(**SIZES), "paradigm": UniformFlowMatching()},
    "muon": {"model": DiTConfig(**SIZES), "optimizer": build_muon},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        pytest.param(2, {"context": 2}, marks=pytest.mark.thorough),
        pytest.param(2, {"tensor": 2}, marks=pytest.mark.thorough),
        pytest.param(4, {"context": 2}, marks=pytest.mark.thorough),
        pytest.param(4, {"tensor": 2}, marks=pytest.mark.thorough),
        (4, {"context": 2, "tensor": 2}),
    ],
    ids=["context", "tensor", "shard x context", "shard x tensor", "context x tensor"],
)
def test_rows_are_shared_without_a_difference(
    ranks: int, plan: dict[str, Any], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    shared = {n: {**s, "plan": {**s.get("plan", {}), **plan}} for n, s in RUNS.items()}
    run(train_each, tiny_store.path, tmp_path / "one", RUNS)
    run(train_each, tiny_store.path, tmp_path / "many", shared, world_size=ranks)
    for name in RUNS:
        assert_close(result(tmp_path / "many" / name), result(tmp_path / "one" / name), 1e-10, name)


def given_model() -> DiT:
    """None of whose weights is zero."""
    model = DiT(DiTConfig(**SIZES)).double()
    randomise(model)
    return model


OTHERS: dict[str, dict[str, Any]] = {
    "split matrices alone": {
        "model": given_model,
        "freeze": ["*embedding.*", "head.*", "*modulation*", "*norm*"],
    },
    "variants": {
        "model": DiTConfig(
            **SIZES, head="esm", qk_norm=False, affine_norm=True, feed_forward="gelu"
        )
    },
    "accumulated": {
        "model": DiTConfig(**SIZES),
        "paradigm": AbsorbingDiffusion(loss="mean"),
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.01,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dimension", "names"),
    [
        ("tensor", ["split matrices alone"]),
        pytest.param("tensor", [*OTHERS], marks=pytest.mark.thorough),
        pytest.param("context", [*OTHERS], marks=pytest.mark.thorough),
    ],
    ids=["some", "tensor", "context"],
)
def test_rows_are_shared_whatever_is_trained_and_how(
    dimension: str, names: list[str], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    one = {name: OTHERS[name] for name in names}
    shared = {name: {**settings, "plan": {dimension: 2}} for name, settings in one.items()}
    run(train_each, tiny_store.path, tmp_path / "one", one)
    run(train_each, tiny_store.path, tmp_path / "many", shared, world_size=2)
    for name in names:
        assert_close(result(tmp_path / "many" / name), result(tmp_path / "one" / name), 1e-10, name)


EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "biases": {"model": DiTConfig(**SIZES, **EXPERTS, shared_expert_size=8)},
    "loss": {
        "model": DiTConfig(**SIZES, **EXPERTS, auxiliary_loss=0.01),
        "plan": {"activation_checkpointing": 1},
        "paradigm": UniformFlowMatching(),
    },
    "muon": {"model": DiTConfig(**SIZES, **EXPERTS), "optimizer": build_muon},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"expert": 2}),
        pytest.param(2, {"context": 2}, marks=pytest.mark.thorough),
        pytest.param(2, {"context": 2, "expert": 2}, marks=pytest.mark.thorough),
        pytest.param(4, {"expert": 2}, marks=pytest.mark.thorough),
        pytest.param(4, {"expert": 2, "tensor": 2}, marks=pytest.mark.thorough),
        pytest.param(4, {"expert": 2, "replicate": 2}, marks=pytest.mark.thorough),
    ],
    ids=[
        "expert",
        "context",
        "context x expert",
        "shard x expert",
        "expert x tensor",
        "replicate x expert",
    ],
)
def test_experts_are_shared_without_a_difference(
    ranks: int, plan: dict[str, Any], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    shared = {n: {**s, "plan": {**s.get("plan", {}), **plan}} for n, s in WITH_EXPERTS.items()}
    run(train_each, tiny_store.path, tmp_path / "one", WITH_EXPERTS)
    run(train_each, tiny_store.path, tmp_path / "many", shared, world_size=ranks)
    for name in WITH_EXPERTS:
        assert_close(result(tmp_path / "many" / name), result(tmp_path / "one" / name), 1e-10, name)
