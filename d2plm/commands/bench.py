"""d2plm bench: time and memory of a training step on this machine, and the training time.

It needs no data: residues are random, with log-normal lengths like those of proteins. Loading real
sequences does not slow a step down. Nothing is written.
"""

import tempfile
import time
from dataclasses import asdict
from statistics import quantiles
from typing import Any

import numpy as np
import torch

from d2plm.core.machine import machine
from d2plm.core.number_text import duration
from d2plm.core.terminal import aligned, result
from d2plm.data.loader import Collection
from d2plm.data.synthetic import SyntheticSequences
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings.commands import BenchSettings
from d2plm.settings.data import LoaderSettings
from d2plm.settings.training import TrainerSettings
from d2plm.tracking.runs import MEMORY
from d2plm.training.callbacks.callback import Callback
from d2plm.training.metrics import PeakMemory
from d2plm.training.throughput import Throughput
from d2plm.training.trainer import Trainer

WARM_UP = 3  # steps that are not timed because blocks are compiled in them
PROTEINS = 20_000
SPREAD = 0.6  # standard deviation of the logarithm of a length, as in UniRef50


def run(config: BenchSettings) -> dict[str, Any]:
    """Train a few steps; print and return the figures."""
    times = StepTimes()
    with tempfile.TemporaryDirectory(prefix="d2plm-bench-") as folder:
        trainer = Trainer(
            TrainerSettings(
                max_steps=WARM_UP + config.steps,
                resume="none",
                device=config.device,
                precision=config.precision,
                compile=config.compile,
            ),
            DiTConfig(**asdict(config.model)),
            AbsorbingDiffusion(),
            [Collection(SyntheticSequences(_lengths(config.mean_length)))],
            folder,
            loading=LoaderSettings(token_budget=config.token_budget, max_length=config.max_length),
            callbacks=[times],
        )
        trainer.train()
    figures = {
        "parameters": trainer.num_parameters,
        "device": trainer.process.device.type,
        "precision": str(trainer.dtype).removeprefix("torch."),
        "compiled": trainer.compiled,
        "processes": trainer.process.world_size,
        "step_seconds": quantiles(np.diff(times.moments), n=4, method="inclusive"),
        **times.rates,
        **PeakMemory().read(trainer),
        "expected_seconds": config.tokens / times.rates["tokens_per_second"],
    }
    result(aligned(_rows(figures, config)))
    return {"machine": machine(), **figures}


class StepTimes(Callback):
    """Records the times of the steps after the warm-up and the rates over them, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[float] = []
        self.throughput = Throughput()
        self.rates: dict[str, float] = {}

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.step < WARM_UP:
            return
        if trainer.process.device.type == "cuda":
            torch.cuda.synchronize(trainer.process.device)
        self.moments.append(time.perf_counter())
        if trainer.step == WARM_UP:
            self.throughput.begin(trainer)
            return
        self.throughput.see(trainer)
        if trainer.is_last_step:
            self.rates = self.throughput.read(trainer)


def _lengths(mean: int) -> Any:
    """int32 [PROTEINS]: number of residues of each protein."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, PROTEINS)
    return drawn.clip(min=10).astype(np.int32)


def _rows(figures: dict[str, Any], config: BenchSettings) -> dict[str, str]:
    low, middle, high = figures["step_seconds"]
    mfu = f", {figures['mfu']:.0%} of the device's peak" if "mfu" in figures else ""
    compiled = "compiled" if figures["compiled"] else "not compiled"
    memory = next(figures[name] for name in MEMORY if name in figures)
    return {
        "model": f"{figures['parameters']:,} parameters, {figures['precision']}, {compiled}, "
        f"on {figures['device']}",
        f"step of {config.token_budget:,} tokens": f"{middle:.3g} s (quartiles {low:.3g} – "
        f"{high:.3g})",
        "tokens per second": f"{figures['tokens_per_second']:,.0f}",
        "model FLOP/s": f"{figures['model_tflops_per_second']:.3g} TFLOP/s{mfu}",
        "peak memory": f"{memory:.2f} GiB",
        f"time for {config.tokens:,.0f} tokens": duration(figures["expected_seconds"]),
    }
