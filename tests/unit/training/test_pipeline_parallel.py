"""Processes that hold stages of a pipeline train as one process does."""

from pathlib import Path
from typing import Any

import pytest

from d2plm.data.store import SequenceStore
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.training.muon import build_muon
from tests.ranks import run
from tests.unit.training.test_equality import BUDGET, assert_close, result, train_each

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "time_embedding_dim": 10,
    "max_position_embeddings": 48,
}
SHARED: dict[str, Any] = {
    "model": DiTConfig(**SIZES),
    "global_batch_tokens": 8 * BUDGET,
    "gradient_accumulation_steps": 4,
}
INTERLEAVED = {"pipeline_stages_per_rank": 2}
RUNS: dict[str, dict[str, Any]] = {
    "diffusion": {**SHARED, "paradigm": AbsorbingDiffusion()},
    "interleaved": {**SHARED, "plan": {**INTERLEAVED, "activation_checkpointing": 2}},
    "flow": {**SHARED, "paradigm": UniformFlowMatching(), "plan": {"activation_checkpointing": 1}},
    "muon": {**SHARED, "optimizer": build_muon, "plan": INTERLEAVED},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {}),
        (4, {}),
        (4, {"tensor": 2}),
    ],
    ids=["pipeline", "pipeline x shard", "pipeline x tensor"],
)
def test_stages_train_as_one_process(
    ranks: int, plan: dict[str, Any], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    spread = {
        n: {**s, "plan": {**s.get("plan", {}), **plan, "pipeline": 2}} for n, s in RUNS.items()
    }
    alone = {n: {**s, "plan": {}} for n, s in RUNS.items()}
    run(train_each, tiny_store.path, tmp_path / "one", alone)
    run(train_each, tiny_store.path, tmp_path / "many", spread, world_size=ranks)
    for name in RUNS:
        assert_close(result(tmp_path / "many" / name), result(tmp_path / "one" / name), 1e-10, name)
