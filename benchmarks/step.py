"""A training step on one device, as a whole and with one thing changed at a time.

Variants that differ in a switch share one trainer, because a GPU has no room for several large
models; on a CPU, further trainers run uncompiled and in fp32. All variants get the same batches and
take turns. Nothing waits for the device between turns; their times are read off its clock at the
end.

    python -m benchmarks.step --model 2m --threads 1
    python -m benchmarks.step --model nano --token-budget 8192 --threads 1 --turns 0
    python -m benchmarks.step --model 450m --token-budget 65536 --max-length 1024
"""

import argparse
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.measure import (
    BenchError,
    Marks,
    Row,
    Timings,
    alternate,
    parser,
    publish,
    rate_unit,
    ratio_row,
    require_same_losses,
    say,
    training_arguments,
)
from benchmarks.scale_out import TYPICAL_TOKENS
from benchmarks.workload import Workload, model_settings, workload_of
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.core.spans import span
from d2plm.data.loader import GlobalBatch, PackedLoader, Position
from d2plm.data.packing import bin_capacity
from d2plm.data.prefetch import prefetch
from d2plm.model.dit_config import DiTConfig
from d2plm.model.flops import training_flops
from d2plm.training.forecast import Memory, memory_per_rank
from d2plm.training.metrics import GIB
from d2plm.training.plan import Plan
from d2plm.training.throughput import known_peak
from d2plm.training.trainer import Trainer

FULL = "default settings"
WITHOUT_EMA = "without EMA"
RANDOM = "random residues, no disk"
COPIED_LATE = "copied when needed"
ALREADY_THERE = "batches on the device already"
NOT_COMPILED, FP32 = "not compiled", "fp32"
MFU_GOAL = 55  # % of the datasheet's peak, 450 M parameters on one H200
SHARE_OF_MEMORY = 0.92  # of a GPU's that a forecast may take; the rest is the framework's
WARM_UP = 5  # steps, after which nothing may be compiled again
SAME_LOSSES = 1e-4  # relative, of variants with the same arithmetic
LOW_PRECISION = 2e-2  # of bf16 against fp32: 8 bits of mantissa, averaged over a batch
# Of a step on a CPU: beginnings of the names of operators and spans; the first part that fits.
PARTS = {
    "attention": ("d2plm::packed_attention",),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "sums over segments": ("d2plm::sum_segments",),
    "optimizer, clipping, EMA": ("optimizer", "ema", "aten::_foreach", "aten::linalg_"),
    "loader": ("load",),
    "elementwise and other operators": ("aten::", "Torch-Compiled", "CompiledFunction", "## Call"),
}


