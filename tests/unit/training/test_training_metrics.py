"""Each training metric against an independent computation, and the metric logger."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from d2plm.core.errors import TrackingError
from d2plm.model.dit_config import DiTConfig
from d2plm.model.flops import training_flops
from d2plm.settings.callbacks import CheckpointSettings, MetricsSettings
from d2plm.tracking.runs import Runs
from d2plm.training import throughput
from d2plm.training.callbacks.metric_logger import METRICS_FILE, MetricLogger
from d2plm.training.callbacks.progress_bar import ProgressBar
from d2plm.training.callbacks.save_checkpoint import SaveCheckpoint
from d2plm.training.distributed import Process
from d2plm.training.metrics import MeanLoss, PeakMemory
from d2plm.training.throughput import CrowdedCores, Throughput, peak_of
from tests.conftest import TINY_SIZES, Captured, Logged, MonkeyPatch
from tests.runs import rows
from tests.unit.training.conftest import Build

ROW = {
    *("loss", "learning_rate", "grad_norm", "parameter_norm", "epoch", "tokens_per_second"),
    *("model_tflops_per_second", "data_wait_share", "peak_memory_gib"),
}


class Ranks(Process):
    """A process among `world_size`, all of which measure the same."""

    def sum(self, value: Tensor) -> Tensor:
        return value * self.world_size


def test_the_loss_is_the_mean_since_the_last_row_without_skipped_steps() -> None:
    metric = MeanLoss()
    for loss, skipped in ((1.0, False), (float("nan"), True), (4.0, False)):
        stub: Any = SimpleNamespace(loss=torch.tensor(loss), skip_update=skipped)
        metric.see(stub)
    assert metric.read(stub) == {"loss": 2.5}
    assert metric.read(stub) == {}


def test_the_peak_of_memory_is_the_kernel_s_or_the_allocator_s(monkeypatch: MonkeyPatch) -> None:
    stub: Any = SimpleNamespace(process=Ranks())
    found = PeakMemory().read(stub)["peak_memory_gib"]
    kernel = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert kernel is not None
    assert found == pytest.approx(int(kernel[1]) / 2**20, rel=0.02)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * 2**30)
    stub = SimpleNamespace(process=Ranks(device=torch.device("cuda")))
    expected = {"peak_memory_allocated_gib": 3.0, "peak_memory_reserved_gib": 4.0}
    assert PeakMemory().read(stub) == expected


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


def test_the_rates_are_of_what_all_ranks_saw_since_the_last_row(monkeypatch: MonkeyPatch) -> None:
    (one, none), (four, _) = (measured(monkeypatch, n, peak_tflops=1e-6) for n in (1, 4))
    tflops = 2 * training_flops(DiTConfig(**TINY_SIZES), [200, 100]) / 4 / 1e12
    assert one == {
        "tokens_per_second": 150.0,
        "model_tflops_per_second": pytest.approx(tflops),
        "data_wait_share": 0.25,
        "mfu": pytest.approx(tflops / 1e-6),
    }
    assert set(none.values()) == {0.0}
    assert four["tokens_per_second"] == 4 * one["tokens_per_second"]
    assert four["model_tflops_per_second"] == pytest.approx(4 * tflops)
    assert [four[key] for key in ("data_wait_share", "mfu")] == pytest.approx([0.25, one["mfu"]])


def test_the_peak_is_that_of_bf16_and_known_by_the_device_s_name(monkeypatch: MonkeyPatch) -> None:
    peaks = {
        "NVIDIA H200 NVL": 835,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "Tesla V100-SXM2-16GB": None,
    }
    assert {name: peak_of(name) for name in peaks} == peaks

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    process, metric = Ranks(device=torch.device("cuda")), Throughput()
    for dtype, peak in ((torch.float32, None), (torch.bfloat16, 989)):
        stub: Any = SimpleNamespace(process=process, dtype=dtype, model=None)
        metric.begin(stub)
        assert metric.peak == peak


@pytest.mark.parametrize(
    ("share", "load", "device", "slowed"),
    [(0.4, 9, "cpu", 1), (0.9, 9, "cpu", 0), (0.4, 1, "cpu", 0), (0.4, 9, "cuda", 0)],
)
def test_a_training_that_others_slow_down_reports_it_once(
    share: float, load: float, device: str, slowed: int, monkeypatch: MonkeyPatch, caplog: Logged
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


def test_a_row_contains_every_metric(build: Build, tmp_path: Path) -> None:
    run, settings = mock.Mock(Runs), MetricsSettings(every=4, peak_tflops=2.0)
    build(MetricLogger(settings=settings, run=run)).train()
    found = rows(tmp_path / "run" / METRICS_FILE)
    assert [row["step"] for row in found] == [4, 6]
    assert all(row.keys() == ROW | {"step", "mfu"} for row in found)
    assert all(row["tokens_per_second"] > 0 for row in found)
    assert found[0]["mfu"] == pytest.approx(found[0]["model_tflops_per_second"] / 2.0)
    run.log_params.assert_called_once_with({"mfu_peak_tflops": 2.0})


def test_other_ranks_write_nothing(build: Build, tmp_path: Path, capsys: Captured) -> None:
    run = mock.Mock(Runs)
    trainer = build(ProgressBar(), MetricLogger(settings=MetricsSettings(every=2), run=run))
    trainer.process = replace(trainer.process, rank=1, world_size=2)
    trainer.train()
    assert capsys.readouterr().err == ""
    assert len(trainer.history) == 3
    assert not run.log_metrics.called
    assert not (tmp_path / "run" / METRICS_FILE).exists()


def test_an_outage_of_the_tracker_does_not_end_training(build: Build, tmp_path: Path) -> None:
    down = mock.Mock(Runs)
    down.log_metrics.side_effect = down.flush.side_effect = TrackingError("cannot log metrics")
    logger = MetricLogger(settings=MetricsSettings(every=1), run=down)
    trainer = build(logger, SaveCheckpoint(CheckpointSettings(every=2)))
    trainer.train()
    assert trainer.step == 6
    assert len(rows(tmp_path / "run" / METRICS_FILE)) == 6
