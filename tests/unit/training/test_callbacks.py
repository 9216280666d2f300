"""The callbacks: what each does, on ranks too, and that a resumed run logs each row once."""

import gc
import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from d2plm.core.errors import ModelError
from d2plm.data.loader import Collection, PackedDataset
from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import composition_nats, counts_of, fit_composition
from d2plm.export.export_callback import Export
from d2plm.export.exported_model import load_export
from d2plm.settings.callbacks import (
    CheckpointSettings,
    EarlyStoppingSettings,
    EvaluationCallbackSettings,
    GarbageCollectionSettings,
    MetricsSettings,
    ProfilerSettings,
)
from d2plm.training import checkpoint
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.early_stopping import EarlyStopping
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.callbacks.garbage_collection import GarbageCollection
from d2plm.training.callbacks.gradient_health import GradientHealth
from d2plm.training.callbacks.metric_logger import METRICS_FILE, MetricLogger
from d2plm.training.callbacks.profiler import Profiler
from d2plm.training.callbacks.progress_bar import ProgressBar
from d2plm.training.callbacks.save_checkpoint import SaveCheckpoint
from d2plm.training.trainer import Trainer
from tests.conftest import Captured, MonkeyPatch
from tests.ranks import run
from tests.runs import SHAREABLE, SHORT, At, build, newest, rows, tensors
from tests.unit.training.conftest import Build, Recorder
from tests.unit.training.test_optimizer_state import overflow
from tests.unit.training.test_stopping_callbacks import Evaluations


def test_a_resumed_run_s_metrics_are_those_of_an_unbroken_one(build: Build, tmp_path: Path) -> None:
    """Also where it was stopped between two rows, of which the loss is a mean."""

    def measured(*stop: Callback) -> list[list[float]]:
        logger = MetricLogger(settings=MetricsSettings(every=3))
        build(logger, SaveCheckpoint(CheckpointSettings(every=2)), *stop).train()
        kept = ("step", "loss", "learning_rate", "grad_norm")
        return [[row[k] for k in kept] for row in rows(tmp_path / "run" / METRICS_FILE)]

    with pytest.raises(KeyboardInterrupt):
        measured(Recorder(stop_after=5))
    assert [row["step"] for row in rows(tmp_path / "run" / METRICS_FILE)] == [3]
    with (tmp_path / "run" / METRICS_FILE).open("a") as stream:
        stream.write('{"step": 6, "lo')  # cut off by the kill
    resumed = measured()
    (tmp_path / "run").rename(tmp_path / "resumed")
    assert measured() == resumed


def test_evaluation_is_of_the_averaged_weights(build: Build, tiny_store: SequenceStore) -> None:
    settings = EvaluationCallbackSettings(every=3, sequences=8)
    evaluate = Evaluate(tiny_store, max_length=64, settings=settings)
    trainer = build(evaluate)
    trainer.train()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    evaluate.on_step_end(trainer, trainer.loss, trainer.grad_norm)
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    averaged = trainer.ema.shadow
    assert any(not torch.equal(averaged[name], before[name]) for name in before)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(averaged[name])
    evaluate.on_step_end(trainer, trainer.loss, trainer.grad_norm)
    seen = [row["validation_perplexity"] for row in trainer.history]
    assert len(seen) == 4
    assert all(10 < perplexity < 25 for perplexity in seen)
    assert seen[1:] == pytest.approx([seen[1]] * 3)  # whichever weights the model held


def test_an_export_is_kept_where_nothing_was_trained_since(build: Build, tmp_path: Path) -> None:
    folder, root = tmp_path / "model", checkpoint.Root(str(tmp_path / "run" / "checkpoints"))
    for max_steps, saved, kept in ((5, [3, 5], False), (5, [3, 5], True), (7, [3, 5, 6, 7], False)):
        save = SaveCheckpoint(CheckpointSettings(every=3))
        export = Export(folder, {"name": "t"})
        build(save, export, max_steps=max_steps, save_total_limit=9).train()
        assert root.names() == [f"step-{step:08d}" for step in saved]
        assert (folder / "evaluation.json").exists() == kept
        assert load_export(folder).provenance["step"] == max_steps
        (folder / "evaluation.json").write_text("{}")


