"""Metrics and exports of a model that is sharded or divided into stages are of the whole."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d2plm.data.store import SequenceStore
from d2plm.export.export_callback import Export
from d2plm.settings.callbacks import EvaluationCallbackSettings, MetricsSettings
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.callbacks.metric_logger import METRICS_FILE, MetricLogger
from tests.ranks import run
from tests.runs import SHAREABLE, SHORT, build, newest, rows, tensors

SIZES = {**SHAREABLE, "num_hidden_layers": 5}
PLANS = {"sharded": {}, "stages": {"pipeline": 2}}


def train_measured(store: Path, output: Path, plans: dict[str, dict[str, int]]) -> None:
    evaluation = EvaluationCallbackSettings(every=4, sequences=12)
    for name, plan in plans.items():
        callbacks = [
            Evaluate(SequenceStore(store), settings=evaluation, max_length=48),
            MetricLogger(settings=MetricsSettings(every=2, layer_norms=True)),
            Export(output / name / "model"),
        ]
        settings = {**SHORT, "max_steps": 4, "sizes": SIZES, "gradient_accumulation_steps": 4}
        settings |= {"plan": plan, "callbacks": callbacks, "max_grad_norm": 0.01}
        build(store, output / name, **settings).train()


def test_metrics_and_export_are_of_all_ranks(store: Path, tmp_path: Path) -> None:
    run(train_measured, store, tmp_path, {"one": {}})
    run(train_measured, store, tmp_path, PLANS, world_size=2)
    one, saved = metrics(tmp_path / "one"), tensors(newest(tmp_path / "one"))
    assert {"validation_nelbo", "optimizer_norm/exp_avg", "optimizer_norm/exp_avg_sq"} <= one.keys()
    layers = ["token_embedding", "time_embedding", *(f"blocks.{i}" for i in range(5)), "head"]
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