def bench_step(given: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Measure a step of AdamW with EMA, real proteins and the real loader.

    Returns:
        The table, and further results: step times, memory, forced synchronisations, kernels.

    Raises:
        BenchError: a loss is not finite, or variants that compute the same have other losses.
    """
    place = torch.device(resolve_device(given.device))
    model, tokens = model_settings(given.model), given.token_budget
    count = given.micro_batches or micro_batches_that_fit(
        DiTConfig(**model), tokens, given.max_length, given.precision
    )
    sizes = {"token_budget": tokens // count, "max_length": given.max_length}
    with workload_of(given.proteins, model, **sizes) as workload:
        settings: dict[str, Any] = {"device": place.type, "precision": given.precision}
        settings |= {"compile": not given.no_compile, "global_batch_tokens": tokens}
        main = Run.begin(FULL, workload, settings)
        runs = [main, *(_other_trainers(main, workload, settings) if given.turns else ())]
        before = compilations()
        say(f"{given.steady_steps} steps")
        rows, facts = _steady(main.trainer, main.batches, given.steady_steps)
        if given.turns:
            say(f"{given.turns} turns of {given.steps} steps of each variant")
            rows += _variants(runs, workload, given.turns, given.steps)
        if place.type == "cuda":
            say("forced synchronisations")
            row, facts["synchronisations"] = _synchronisations(main.trainer, main.batches)
            rows.append(row)
        compiled = compilations() - before
        rows.append(Row(f"recompilations after step {WARM_UP}", compiled, "", 0, at_most=True))
        trainer = main.trainer
        if not torch.isfinite(trainer.loss):
            raise BenchError(f"the loss of step {trainer.step} is {float(trainer.loss)}")
        facts |= {"loss": float(trainer.loss), "compiled": trainer.compiled}
        if given.profiled_steps:
            say(f"profile of {given.profiled_steps} steps")
            if place.type == "cuda":
                facts["kernels"] = _kernels(trainer, main.batches, given.profiled_steps)
            else:
                rows += profile_rows(trainer, main.batches, given.profiled_steps)
        forecast = _forecast(trainer)
        facts["memory_forecast"] = {"total": forecast.total, **vars(forecast)}
        if "memory" in facts:
            ratio = facts["memory"]["allocated"] / forecast.total
            rows.append(Row("peak memory ÷ its forecast", ratio, "×"))
    return rows, {"tokens": tokens, "micro_batches": count, **facts}


@dataclass
class Run:
    """A trainer that has warmed up, its batches, and the losses of its first steps."""

    name: str
    trainer: Trainer
    batches: Iterator[GlobalBatch]
    losses: list[float]

    @classmethod
    def begin(cls, name: str, workload: Workload, settings: dict[str, Any]) -> "Run":
        """Build a trainer and do its first steps."""
        say(f"{name}: compiling and warming up")
        trainer = workload.trainer(**settings)
        batches = prefetch(trainer.loader.stream(Position()), trainer.process.device)
        losses = []
        for batch in islice(batches, WARM_UP):
            trainer.train_step(batch)
            losses.append(float(trainer.loss))
        return cls(name, trainer, batches, losses)


def _other_trainers(main: Run, workload: Workload, settings: dict[str, Any]) -> list[Run]:
    """On a CPU: the same training uncompiled, and in fp32; both must have the same losses."""
    if main.trainer.process.device.type != "cpu":
        return []
    changes: dict[str, dict[str, Any]] = {}
    low = main.trainer.dtype != torch.float32
    if main.trainer.compiled:
        changes[NOT_COMPILED] = {"compile": False}
    if low:
        changes[FP32] = {"precision": "fp32"}
    runs = [Run.begin(name, workload, {**settings, **change}) for name, change in changes.items()]
    both = [Timings(run.name, losses=run.losses) for run in (main, *runs)]
    require_same_losses(both, LOW_PRECISION if low else SAME_LOSSES)
    return runs


def micro_batches_that_fit(config: DiTConfig, tokens: int, max_length: int, precision: str) -> int:
    """The fewest micro-batches, a power of two, in which a compiled step fits on the GPU.

    Resets the compiler: the sizes tried here must not make it assume variable shapes in training.

    Raises:
        BenchError: if not even a sixty-fourth of the step fits.
    """
    available = torch.cuda.get_device_properties(0).total_memory
    segments = bin_capacity(tokens, TYPICAL_TOKENS, max_length)[1]
    for count in (1, 2, 4, 8, 16, 32, 64):
        taken = memory_per_rank(
            config,
            Plan().resolved(1),
            tokens=tokens // count,
            segments=segments // count,
            dtype=resolve_precision(precision, torch.device("cuda")),
            compile=True,
        )
        torch.compiler.reset()
        if taken.total <= SHARE_OF_MEMORY * available:
            return count
    raise BenchError(
        f"a step of {tokens:,} tokens takes {taken.total / GIB:.1f} GiB in 64 micro-batches, and "
        f"the device has {available / GIB:.1f}: choose a smaller model"
    )


def compilations() -> int:
    """Number of graphs that this process has compiled."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _steady(
    trainer: Trainer, batches: Iterator[GlobalBatch], steps: int
) -> tuple[list[Row], dict[str, Any]]:
    """Rates and memory of consecutive steps; every batch counts by its true lengths."""
    device, lengths = trainer.process.device, []
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks, wall = Marks(cuda), time.perf_counter()
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
        Row(f"{steps} steady steps", tokens / took, rate_unit(device)),
        Row("a step", 1e3 * middle, "ms", spread=(1e3 * low, 1e3 * high)),
        Row("padding", padding, "%", 3, at_most=True),
        Row("model FLOP/s", flops / took / 1e12, "TFLOP/s"),
    ]
    peak = known_peak(device, trainer.dtype)
    if peak is not None:
        mfu = 100 * flops / took / 1e12 / peak
        rows.append(Row(f"MFU, of {peak:g} TFLOP/s (datasheet)", mfu, "%", MFU_GOAL))
    facts: dict[str, Any] = {"step_seconds": seconds, "wall_seconds": wall}
    facts["flops_per_token"] = flops / tokens
    if cuda:
        facts["memory"] = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        rows.append(Row("peak memory", facts["memory"]["allocated"] / GIB, "GiB"))
    return rows, facts


def _forecast(trainer: Trainer) -> Memory:
    """The forecast of the trainer's memory; it compiles, and must follow all measurements."""
    loader: PackedLoader = trainer.loader
    return memory_per_rank(
        trainer.model.config,
        trainer.plan,
        tokens=loader.bins_per_micro_batch * loader.sampler.token_budget,
        segments=loader.bins_per_micro_batch * loader.sampler.max_segments,
        dtype=trainer.dtype,
        compile=trainer.compiled,
    )


