"""Processes that hold stages of a pipeline train as one process does."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from d2plm.data.store import SequenceStore
from d2plm.export.export_callback import Export
from d2plm.model.dit_config import DiTConfig
from d2plm.settings.callbacks import EvaluationCallbackSettings, MetricsSettings
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.callbacks.metric_logger import MetricLogger
from tests.ranks import run
from tests.unit.training.test_equality import (
    BUDGET,
    SHAREABLE,
    SHORT,
    assert_close,
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


def test_metrics_and_export_are_of_all_stages(tiny_store: SequenceStore, tmp_path: Path) -> None:
    plan = {"pipeline": 2, "pipeline_stages_per_rank": 2}
    run(train_measured, tiny_store.path, tmp_path / "one", {})
    run(train_measured, tiny_store.path, tmp_path / "many", plan, world_size=2)
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
