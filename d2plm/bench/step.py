"""A training step on one device, whole and part by part, in one process.

A GPU has no room for several large models, so that one trainer stands for all arms: what differs
between them is switched from turn to turn, and all are given the same batches. Nothing is waited
for between turns; their times are read off the device's clock at the end.
"""

import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice, pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from d2plm.bench.kernels import profile_steps
from d2plm.bench.rows import Row, ema_row, flops_rows, rate_unit, ratio_row, recompilation_row
from d2plm.bench.train import RECOMPILED_AFTER, compilations
from d2plm.bench.workload import without_average, workload_of
from d2plm.core.errors import BenchError
from d2plm.core.precision import resolve_device
from d2plm.data.loader import GlobalBatch, PackedLoader, Position
from d2plm.data.prefetch import prefetch
from d2plm.model.config import DiTConfig
from d2plm.model.flops import training_flops
from d2plm.training.forecast import Memory, memory_per_rank
from d2plm.training.metrics import GIB
from d2plm.training.plan import Plan
from d2plm.training.trainer import Trainer

FULL = "as it trains"
WITHOUT_EMA = "without EMA"
COPIED_LATE = "copied when needed"
ALREADY_THERE = "batches on the device already"
SHARE_OF_MEMORY = 0.92  # of a GPU's that a forecast may take; the rest is the framework's


def bench_step(
    proteins: Path,
    model: dict[str, Any],
    *,
    tokens: int = 65_536,
    micro_batches: int = 1,
    max_length: int = 1024,
    device: str = "auto",
    precision: str = "auto",
    compile: bool = True,
    steady_steps: int = 50,
    turns: int = 12,
    steps: int = 2,
    profiled_steps: int = 3,
    temporary_dir: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], dict[str, Any]]:
    """Measure a step of AdamW with EMA, real proteins and the real loader.

    Args:
        proteins: FASTA of real proteins.
        model: settings of a `DiTConfig`.
        tokens: of a step; `micro_batches` of them (see `micro_batches_that_fit`).
        steady_steps: one after another, for the rates; as many as the rates shall rest on.
        turns, steps: of each variant, and steps of a turn; no turns leave the variants out.
        profiled_steps: for the shares of kernels (CUDA); 0 leaves them out.
        report: called with one line per stage.

    Returns:
        The table, and what is no row: step times, memory, forced synchronisations, kernels.

    Raises:
        BenchError: a loss is no number.
    """
    place = torch.device(resolve_device(device))
    sizes = {"token_budget": tokens // micro_batches, "max_length": max_length}
    with workload_of(proteins, model, **sizes, temporary_dir=temporary_dir) as workload:
        report("building the model")
        trainer = workload.trainer(
            device=device, precision=precision, compile=compile, global_batch_tokens=tokens
        )
        report("compiling" if trainer.compiled else "warming up")
        batches = prefetch(trainer.loader.stream(Position()), trainer.device)
        for batch in islice(batches, RECOMPILED_AFTER):
            trainer.train_step(batch)
        before = compilations()
        report(f"{steady_steps} steps")
        rows, facts = _steady(trainer, batches, steady_steps)
        if turns:
            report(f"{turns} turns of {steps} steps of each variant")
            rows += _variants(trainer, turns, steps)
        if place.type == "cuda":
            report("forced synchronisations")
            row, facts["synchronisations"] = _synchronisations(trainer, batches)
            rows.append(row)
        when = f"after step {RECOMPILED_AFTER} of {trainer.step}"
        rows.append(recompilation_row(compilations() - before, when))
        if not torch.isfinite(trainer.loss):
            raise BenchError(f"the loss of step {trainer.step} is {float(trainer.loss)}")
        facts |= {"loss": float(trainer.loss), "compiled": trainer.compiled}
        if place.type == "cuda" and profiled_steps:
            report(f"profile of {profiled_steps} steps")
            facts["profile"] = profile_steps(
                lambda: trainer.train_step(next(batches)), profiled_steps
            )
        foretold = _foretold(trainer)
        facts["memory_forecast"] = {"total": foretold.total, **vars(foretold)}
        if "memory" in facts:
            share = facts["memory"]["allocated"] / foretold.total
            rows.append(Row("peak memory ÷ its forecast", share, "×"))
    return rows, {"tokens": tokens, "micro_batches": micro_batches, **facts}


def micro_batches_that_fit(
    config: DiTConfig, *, tokens: int, segments: int, dtype: torch.dtype, memory: int, compile: bool
) -> int:
    """The fewest micro-batches, a power of two, that a step's tokens need on a device of `memory`.

    Forgets all that this process has compiled: the sizes tried here must not make the compiler take
    them for variable when it comes to train.

    Args:
        tokens, segments: of the whole step.
        memory: bytes.

    Raises:
        BenchError: if not even a sixty-fourth of the step fits.
    """
    for count in (1, 2, 4, 8, 16, 32, 64):
        taken = memory_per_rank(
            config,
            Plan().resolved(1),
            tokens=tokens // count,
            segments=segments // count,
            dtype=dtype,
            compile=compile,
        )
        torch.compiler.reset()
        if taken.total <= SHARE_OF_MEMORY * memory:
            return count
    raise BenchError(
        f"a step of {tokens:,} tokens takes {taken.total / GIB:.1f} GiB in 64 micro-batches, and "
        f"the device has {memory / GIB:.1f}: take a smaller model"
    )


class _Marks:
    """Moments on the device's clock, which nobody waits for; without a GPU, of the CPU's time."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.moments: list[Any] = []

    def mark(self) -> None:
        """Note this moment of the device's work."""
        if not self.cuda:
            self.moments.append(time.process_time())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.moments.append(event)

    def seconds(self) -> list[float]:
        """Between each moment and the next."""
        if not self.cuda:
            return [b - a for a, b in pairwise(self.moments)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self.moments)]