def _variants(runs: list[Run], workload: Workload, turns: int, steps: int) -> list[Row]:
    """Times of a step with one thing changed; all variants get batches of the same lengths."""
    main, device = runs[0].trainer, runs[0].trainer.process.device

    def stream(enabled: bool = True, synthetic: bool = False) -> Iterator[GlobalBatch]:
        loader = workload.loader(synthetic=True) if synthetic else main.loader
        return prefetch(loader.stream(Position()), device, enabled=enabled)

    kept = list(islice(stream(), (turns + 1) * steps))
    streams = {FULL: stream(), WITHOUT_EMA: stream()}
    if device.type == "cuda":
        streams |= {ALREADY_THERE: iter(kept), COPIED_LATE: stream(enabled=False)}
    else:
        streams |= {RANDOM: stream(synthetic=True)} | {run.name: stream() for run in runs[1:]}
    trainers = {run.name: run.trainer for run in runs}

    def turn_of(name: str) -> Callable[[int], None]:
        trainer = trainers.get(name, main)

        def turn(_: int) -> None:
            with without_average(trainer) if name == WITHOUT_EMA else nullcontext():
                for batch in islice(streams[name], steps):
                    trainer.train_step(batch)

        return turn

    works = {name: turn_of(name) for name in streams}
    seconds = alternate(works, turns, cuda=device.type == "cuda")
    tokens = sum(sum(batch.segment_lengths) for batch in kept[steps:]) / turns
    unit = rate_unit(device)
    rows = [Row(name, tokens / median(times), unit) for name, times in seconds.items()]
    compared = {RANDOM: "a step on random residues ÷ from the real loader"}
    compared |= {ALREADY_THERE: f"a step on {ALREADY_THERE} ÷ from the real loader"}
    compared |= {COPIED_LATE: f"a step on batches {COPIED_LATE} ÷ prefetched"}
    full = seconds[FULL]
    for name, times in seconds.items():
        if name == WITHOUT_EMA:
            most = 1.005 if device.type == "cuda" else 1.02
            rows.append(ratio_row("a step with EMA ÷ without", full, times, most, at_most=True))
        elif name != FULL:
            least = 0.995 if name in (RANDOM, ALREADY_THERE) else None
            rows.append(ratio_row(compared.get(name, f"{name} ÷ {FULL}"), times, full, least))
    return rows


@contextmanager
def without_average(trainer: Trainer) -> Iterator[None]:
    """No moving average is kept inside the block."""
    trainer.ema.update = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del trainer.ema.update  # the class's own again


def _synchronisations(
    trainer: Trainer, batches: Iterator[GlobalBatch], steps: int = 3
) -> tuple[Row, str | None]:
    """How often a step that does not log waits for the device, and where it first does."""
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


def _kernels(trainer: Trainer, batches: Iterator[GlobalBatch], steps: int) -> list[dict[str, Any]]:
    """The kernels with the largest fractions of GPU time."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for batch in islice(batches, steps):
            trainer.train_step(batch)
        torch.cuda.synchronize()
    kernels = [
        event
        for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    total = max(sum(event.self_device_time_total for event in kernels), 1e-9)
    kernels.sort(key=lambda event: -event.self_device_time_total)
    return [
        {
            "name": event.key[:160],
            "fraction": event.self_device_time_total / total,
            "calls": event.count,
        }
        for event in kernels[:25]
    ]


def profile_rows(trainer: Trainer, batches: Iterator[GlobalBatch], steps: int) -> list[Row]:
    """Percentages of a step on a CPU, with the operators that each part calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        for _ in range(steps):
            with span("load"):
                batch = next(batches)
            trainer.train_step(batch)
        microseconds = 1e6 * (time.perf_counter() - began)
    spent = dict.fromkeys(PARTS, 0.0)
    for event in profiler.events():
        names, caller = [], event
        while caller is not None:
            names.append(caller.name)
            caller = caller.cpu_parent
        for part, starts in PARTS.items():
            if any(name.startswith(starts) for name in names):
                spent[part] += event.self_cpu_time_total
                break
    spent["the rest, Python"] = microseconds - sum(spent.values())
    return [Row(f"profile: {part}", 100 * took / microseconds, "%") for part, took in spent.items()]


def main() -> None:
    """The command line."""
    made = parser("step", __doc__)
    training_arguments(made)
    made.set_defaults(token_budget=4096, max_length=512, turns=20, steps=3)
    made.add_argument("--model", default="2m", help="a file of configs/model")
    made.add_argument(
        "--micro-batches", type=int, default=1, help="of a step; 0: as few as fit, by the forecast"
    )
    made.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    made.add_argument("--steady-steps", type=int, default=50, help="consecutive, for the rates")
    made.add_argument("--profiled-steps", type=int, default=3, help="for the profile")
    given = made.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    publish(given, *bench_step(given))


if __name__ == "__main__":
    main()
