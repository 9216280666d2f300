"""Throughput: tokens per second, model FLOP/s, fraction of the peak, and the wait for data.

Only real tokens count, without padding, over all ranks. Counts come from the batch on the host, so
measuring causes no synchronisation.
"""

import logging
import os
import time
from typing import TYPE_CHECKING

import torch

from d2plm.core.machine import available_cpus
from d2plm.model.flops import training_flops
from d2plm.training.metrics import Metric

if TYPE_CHECKING:
    from d2plm.training.trainer import Trainer

# Dense bf16 TFLOP/s in NVIDIA's datasheets (without sparsity) by words of the device's name; the
# first entry whose words all occur applies.
PEAK_TFLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("B200",), 2250.0),
    (("H200", "NVL"), 835.0),
    (("H200",), 989.0),
    (("H100", "NVL"), 835.0),
    (("H100", "PCIe"), 756.0),
    (("H100",), 989.0),
    (("A100",), 312.0),
    (("L40S",), 362.0),
    (("L4",), 121.0),
)

# Training on CPU counts as slowed down by other processes if it gets less than this share of its
# threads' time over this many seconds while the load exceeds the cores by this factor.
CROWDED_SHARE, CROWDED_SECONDS, CROWDED_LOAD = 0.6, 10.0, 1.25

log = logging.getLogger(__name__)


class Throughput(Metric):
    """Rates since the last row, over all ranks.

    `tokens_per_second`; `model_tflops_per_second` (see `model.flops`); `mfu`, the fraction of the
    devices' peak, if known; `data_wait_share`, the fraction of time spent waiting for data, mean
    over ranks.

    Args:
        peak_tflops: peak of one device; looked up by default.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        self.given_peak = peak_tflops

    def begin(self, trainer: "Trainer") -> None:
        self.peak = self.given_peak or known_peak(trainer.process.device, trainer.dtype)
        if self.peak is not None and trainer.process.is_main:
            source = "peak_tflops"
            if not self.given_peak:
                name = torch.cuda.get_device_name(trainer.process.device)
                source = f"{name}, dense bf16, datasheet"
            log.info("mfu is of %g TFLOP/s a device (%s)", self.peak, source)
        self._restart()

    def see(self, trainer: "Trainer") -> None:
        assert trainer.batch is not None
        self.tokens += sum(trainer.batch.segment_lengths)
        self.flops += training_flops(trainer.model.config, trainer.batch.segment_lengths)
        self.waited += trainer.data_wait

    def read(self, trainer: "Trainer") -> dict[str, float]:
        elapsed = max(time.perf_counter() - self.started, 1e-9)
        counts = [self.tokens, self.flops, self.waited]
        ours = torch.tensor(counts, dtype=torch.float64, device=trainer.process.device)
        tokens, flops, waited = trainer.process.sum(ours).tolist()
        tflops, process = flops / elapsed / 1e12, trainer.process
        self._restart()
        return {
            "tokens_per_second": tokens / elapsed,
            "model_tflops_per_second": tflops,
            **({} if self.peak is None else {"mfu": tflops / (self.peak * process.world_size)}),
            "data_wait_share": waited / process.data_ranks / elapsed,
        }

    def _restart(self) -> None:
        self.tokens, self.flops, self.waited = 0, 0.0, 0.0
        self.started = time.perf_counter()


class CrowdedCores(Metric):
    """No value: warns once if other processes use the cores of training on a CPU."""

    def begin(self, trainer: "Trainer") -> None:
        self.watching = trainer.process.device.type == "cpu" and trainer.process.is_main
        self.since: tuple[float, float] | None = None  # set at the first row, after compilation

    def read(self, trainer: "Trainer") -> dict[str, float]:
        now, threads = (time.perf_counter(), time.process_time()), torch.get_num_threads()
        before = self.since or now
        if not self.watching or (self.since and now[0] - before[0] < CROWDED_SECONDS):
            return {}
        self.since, cores, load = now, available_cpus(), os.getloadavg()[0]
        share = (now[1] - before[1]) / max(now[0] - before[0], 1e-9) / threads
        if before is not now and share < CROWDED_SHARE and load > CROWDED_LOAD * cores:
            self.watching = False
            fewer = f", or train with {max(round(share * threads), 1)} threads" * (threads > 1)
            log.warning(
                "training is slowed down: it gets %.0f %% of the time of its threads (%d), because "
                "others use the cores too (%d, load %.1f); end them%s",
                *(100 * share, threads, cores, load, fewer),
            )
        return {}


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's dense bf16 TFLOP/s; None if unknown, or for another dtype."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Dense bf16 TFLOP/s of a device of this name; None if unknown, or a MIG slice."""
    parts = name.replace("-", " ").split()
    if "MIG" in parts:
        return None
    known = (peak for words, peak in PEAK_TFLOPS if all(word in parts for word in words))
    return next(known, None)
