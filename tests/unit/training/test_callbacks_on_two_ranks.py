"""Decisions, metrics and exports of a model that is sharded or divided into stages (gloo)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d2plm.core.errors import ModelError
from d2plm.data.store import SequenceStore
from d2plm.export.export_callback import Export
from d2plm.settings.callbacks import (
    EarlyStoppingSettings,
    EvaluationCallbackSettings,
    MetricsSettings,
)
from d2plm.training.callbacks.early_stopping import EarlyStopping
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.callbacks.gradient_health import GradientHealth
from d2plm.training.callbacks.metric_logger import METRICS_FILE, MetricLogger
from tests.ranks import run
from tests.runs import SHAREABLE, SHORT, At, build, newest, rows, tensors
from tests.unit.training.test_optimizer_state import overflow
from tests.unit.training.test_stopping_callbacks import Evaluations

SIZES = {**SHAREABLE, "num_hidden_layers": 3}
PLANS = {"sharded": {}, "stages": {"pipeline": 2}}


def train_measured(store: Path, output: Path, plans: dict[str, dict[str, int]]) -> None:
    evaluation = EvaluationCallbackSettings(every=3, sequences=8)
    for name, plan in plans.items():
        callbacks = [
            Evaluate(SequenceStore(store), settings=evaluation, max_length=48),
            MetricLogger(settings=MetricsSettings(every=3, layer_norms=True)),
            Export(output / name / "model"),
        ]
        settings = {**SHORT, "max_steps": 3, "sizes": SIZES, "gradient_accumulation_steps": 4}
        settings |= {"plan": plan, "callbacks": callbacks, "max_grad_norm": 0.01}
        build(store, output / name, **settings).train()


def a_failed_step_stops_all_ranks(store: Path, output: Path) -> None:
    infinite = At("on_micro_step_end", 2, overflow, rank=1)  # in its shard alone
    trainer = build(store, output, callbacks=[infinite, GradientHealth()], every=0)
    with pytest.raises(ModelError, match="step 3: "):
        trainer.train()


def both_ranks_stop_together(store: Path, output: Path) -> None:
    trainer = build(store, output, every=0)
    values = ([2.0, 2.0], [2.0, 1.0])[trainer.process.rank]  # by its own, rank 1 would continue
    trainer.add_callback(Evaluations(values))
    trainer.add_callback(EarlyStopping(EarlyStoppingSettings(patience=1)))
    trainer.train()
    assert trainer.step == 2


def on_ranks(store: Path, output: Path) -> None:
    train_measured(store, output, PLANS)
    a_failed_step_stops_all_ranks(store, output / "failed")
    both_ranks_stop_together(store, output / "stopped")


def test_decisions_metrics_and_exports_are_of_all_ranks(store: Path, tmp_path: Path) -> None:
    run(on_ranks, store, tmp_path, world_size=2)
    run(train_measured, store, tmp_path, {"one": {}})
    one, saved = metrics(tmp_path / "one"), tensors(newest(tmp_path / "one"))
    assert {"validation_nelbo", "optimizer_norm/exp_avg", "optimizer_norm/exp_avg_sq"} <= one.keys()
    layers = ["token_embedding", "time_embedding", *(f"blocks.{i}" for i in range(3)), "head"]
    squares = sum(one[f"grad_norm/{layer}"] ** 2 for layer in layers)
    assert squares == pytest.approx(one["grad_norm"] ** 2, rel=1e-5)
    weights = [tensor.flatten() for name, tensor in saved.items() if name.startswith("model/")]
    assert one["parameter_norm"] == pytest.approx(float(torch.cat(weights).norm()))
    exported = load_file(tmp_path / "one" / "model" / "model.safetensors")
    for name in PLANS:
        torch.testing.assert_close(metrics(tmp_path / name), one, rtol=1e-10, atol=1e-10)
        found = load_file(tmp_path / name / "model" / "model.safetensors")
        torch.testing.assert_close(found, exported, rtol=1e-10, atol=1e-10)


def metrics(output: Path) -> dict[str, float]:
    """The values that do not depend on time or memory, the last of each."""
    measured = ("tokens_per_second", "model_tflops", "data_wait", "peak_memory")
    found = {name: value for row in rows(output / METRICS_FILE) for name, value in row.items()}
    return {name: value for name, value in found.items() if not name.startswith(measured)}
