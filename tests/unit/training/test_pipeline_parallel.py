"""Processes that hold stages of a pipeline train as one process does."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from d2plm.core.errors import ConfigError
from d2plm.data.store import SequenceStore
from d2plm.export.export_callback import Export
from d2plm.model.dit_config import DiTConfig
from d2plm.settings.callbacks import EvaluationCallbackSettings, MetricsSettings
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.callbacks.metric_logger import MetricLogger
from d2plm.training.muon import build_muon
from d2plm.training.plan import Plan
from tests.ranks import run
from tests.runs import At
from tests.unit.training.test_equality import (
    BUDGET,
    SHAREABLE,
    SHORT,
    assert_close,
    interrupt,
    result,
    train,
)
from tests.unit.training.test_equality import SIZES as ODD

SIZES = {**ODD, **SHAREABLE, "num_hidden_layers": 5, "intermediate_size": 20}
SHARED: dict[str, Any] = {
    **SHORT,
    "model": DiTConfig(**SIZES),
    "global_batch_tokens": 8 * BUDGET,
    "gradient_accumulation_steps": 4,
}
INTERLEAVED = {"pipeline_stages_per_rank": 2}
# --- what is measured, kept and exported ---------------------------------------------------------


def train_measured(store: Path, output: Path, plan: dict[str, Any]) -> None:
    callbacks = [
        Evaluate(
            SequenceStore(store),
            settings=EvaluationCallbackSettings(every=5, sequences=12),
            max_length=48,
        ),
        MetricLogger(settings=MetricsSettings(every=5, layer_norms=True)),
        Export(output / "model"),
    ]
    train(store, output, plan, callbacks=callbacks, **SHARED)


def train_until(store: Path, output: Path, plan: dict[str, Any], step: int) -> None:
    settings = {**SHARED, "optimizer": build_muon}
    try:
        train(store, output, plan, callbacks=[At("on_step_end", step, interrupt)], **settings)
    except KeyboardInterrupt:
        return


@pytest.mark.parametrize(
    "plan",
    [INTERLEAVED, pytest.param({"tensor": 2}, marks=pytest.mark.thorough)],
    ids=["interleaved", "pipeline x tensor"],
)
def test_metrics_and_export_are_of_all_stages(
    plan: dict[str, Any], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    ranks, plan = 2 * plan.get("tensor", 1), {"pipeline": 2, **plan}
    run(train_measured, tiny_store.path, tmp_path / "one", {})
    run(train_measured, tiny_store.path, tmp_path / "many", plan, world_size=ranks)
    one, many = (metrics(tmp_path / name) for name in ("one", "many"))
    assert {"validation_nelbo", "grad_norm/blocks.4", "grad_norm/head"} <= one.keys()
    assert_close(many, one, 1e-10)
    one, many = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("one", "many"))
    assert_close(many, one, 1e-10)


def metrics(output: Path) -> dict[str, float]:
    """The values that do not depend on time or memory, the last of each."""
    found: dict[str, float] = {}
    for line in (output / "metrics.jsonl").read_text().splitlines():
        found |= json.loads(line)
    return {
        name: value
        for name, value in found.items()
        if not name.startswith(("tokens_per_second", "model_tflops", "data_wait", "peak_memory"))
    }


LEGS: list[tuple[int, dict[str, Any]]] = [
    (2, {"pipeline": 2, **INTERLEAVED}),
    (1, {}),
    (2, {}),
    (2, {"pipeline": 2}),
]


@pytest.mark.parametrize(
    "legs", [LEGS[1::2], pytest.param(LEGS, marks=pytest.mark.thorough)], ids=["some", "all"]
)
def test_a_checkpoint_continues_with_any_stages(
    legs: list[tuple[int, dict[str, Any]]], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    run(train_until, tiny_store.path, tmp_path / "unbroken", {}, 99)
    stops = [*(3, 5, 7)[-len(legs) + 1 :], 99]
    for (ranks, plan), step in zip(legs, stops, strict=True):
        run(train_until, tiny_store.path, tmp_path / "broken", plan, step, world_size=ranks)
    found, expected = result(tmp_path / "broken"), result(tmp_path / "unbroken")
    for part in ("losses", "norms"):
        assert_close(found[part], expected[part][7:], 1e-10, part)
    for part in ("weights", "averages"):
        assert_close(found[part], expected[part], 1e-10, part)


# --- refusals ------------------------------------------------------------------------------------


def fits(plan: Plan, **changes: Any) -> None:
    plan.require_fits(DiTConfig(**{**SIZES, **changes}))


REFUSED: dict[str, Callable[[], object]] = {
    "pipeline=6: the model's num_hidden_layers=5 cannot be divided into 6 stages; use a product "
    "of at most 5": lambda: fits(Plan(pipeline=6)),
    "pipeline=2, pipeline_stages_per_rank=3: the model's num_hidden_layers=5 cannot": (
        lambda: fits(Plan(pipeline=2, pipeline_stages_per_rank=3))
    ),
    "pipeline=2: a model with relatives_dim=12": lambda: fits(Plan(pipeline=2), relatives_dim=12),
    "pipeline=2: does not divide the 3 processes": (lambda: Plan(pipeline=2).resolved(3)),
    "pipeline_stages_per_rank=2: there is no pipeline": lambda: Plan(pipeline_stages_per_rank=2),
    "pipeline=4: a step has 2 micro-batches, and needs at least 4; change global_batch_tokens": (
        lambda: Plan(pipeline=4).require_micro_batches(2)
    ),
    "pipeline=2: a step has 3 micro-batches, and needs a multiple of 2": (
        lambda: Plan(pipeline=2, pipeline_stages_per_rank=2).require_micro_batches(3)
    ),
    "reshard_between_micro_batches=True: pipeline=2": (
        lambda: Plan(pipeline=2, reshard_between_micro_batches=True)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_impossible_pipelines_are_rejected_with_what_to_set(message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        REFUSED[message]()
