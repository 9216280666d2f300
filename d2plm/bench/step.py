"""A training step on one device, whole and part by part, in one process.

A GPU has no room for several large models, so that one trainer stands for all arms: what differs
between them is switched from turn to turn, and all are given the same batches. Nothing is waited
for between turns; their times are read off the device's clock at the end.
"""

import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from d2plm.alphabet import MASK
from d2plm.bench.arms import ratio_row
from d2plm.bench.kernels import profile_steps
from d2plm.bench.measure import Row
from d2plm.bench.train import RECOMPILED_AFTER, compilations
from d2plm.bench.workload import Workload
from d2plm.data.loader import GlobalBatch, PackedLoader, Position
from d2plm.data.prefetch import prefetch
from d2plm.errors import BenchError
from d2plm.model.config import DiTConfig
from d2plm.model.flops import training_flops
from d2plm.noise import Key
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.precision import resolve_device, resolve_precision
from d2plm.training.forecast import Memory, memory_per_rank
from d2plm.training.metrics import GIB
from d2plm.training.parallelise import in_precision
from d2plm.training.plan import Plan
from d2plm.training.throughput import known_peak
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
    with tempfile.TemporaryDirectory(prefix="d2plm-bench-", dir=temporary_dir) as name:
        workload = Workload.of_fasta(
            proteins,
            Path(name, "store"),
            token_budget=tokens // micro_batches,
            max_length=max_length,
            model={**model, "max_position_embeddings": max_length},
        )
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
        rows.append(
            Row(
                f"recompilations after step {RECOMPILED_AFTER}, of {trainer.step} steps",
                compilations() - before,
                "",
                0,
                at_most=True,
            )
        )
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
        torch._dynamo.reset()
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
    unit = "tokens/s" if cuda else "tokens/CPU-s"
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    padding = 100 * (1 - tokens / steps / trainer.global_batch_tokens)
    rows = [
        Row(f"{steps} steady steps", tokens / took, unit),
        Row("a step", 1e3 * middle, "ms", spread=(1e3 * low, 1e3 * high)),
        Row("padding", padding, "%"),
        Row("model FLOP/s", flops / took / 1e12, "TFLOP/s"),
    ]
    peak = known_peak(trainer.device, trainer.dtype)
    if peak is not None:
        share = 100 * flops / took / 1e12 / peak
        rows.append(Row(f"MFU, of {peak:g} TFLOP/s (datasheet)", share, "%", 55))
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
            with _averaging(trainer, name != WITHOUT_EMA):
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
    goal = 1.005 if trainer.device.type == "cuda" else 1.02
    full = seconds[FULL]
    rows = [
        ratio_row(f"{ALREADY_THERE} ÷ real loader", seconds[ALREADY_THERE], full, 0.995),
        ratio_row("with EMA ÷ without", full, seconds[WITHOUT_EMA], goal, at_most=True),
    ]
    if COPIED_LATE in seconds:
        rows.append(ratio_row(f"{COPIED_LATE} ÷ prefetched", seconds[COPIED_LATE], full))
    return rows


@contextmanager
def _averaging(trainer: Trainer, wanted: bool) -> Iterator[None]:
    """Without it, what the moving average costs is what is not taken inside the block."""
    if wanted:
        yield
        return
    trainer.ema.update = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del trainer.ema.update  # the class's own again


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
            torch.cuda.set_sync_debug_mode("error")
            try:
                trainer.train_step(next(batches))
            except RuntimeError:
                place = traceback.format_exc(limit=-6)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    row = Row("forced synchronisations in a step", found / steps, "", 0, at_most=True)
    return row, place


def agreement_rows(
    proteins: Path,
    model: dict[str, Any],
    *,
    tokens: int,
    max_length: int,
    device: str,
    precision: str,
    temporary_dir: Path | None = None,
) -> list[Row]:
    """Whether the device computes what a CPU does in fp32: masks, loss and gradients of a batch.

    Args:
        model: settings of a `DiTConfig`, small.
    """
    place = torch.device(resolve_device(device))
    dtype = resolve_precision(precision, place)
    results = []
    with tempfile.TemporaryDirectory(prefix="d2plm-bench-", dir=temporary_dir) as name:
        workload = Workload.of_fasta(
            proteins,
            Path(name, "store"),
            token_budget=tokens,
            max_length=max_length,
            model={**model, "max_position_embeddings": max_length},
        )
        for where, precision_there in ((torch.device("cpu"), torch.float32), (place, dtype)):
            results.append(_loss_and_gradients(workload, where, precision_there))
    (masked, loss, gradients), (other_masked, other_loss, other_gradients) = results
    difference = sum(
        float((g - h).norm() ** 2) for g, h in zip(gradients, other_gradients, strict=True)
    )
    norm = sum(float(g.norm() ** 2) for g in gradients)
    precise = str(dtype).removeprefix("torch.")
    return [
        Row(
            f"masked otherwise on {place.type} than on cpu, of {tokens:,} tokens",
            float((masked != other_masked).sum()),
            "",
            0,
            at_most=True,
        ),
        Row(
            f"{place.type} {precise} against cpu fp32: loss",
            abs(other_loss - loss) / loss,
            "relative",
            2e-2,
            at_most=True,
        ),
        Row(
            f"{place.type} {precise} against cpu fp32: gradients",
            (difference / norm) ** 0.5,
            "relative",
            5e-2,
            at_most=True,
        ),
    ]


def _loss_and_gradients(
    workload: Workload, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, float, list[torch.Tensor]]:
    """Of the first batch: what is masked, the summed loss, and the gradients; on the CPU."""
    model, paradigm = workload.new_model().to(device).train(), AbsorbingDiffusion()
    batch = workload.batches(1)[0].to(device)
    corrupted = paradigm.corrupt(batch, Key(workload.seed))
    logits = in_precision(model, dtype)(
        corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times
    )
    loss, _ = paradigm.loss(logits, batch, corrupted)
    loss.backward()
    gradients = [p.grad.cpu().float() for p in model.parameters() if p.grad is not None]
    return (corrupted.tokens == MASK).cpu(), float(loss.detach()), gradients
