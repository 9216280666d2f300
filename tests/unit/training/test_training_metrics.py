"""Each training metric against an independent computation, and the metric logger."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d2plm.core.errors import TrackingError
from d2plm.data.store import SequenceStore
from d2plm.model.dit_config import DiTConfig
from d2plm.model.flops import training_flops
from d2plm.settings.callbacks import CheckpointSettings, MetricsSettings
from d2plm.settings.registry import Entry, registered
from d2plm.settings.schema import Settings
from d2plm.tracking.runs import Runs
from d2plm.training import throughput
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.metric_logger import METRICS_FILE, MetricLogger
from d2plm.training.callbacks.save_checkpoint import SaveCheckpoint
from d2plm.training.distributed import Process
from d2plm.training.metrics import MeanLoss, Metric, PeakMemory, StepState
from d2plm.training.throughput import CrowdedCores, Throughput, peak_of
from d2plm.training.trainer import Trainer
from tests import runs
from tests.conftest import TINY_SIZES, Logged, MonkeyPatch
from tests.ranks import run

Build = Callable[..., Trainer]
ROW = {
    *("loss", "learning_rate", "grad_norm", "parameter_norm", "epoch", "tokens_per_second"),
    *("model_tflops_per_second", "data_wait_share", "peak_memory_gib"),
}


class Ranks(Process):
    """A process among `world_size`, all of which measure the same."""

    def sum(self, value: Tensor) -> Tensor:
        return value * self.world_size


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "run" / METRICS_FILE).read_text().splitlines()]


# --- single metrics ----------------------------------------------------------------------------


def test_the_loss_is_the_mean_since_the_last_row_without_skipped_steps() -> None:
    metric = MeanLoss()
    for loss, skipped in ((1.0, False), (float("nan"), True), (4.0, False)):
        stub: Any = SimpleNamespace(loss=torch.tensor(loss), skip_update=skipped)
        metric.see(stub)
    assert metric.read(stub) == {"loss": 2.5}
    assert metric.read(stub) == {}


def test_the_norms_are_over_all_parameters() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model.bias.fill_(5.0)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    loader = SimpleNamespace(epochs_done=lambda position: 1.5)
    stub: Any = SimpleNamespace(
        parameters=dict(model.named_parameters()),
        splits={},
        process=Process(),
        grad_norm=torch.tensor(7.0),
        optimizer=optimizer,
        loader=loader,
        position=None,
    )
    norms = {"grad_norm": 7.0, "parameter_norm": pytest.approx(80**0.5)}
    assert StepState().read(stub) == {"learning_rate": 0.1, **norms, "epoch": 1.5}


def test_the_peak_of_the_resident_memory_is_the_kernel_s() -> None:
    stub: Any = SimpleNamespace(process=Ranks())
    held = bytearray(64 * 2**20)
    found = PeakMemory().read(stub)["peak_memory_gib"]
    status = Path("/proc/self/status")
    if status.is_file():
        kernel = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert kernel is not None
        assert found == pytest.approx(int(kernel[1]) / 2**20, rel=0.02)
    assert found > len(held) / 2**30


def test_on_cuda_the_peak_is_the_allocator_s(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * 2**30)
    stub: Any = SimpleNamespace(process=Ranks(device=torch.device("cuda")))
    expected = {"peak_memory_allocated_gib": 3.0, "peak_memory_reserved_gib": 4.0}
    assert PeakMemory().read(stub) == expected


# --- throughput --------------------------------------------------------------------------------


def measured(
    monkeypatch: MonkeyPatch, ranks: int = 1, peak_tflops: float | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Two readings: of two steps of 300 tokens in 4 s, 1 s of it waited; and of none in 2 s."""
    now = [10.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    stub: Any = SimpleNamespace(
        process=Ranks(world_size=ranks),
        model=SimpleNamespace(config=DiTConfig(**TINY_SIZES)),
        batch=SimpleNamespace(segment_lengths=[200, 100]),
        data_wait=0.5,
        dtype=torch.float32,
    )
    metric = Throughput(peak_tflops)
    metric.begin(stub)
    for _ in range(2):
        now[0] += 2.0
        metric.see(stub)
    first = metric.read(stub)
    now[0] += 2.0
    return first, metric.read(stub)


def test_the_rates_are_of_what_was_seen_since_the_last_row(monkeypatch: MonkeyPatch) -> None:
    first, second = measured(monkeypatch)
    assert first == {
        "tokens_per_second": 150.0,
        "model_tflops_per_second": pytest.approx(
            2 * training_flops(DiTConfig(**TINY_SIZES), [200, 100]) / 4 / 1e12
        ),
        "data_wait_share": 0.25,
    }
    assert set(second.values()) == {0.0}


def test_the_rates_are_of_all_ranks_and_the_shares_are_means(monkeypatch: MonkeyPatch) -> None:
    one, _ = measured(monkeypatch, 1, peak_tflops=1e-6)
    four, _ = measured(monkeypatch, 4, peak_tflops=1e-6)
    assert four["tokens_per_second"] == 4 * one["tokens_per_second"]
    assert four["model_tflops_per_second"] == pytest.approx(4 * one["model_tflops_per_second"])
    assert four["data_wait_share"] == one["data_wait_share"]
    assert four["mfu"] == pytest.approx(one["mfu"])
    assert one["mfu"] == pytest.approx(one["model_tflops_per_second"] / 1e-6)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_the_peak_is_of_bf16_and_named_in_the_log(monkeypatch: MonkeyPatch, caplog: Logged) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    stub: Any = SimpleNamespace(
        process=Ranks(device=torch.device("cuda")), dtype=torch.float32, model=None
    )
    metric = Throughput()
    with caplog.at_level(logging.INFO):
        metric.begin(stub)
        assert metric.peak is None
        stub.dtype = torch.bfloat16
        metric.begin(stub)
    assert metric.peak == 989
    assert caplog.messages == [
        "mfu is of 989 TFLOP/s a device (NVIDIA H200, dense bf16, datasheet)"
    ]


@pytest.mark.parametrize(
    ("share", "load", "device", "slowed"),
    [
        (0.4, 9, "cpu", True),
        (0.9, 9, "cpu", False),
        (0.4, 1, "cpu", False),
        (0.4, 9, "cuda", False),
    ],
)
def test_a_training_that_others_slow_down_reports_it_once(
    share: float, load: float, device: str, slowed: bool, monkeypatch: MonkeyPatch, caplog: Logged
) -> None:
    now = [10.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(throughput.time, "process_time", lambda: now[0] * share * 4)
    monkeypatch.setattr(throughput, "available_cpus", lambda: 4)
    monkeypatch.setattr(throughput.os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    stub: Any = SimpleNamespace(process=Ranks(device=torch.device(device)))
    metric = CrowdedCores()
    metric.begin(stub)
    for _ in range(20):
        assert metric.read(stub) == {}
        now[0] += 4.0
    assert len(caplog.messages) == slowed
    if slowed:
        assert "gets 40 % of the time of its threads (4)" in caplog.messages[0]
        assert "train with 2 threads" in caplog.messages[0]


# --- the logger --------------------------------------------------------------------------------


def test_a_row_contains_every_metric(build: Build, tmp_path: Path) -> None:
    build(MetricLogger(settings=MetricsSettings(every=4))).train()
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [4, 6]
    assert all(row.keys() == ROW | {"step"} for row in found)
    assert all(row["tokens_per_second"] > 0 for row in found)


def test_with_a_peak_a_row_has_the_share_of_it_and_the_run_the_peak(
    build: Build, tmp_path: Path
) -> None:
    class Params(Runs):
        def log_params(self, params: dict[str, Any]) -> None:
            self.params = params

    run = Params()
    build(MetricLogger(settings=MetricsSettings(every=6, peak_tflops=2.0), run=run)).train()
    (row,) = rows(tmp_path)
    assert row["mfu"] == pytest.approx(row["model_tflops_per_second"] / 2.0)
    assert run.params == {"mfu_peak_tflops": 2.0}


class LongestSequence(Metric):
    """What a user might add."""

    def begin(self, trainer: Trainer) -> None:
        self.longest = 0

    def see(self, trainer: Trainer) -> None:
        assert trainer.batch is not None
        self.longest = max(self.longest, *trainer.batch.segment_lengths)

    def read(self, trainer: Trainer) -> dict[str, float]:
        return {"longest": self.longest}


def test_a_metric_of_the_user_s_is_in_the_row(
    build: Build, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setitem(registered("metric"), "longest", Entry(Settings, LongestSequence))
    build(MetricLogger(MetricsSettings(every=6, more=["longest"]))).train()
    (row,) = rows(tmp_path)
    assert row["longest"] == 64  # trainer's max_length, which some proteins exceed


def test_other_ranks_measure_and_write_nothing(build: Build, tmp_path: Path) -> None:
    class Refuse(Runs):
        def log_metrics(self, metrics: dict[str, float], step: int = 0) -> None:
            pytest.fail("rank 1 wrote")

    seen: list[dict[str, float]] = []

    class Listen(Callback):
        def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
            seen.append(metrics)

    trainer = build(MetricLogger(settings=MetricsSettings(every=2), run=Refuse()), Listen())
    trainer.process = replace(trainer.process, rank=1, world_size=2)
    trainer.train()
    assert len(seen) == 3
    assert not (tmp_path / "run" / METRICS_FILE).exists()


def test_an_outage_of_the_tracker_does_not_end_training(
    build: Build, tmp_path: Path, caplog: Logged
) -> None:
    class Down(Runs):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            raise TrackingError("cannot log metrics")

        def flush(self) -> None:
            raise TrackingError("cannot log metrics")

    with caplog.at_level(logging.WARNING):
        trainer = build(
            MetricLogger(settings=MetricsSettings(every=1), run=Down()),
            SaveCheckpoint(CheckpointSettings(every=2)),
        )
        trainer.train()
    assert trainer.step == 6
    assert len((tmp_path / "run" / METRICS_FILE).read_text().splitlines()) == 6
    assert caplog.text.count("training continues") == 1


def train_with_layer_norms(store: Path, output: Path) -> None:
    logger = MetricLogger(settings=MetricsSettings(every=2, layer_norms=True))
    settings = {"precision": "fp64", "max_steps": 2, "max_grad_norm": 0.01, "log": False}
    runs.build(store, output, callbacks=[logger], **settings).train()


def test_layer_norms_are_of_the_whole_gradient_and_state_on_any_number_of_ranks(
    tiny_store: SequenceStore, tmp_path: Path
) -> None:
    found = []
    for ranks in (1, 2):
        run(train_with_layer_norms, tiny_store.path, tmp_path / str(ranks), world_size=ranks)
        (row,) = runs.rows(tmp_path / str(ranks) / METRICS_FILE)
        layers = [value for name, value in row.items() if name.startswith("grad_norm/")]
        assert sum(norm**2 for norm in layers) == pytest.approx(row["grad_norm"] ** 2, rel=1e-5)
        found.append({name: value for name, value in row.items() if "norm/" in name})
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    layers = {"token_embedding", "time_embedding", "blocks.0", "head"}
    kinds = {"optimizer_norm/exp_avg", "optimizer_norm/exp_avg_sq"}
    assert set(found[0]) == kinds | {f"grad_norm/{layer}" for layer in layers}
