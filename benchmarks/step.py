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
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters

from benchmarks.measure import (
    PROTEINS,
    BenchError,
    Marks,
    Row,
    Timings,
    alternate,
    median_row,
    publish,
    rate_unit,
    ratio_row,
    require_same_losses,
    say,
    training_parser,
)
from benchmarks.workload import Workload, model_settings, workload_of
from d2plm.core.precision import resolve_device
from d2plm.data.loader import GlobalBatch, Position
from d2plm.data.prefetch import prefetch
from d2plm.model.flops import training_flops
from d2plm.training.forecast import memory_per_rank
from d2plm.training.metrics import GIB
from d2plm.training.throughput import known_peak
from d2plm.training.trainer import Trainer

FULL, WITHOUT_EMA = "default settings", "without EMA"
NOT_COMPILED, FP32 = "not compiled", "fp32"
RANDOM = "a step on random residues"
COPIED_LATE = "a step on batches copied when needed"
ALREADY_THERE = "a step on batches on the device already"
MFU_GOAL = 55  # % of the datasheet's peak, 450 M parameters on one H200
WARM_UP = 5  # steps, after which nothing may be compiled again
WATCHED = 3  # steps in which forced synchronisations are counted
SAME_LOSSES = 1e-4  # relative, of variants with the same arithmetic
LOW_PRECISION = 2e-2  # of bf16 against fp32: 8 bits of mantissa, averaged over a batch


def bench_step(given: argparse.Namespace) -> list[Row]:
    """Measure a step of AdamW with EMA, real proteins and the real loader.

    Raises:
        BenchError: a loss is not finite, or variants that compute the same have other losses.
    """
    place = torch.device(resolve_device(given.device))
    sizes = {"token_budget": given.token_budget, "max_length": given.max_length}
    with workload_of(PROTEINS, model_settings(given.model), **sizes) as workload:
        settings: dict[str, Any] = {"device": place.type, "precision": given.precision}
        settings |= {"compile": not given.no_compile, "global_batch_tokens": given.token_budget}
        main = Run.begin(FULL, workload, settings)
        runs = [main, *(_other_trainers(main, workload, settings) if given.turns else ())]
        before = compilations()
        say(f"{given.steady_steps} steps")
        rows = _steady(main, given.steady_steps)
        if given.turns:
            say(f"{given.turns} turns of {given.steps} steps of each variant")
            rows += _variants(runs, workload, given.turns, given.steps)
        if place.type == "cuda":
            say("forced synchronisations")
            rows.append(_synchronisations(main))
        compiled = compilations() - before
        rows.append(Row(f"recompilations after step {WARM_UP}", compiled, "", 0, at_most=True))
        trainer = main.trainer
        if not torch.isfinite(trainer.loss):
            raise BenchError(f"the loss of step {trainer.step} is {float(trainer.loss)}")
        if place.type == "cuda":  # the forecast compiles, and must follow all measurements
            forecast = memory_per_rank(
                trainer.model.config,
                trainer.plan,
                tokens=given.token_budget,
                segments=trainer.loader.sampler.max_segments,
                dtype=trainer.dtype,
                compile=trainer.compiled,
            )
            (peak,) = (GIB * row.value for row in rows if row.unit == "GiB")
            rows.append(Row("peak memory ÷ its forecast", peak / forecast.total, "×"))
    return rows


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

    def steps(self, number: int) -> Iterator[GlobalBatch]:
        """Train on further batches; returns each when its step has been launched."""
        for batch in islice(self.batches, number):
            self.trainer.train_step(batch)
            yield batch


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


def compilations() -> int:
    """Number of graphs that this process has compiled."""
    return int(counters["stats"]["unique_graphs"])


