"""Metrics and exports of a model whose blocks are divided over processes are of all blocks."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from d2plm.data.store import SequenceStore
from d2plm.export.export_callback import Export
from d2plm.settings.callbacks import EvaluationCallbackSettings, MetricsSettings
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.callbacks.metric_logger import METRICS_FILE, MetricLogger
from tests.ranks import run
from tests.runs import SHAREABLE, SHORT, build, rows

SIZES = {**SHAREABLE, "num_hidden_layers": 5}


def train_measured(store: Path, output: Path, plan: dict[str, Any]) -> None:
    evaluation = EvaluationCallbackSettings(every=5, sequences=12)
    callbacks = [
        Evaluate(SequenceStore(store), settings=evaluation, max_length=48),
        MetricLogger(settings=MetricsSettings(every=5, layer_norms=True)),
        Export(output / "model"),
    ]
    settings = {**SHORT, "sizes": SIZES, "gradient_accumulation_steps": 4, "plan": plan}
    build(store, output, callbacks=callbacks, **settings).train()


def test_metrics_and_export_are_of_all_stages(tiny_store: SequenceStore, tmp_path: Path) -> None:
    plan = {"pipeline": 2, "pipeline_stages_per_rank": 2}
    run(train_measured, tiny_store.path, tmp_path / "one", {})
    run(train_measured, tiny_store.path, tmp_path / "many", plan, world_size=2)
    one, many = (metrics(tmp_path / name) for name in ("one", "many"))
    assert {"validation_nelbo", "grad_norm/blocks.4", "grad_norm/head"} <= one.keys()
    torch.testing.assert_close(many, one, rtol=1e-10, atol=1e-10)
    one, many = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("one", "many"))
    torch.testing.assert_close(many, one, rtol=1e-10, atol=1e-10)


def metrics(output: Path) -> dict[str, float]:
    """The values that do not depend on time or memory, the last of each."""
    measured = ("tokens_per_second", "model_tflops", "data_wait", "peak_memory")
    found = {name: value for row in rows(output / METRICS_FILE) for name, value in row.items()}
    return {name: value for name, value in found.items() if not name.startswith(measured)}
