"""d2plm bench: time and memory of a training step on this machine, and the time of a training.

Needs no data: residues are random, with log-normal lengths like those of proteins, and nothing is
written. Loading real sequences does not slow a step down.
"""

import resource
import sys
import tempfile
import time
from statistics import quantiles
from typing import Any

import numpy as np
import torch

from d2plm.config import Config
from d2plm.core.errors import require_number
from d2plm.core.machine import machine
from d2plm.core.terminal import result
from d2plm.data.loader import Collection
from d2plm.data.synthetic import SyntheticSequences
from d2plm.model.flops import training_flops
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.training.callbacks.callback import Callback
from d2plm.training.expected_time import duration
from d2plm.training.throughput import known_peak
from d2plm.training.trainer import Trainer

WARM_UP = 3  # steps, in which blocks are compiled
PROTEINS = 20_000
SPREAD = 0.6  # standard deviation of the logarithm of a length, as in UniRef50


def run(config: Config) -> dict[str, Any]:
    """Train a few steps; print and return the figures."""
    for key in ("token_budget", "mean_length", "steps"):
        require_number(key, config[key], integer=True, low=2)
    require_number("tokens", config["tokens"], low=1)
    times = StepTimes()
    with tempfile.TemporaryDirectory(prefix="d2plm-bench-") as folder:
        trainer = Trainer(
            model=config.build("model"),
            paradigm=AbsorbingDiffusion(),
            collections=[Collection(SyntheticSequences(_lengths(config["mean_length"])))],
            output_dir=folder,
            max_steps=WARM_UP + config["steps"],
            resume="none",
            callbacks=[times],
            **{key: config[key] for key in ("token_budget", "max_length", "device")},
            **{key: config[key] for key in ("precision", "compile")},
        )
        trainer.train()
    figures = times.figures(trainer, config["tokens"])
    result(_table(figures, config))
    return {"machine": machine(), **figures}


class StepTimes(Callback):
    """Times and tokens of every step after the warm-up, on one rank."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.lengths: list[list[int]] = []

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.step < WARM_UP:
            return
        if trainer.process.device.type == "cuda":
            torch.cuda.synchronize(trainer.process.device)
        self.moments.append(time.perf_counter())
        if trainer.step > WARM_UP:
            assert trainer.batch is not None
            self.lengths.append(list(trainer.batch.segment_lengths))

    def figures(self, trainer: Trainer, tokens: float) -> dict[str, Any]:
        """Seconds of a step (quartiles), rates, memory, and seconds for `tokens` tokens."""
        seconds = np.diff(self.moments)
        per_step = float(seconds.mean())
        ranks, device = trainer.process.world_size, trainer.process.device
        rate = ranks * sum(map(sum, self.lengths)) / len(seconds) / per_step
        flops = sum(training_flops(trainer.model.config, lengths) for lengths in self.lengths)
        tflops, peak = flops / float(seconds.sum()) / 1e12, known_peak(device, trainer.dtype)
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            memory = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "parameters": trainer.model.num_parameters(),
            "device": device.type,
            "precision": str(trainer.dtype).removeprefix("torch."),
            "compiled": trainer.compiled,
            "processes": ranks,
            "step_seconds": quantiles(seconds, n=4, method="inclusive"),
            "tokens_per_second": rate,
            "model_tflops_per_second": tflops,
            **({} if peak is None else {"mfu": tflops / peak}),
            "peak_memory_bytes": memory,
            "expected_seconds": tokens / rate,
        }


def _lengths(mean: int) -> Any:
    """int32 [PROTEINS]: residues of each protein."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, PROTEINS)
    return drawn.clip(min=10).astype(np.int32)


def _table(figures: dict[str, Any], config: Config) -> str:
    low, middle, high = figures["step_seconds"]
    mfu = f", {figures['mfu']:.0%} of the device's peak" if "mfu" in figures else ""
    compiled = "compiled" if figures["compiled"] else "not compiled"
    rows = {
        "model": f"{figures['parameters']:,} parameters, {figures['precision']}, {compiled}, "
        f"on {figures['device']}",
        f"step of {config['token_budget']:,} tokens": f"{middle:.3g} s (quartiles {low:.3g} – "
        f"{high:.3g})",
        "tokens per second": f"{figures['tokens_per_second']:,.0f}",
        "model FLOP/s": f"{figures['model_tflops_per_second']:.3g} TFLOP/s{mfu}",
        "peak memory": f"{figures['peak_memory_bytes'] / 2**30:.2f} GiB",
        f"time for {config['tokens']:,.0f} tokens": duration(figures["expected_seconds"]),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())