def _steady(run: Run, steps: int) -> list[Row]:
    """Rates and memory of consecutive steps; every batch counts by its true lengths."""
    trainer, device = run.trainer, run.trainer.process.device
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks, lengths = Marks(cuda), []
    marks.mark()
    for batch in run.steps(steps):
        lengths.append(batch.segment_lengths)
        marks.mark()
    seconds = marks.seconds()
    took, tokens = sum(seconds), sum(map(sum, lengths))
    flops = sum(training_flops(trainer.model.config, batch) for batch in lengths)
    padding = 100 * (1 - tokens / steps / trainer.global_batch_tokens)
    rows = [
        Row(f"{steps} steady steps", tokens / took, rate_unit(device)),
        median_row("a step", [1e3 * one for one in seconds], "ms"),
        Row("padding", padding, "%", 3, at_most=True),
        Row("model FLOP/s", flops / took / 1e12, "TFLOP/s"),
    ]
    peak = known_peak(device, trainer.dtype)
    if peak is not None:
        mfu = 100 * flops / took / 1e12 / peak
        rows.append(Row(f"MFU, of {peak:g} TFLOP/s (datasheet)", mfu, "%", MFU_GOAL))
    if cuda:
        rows.append(Row("peak memory", torch.cuda.max_memory_allocated() / GIB, "GiB"))
    return rows


def _variants(runs: list[Run], workload: Workload, turns: int, steps: int) -> list[Row]:
    """Times of a step with one thing changed; all variants get batches of the same lengths."""
    main, device = runs[0].trainer, runs[0].trainer.process.device
    cuda = device.type == "cuda"

    def stream(enabled: bool = True, synthetic: bool = False) -> Iterator[GlobalBatch]:
        loader = workload.loader(synthetic=True) if synthetic else main.loader
        return prefetch(loader.stream(Position()), device, enabled=enabled)

    def turn(trainer: Trainer, batches: Iterator[GlobalBatch], _: int) -> None:
        for batch in islice(batches, steps):
            trainer.train_step(batch)

    def turn_without_average(batches: Iterator[GlobalBatch], number: int) -> None:
        with patch.object(main.ema, "update", lambda: None):
            turn(main, batches, number)

    kept = list(islice(stream(), (turns + 1) * steps))
    works = {run.name: partial(turn, run.trainer, stream()) for run in runs}
    works[WITHOUT_EMA] = partial(turn_without_average, stream())
    if cuda:
        works[ALREADY_THERE] = partial(turn, main, iter(kept))
        works[COPIED_LATE] = partial(turn, main, stream(enabled=False))
    else:
        works[RANDOM] = partial(turn, main, stream(synthetic=True))
    seconds = alternate(works, turns, cuda=cuda)
    tokens = sum(sum(batch.segment_lengths) for batch in kept[steps:]) / turns
    unit, full, most = rate_unit(device), seconds[FULL], 1.005 if cuda else 1.02
    rows = [Row(name, tokens / median(times), unit) for name, times in seconds.items()]
    ema = seconds[WITHOUT_EMA]
    rows.append(ratio_row("a step with EMA ÷ without", full, ema, most, at_most=True))
    for name, times in seconds.items():
        if name not in (FULL, WITHOUT_EMA):
            least = 0.995 if name in (RANDOM, ALREADY_THERE) else None
            rows.append(ratio_row(f"{name} ÷ {FULL}", times, full, least))
    return rows


def _synchronisations(run: Run) -> Row:
    """How often a step that does not log waits for the device."""
    try:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in run.steps(WATCHED):
                pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = ["synchroniz" in str(warning.message) for warning in caught]
    return Row("forced synchronisations in a step", sum(found) / WATCHED, "", 0, at_most=True)


if __name__ == "__main__":
    smaller = {"token_budget": 4096, "max_length": 512, "turns": 20, "steps": 3}
    made = training_parser("step", __doc__, **smaller)
    made.add_argument("--model", default="2m", help="a file of configs/model")
    made.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    made.add_argument("--steady-steps", type=int, default=50, help="consecutive, for the rates")
    given = made.parse_args()
    torch.set_num_threads(given.threads or torch.get_num_threads())
    publish(given, bench_step(given))