def test_hooks_receive_loss_and_gradient_norm_and_a_save_s_location(build: Build) -> None:
    seen: list[tuple[Any, ...]] = []

    class Listen(Callback):
        def on_before_optimizer_step(self, _: Trainer, loss: Tensor, grad_norm: Tensor, /) -> None:
            seen.append((float(loss), float(grad_norm)))

        def on_step_end(self, trainer: Trainer, loss: Tensor, grad_norm: Tensor, /) -> None:
            assert seen[-1] == (float(loss), float(grad_norm))
            assert (loss, grad_norm) == (trainer.loss, trainer.grad_norm)
            rate = 1e-3 * trainer.schedule(trainer.step - 1)
            rates = [group["lr"] for group in trainer.optimizer.param_groups]
            assert rates == pytest.approx([rate, rate])

        def on_save(self, trainer: Trainer, location: str, /) -> None:
            seen.append(("saved", location))

        def on_load(self, trainer: Trainer, location: str, /) -> None:
            seen.append(("loaded", location))

    trainer = build(SaveCheckpoint(CheckpointSettings(every=2)), Listen(), max_steps=2)
    trainer.train()
    location = trainer.saver.root.of("step-00000002")
    build(Listen(), max_steps=2).load(location)
    assert seen[-2:] == [("saved", location), ("loaded", location)]


class OwnBatches(PackedDataset):
    """Batches of the user's own."""


class OwnData(Trainer):
    """Trains on the first collection alone, in batches of its own."""

    def build_dataset(self, collections: Sequence[Collection]) -> None:
        super().build_dataset(collections[:1])

    def build_collate(self) -> None:
        self.collate = OwnBatches


def test_a_subclass_chooses_data_and_batches(build: Build, tiny_store: SequenceStore) -> None:
    loader = build(kind=OwnData, collections=[Collection(tiny_store)] * 2).loader
    assert len(loader.sampler.lengths) == len(tiny_store)
    assert loader.dataset.max_length == 64  # of a model that takes 128
    assert isinstance(loader.dataset, OwnBatches)


def test_garbage_is_collected_at_its_steps_alone(build: Build, monkeypatch: MonkeyPatch) -> None:
    class Look(Callback):
        def on_step_begin(self, trainer: Trainer) -> None:
            assert not gc.isenabled() and freeze.called and not unfreeze.called
            collect.reset_mock()

        def on_step_end(self, trainer: Trainer, *_: object) -> None:
            seen.append([call.args for call in collect.call_args_list])

    collect, seen = mock.Mock(wraps=gc.collect), list[Any]()
    freeze, unfreeze = mock.Mock(), mock.Mock()
    for name, replaced in (("collect", collect), ("freeze", freeze), ("unfreeze", unfreeze)):
        monkeypatch.setattr(gc, name, replaced)
    collector = GarbageCollection(GarbageCollectionSettings(every=2, generation=1))
    with pytest.raises(KeyboardInterrupt):
        build(collector, Look(), Recorder(stop_after=5)).train()
    assert seen == [[], [(1,)], [], [(1,)], []]
    assert gc.isenabled() and unfreeze.called


def traced(folder: Path, step: int) -> list[str]:
    """The names of everything in the only trace."""
    trace = folder / "run" / "profile" / f"rank0.step-{step}.json.gz"
    table = trace.with_name(f"rank0.step-{step}.txt")
    assert {*trace.parent.iterdir()} == {trace, table}
    assert "Self CPU" in table.read_text()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event.get("name", "") for event in events]


def test_the_chosen_steps_are_traced_and_no_other(build: Build, tmp_path: Path) -> None:
    profiler = Profiler(ProfilerSettings(start=2, steps=2))
    build(profiler, gradient_accumulation_steps=2, max_steps=4).train()
    names = traced(tmp_path, 2)
    steps = {name for name in names if name.startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
    assert names.count("optimizer") == 2
    assert names.count("forward") == names.count("backward") == 4


def test_a_training_that_breaks_off_leaves_what_was_traced(build: Build, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(Profiler(ProfilerSettings(start=1, steps=100)), Recorder(stop_after=2)).train()
    assert traced(tmp_path, 1).count("optimizer") == 1


def test_the_first_line_has_the_composition_baseline_of_the_evaluated_proteins(
    tiny_store: SequenceStore, build: Build, capsys: Captured
) -> None:
    held_out = Evaluate(tiny_store, max_length=64, settings=EvaluationCallbackSettings(sequences=8))
    alpha = fit_composition(tiny_store, 62)
    counts = [counts_of(tokens[:62]) for tokens in held_out.sequences]
    nats = sum(composition_nats(each, alpha) for each in counts)
    expected = math.exp(nats / sum(each.sum() for each in counts))
    assert held_out.reference_perplexity(tiny_store) == pytest.approx(expected)
    bar = ProgressBar()
    trainer = build(bar)
    trainer.add_callback(held_out)
    bar.on_train_begin(trainer)
    bar.on_evaluate(trainer, {"validation_perplexity": 17.5})
    bar.on_stop(trainer)
    assert f"without order, gives {expected:.3f}" in capsys.readouterr().err


def test_a_training_that_never_began_is_stopped_without_a_word(build: Build) -> None:
    class Refuse(Callback):
        def on_train_begin(self, trainer: Trainer) -> None:
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        build(Refuse(), ProgressBar()).train()


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
