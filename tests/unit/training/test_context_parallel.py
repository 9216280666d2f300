"""Processes that share rows, by context or tensor parallelism, train as one process does."""

from pathlib import Path
from typing import Any

import pytest

from d2plm.data.store import SequenceStore
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.training.muon import build_muon
from tests.conftest import LLAMA, randomise
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
    "llama": {"model": DiTConfig(**{**SIZES, **LLAMA})},
    "muon": {
        "model": DiTConfig(**SIZES),
        "paradigm": MaskFlowMatching(),
        "plan": {"activation_checkpointing": 1},
        "optimizer": build_muon,
    },
}


def thorough(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.thorough)


def assert_shared_without_a_difference(
    runs: dict[str, dict[str, Any]],
    ranks: int,
    plan: dict[str, Any],
    steps: int,
    store: SequenceStore,
    folder: Path,
) -> None:
    chosen = {n: s for n, s in runs.items() if steps < 50 or "optimizer" not in s}
    one = {name: {**settings, "max_steps": steps} for name, settings in chosen.items()}
    shared = {n: {**s, "plan": {**s.get("plan", {}), **plan}} for n, s in one.items()}
    run(train_each, store.path, folder / "one", one)
    run(train_each, store.path, folder / "many", shared, world_size=ranks)
    for name in chosen:
        assert_close(result(folder / "many" / name), result(folder / "one" / name), 1e-10, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "plan", "steps"),
    [
        (4, {"context": 2, "tensor": 2}, 6),
        thorough(2, {"context": 2}, 50),
        thorough(2, {"tensor": 2}, 50),
        thorough(4, {"context": 2}, 50),
        thorough(4, {"tensor": 2}, 50),
        thorough(4, {"context": 2, "tensor": 2}, 50),
    ],
)
def test_rows_are_shared_without_a_difference(
    ranks: int, plan: dict[str, Any], steps: int, tiny_store: SequenceStore, tmp_path: Path
) -> None:
    assert_shared_without_a_difference(RUNS, ranks, plan, steps, tiny_store, tmp_path)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"context": 2}, {"tensor": 2}], ids=["context", "tensor"])
def test_fp32_losses_agree_where_rows_are_shared(
    plan: dict[str, Any], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    settings = {"model": DiTConfig(**SIZES), "precision": "fp32", "max_steps": 30}
    run(train_each, tiny_store.path, tmp_path / "one", {"fp32": settings})
    shared = {"fp32": {**settings, "plan": plan}}
    run(train_each, tiny_store.path, tmp_path / "two", shared, world_size=2)
    one, two = (result(tmp_path / folder / "fp32")["losses"] for folder in ("one", "two"))
    assert_close(two, one, 1e-5)


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
        thorough("tensor", [*OTHERS]),
        thorough("context", [*OTHERS]),
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
    "llama": {"model": DiTConfig(**{**SIZES, **LLAMA}, **EXPERTS)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "plan", "steps"),
    [
        (2, {"expert": 2}, 6),
        thorough(2, {"expert": 2}, 50),
        thorough(2, {"context": 2}, 6),
        thorough(2, {"context": 2, "expert": 2}, 6),
        thorough(4, {"expert": 2}, 50),
        thorough(4, {"expert": 2, "tensor": 2}, 6),
        thorough(4, {"expert": 2, "replicate": 2}, 6),
    ],
)
def test_experts_are_shared_without_a_difference(
    ranks: int, plan: dict[str, Any], steps: int, tiny_store: SequenceStore, tmp_path: Path
) -> None:
    assert_shared_without_a_difference(WITH_EXPERTS, ranks, plan, steps, tiny_store, tmp_path)