def _steady(
    trainer: Trainer, batches: Iterator[GlobalBatch], steps: int
) -> tuple[list[Row], dict[str, Any]]:
    """Rates and memory of steps one after another; every batch counts by its true lengths."""
    cuda = trainer.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks, lengths, wall = _Marks(trainer.device), [], time.perf_counter()
    marks.mark()
    for batch in islice(batches, steps):
        trainer.train_step(batch)
        lengths.append(batch.segment_lengths)
        marks.mark()
    seconds = marks.seconds()
    wall = time.perf_counter() - wall
    took, tokens = sum(seconds), sum(map(sum, lengths))
    flops = sum(training_flops(trainer.model.config, batch) for batch in lengths)
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    padding = 100 * (1 - tokens / steps / trainer.global_batch_tokens)
    rows = [
        Row(f"{steps} steady steps", tokens / took, rate_unit(trainer.device)),
        Row("a step", 1e3 * middle, "ms", spread=(1e3 * low, 1e3 * high)),
        Row("padding", padding, "%"),
        *flops_rows(flops, took, trainer.device, trainer.dtype),
    ]
    facts: dict[str, Any] = {"step_seconds": seconds, "wall_seconds": wall}
    facts["flops_per_token"] = flops / tokens
    if cuda:
        facts["memory"] = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        rows.append(Row("peak memory", facts["memory"]["allocated"] / GIB, "GiB"))
    return rows, facts


def _foretold(trainer: Trainer) -> Memory:
    """The forecast of the trainer's memory; compiles, and must come after what is timed."""
    loader: PackedLoader = trainer.loader
    return memory_per_rank(
        trainer.model.config,
        trainer.plan,
        tokens=loader.bins_per_micro_batch * loader.sampler.token_budget,
        segments=loader.bins_per_micro_batch * loader.sampler.max_segments,
        dtype=trainer.dtype,
        compile=trainer.compiled,
    )


def _variants(trainer: Trainer, turns: int, steps: int) -> list[Row]:
    """What a step takes with one thing changed; all variants see the same batches."""

    def stream(enabled: bool = True) -> Iterator[GlobalBatch]:
        return prefetch(trainer.loader.stream(Position()), trainer.device, enabled=enabled)

    kept = list(islice(stream(), (turns + 1) * steps))
    streams = {FULL: stream(), WITHOUT_EMA: stream(), ALREADY_THERE: iter(kept)}
    if trainer.device.type == "cuda":  # elsewhere nothing is copied
        streams[COPIED_LATE] = stream(enabled=False)
    marks, order = _Marks(trainer.device), []
    for turn in range(turns + 1):
        names = list(streams) if turn % 2 == 0 else list(reversed(streams))
        for name in names:
            with without_average(trainer) if name == WITHOUT_EMA else nullcontext():
                marks.mark()
                for batch in islice(streams[name], steps):
                    trainer.train_step(batch)
                marks.mark()
            order.append(name)
    times = marks.seconds()[::2]
    # The first turn of each warms up.
    seconds = {
        name: [took for of, took in zip(order, times, strict=True) if of == name][1:]
        for name in streams
    }
    full = seconds[FULL]
    there = f"a step on {ALREADY_THERE} ÷ from the real loader"
    rows = [
        ratio_row(there, seconds[ALREADY_THERE], full, 0.995),
        ema_row(full, seconds[WITHOUT_EMA], trainer.device),
    ]
    if COPIED_LATE in seconds:
        what = f"a step on {COPIED_LATE} ÷ prefetched"
        rows.append(ratio_row(what, seconds[COPIED_LATE], full))
    return rows


def _synchronisations(
    trainer: Trainer, batches: Iterator[GlobalBatch], steps: int = 3
) -> tuple[Row, str | None]:
    """How often a step that does not log waits for the device, and where it does so first."""
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in islice(batches, steps):
                trainer.train_step(batch)
        found = sum("synchroniz" in str(warning.message) for warning in caught)
        place = None
        if found:
            batch = next(batches)
            torch.cuda.set_sync_debug_mode("error")
            try:
                trainer.train_step(batch)
            except RuntimeError:
                place = traceback.format_exc(limit=-6)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    row = Row("forced synchronisations in a step", found / steps, "", 0, at_most=True)
    return row, place
