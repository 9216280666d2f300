"""How fast a training step is, what each part of it brings, and that it leaves nothing behind.

The arms are the trainer itself with one thing changed. All but those of other residues train on the
same batches and must have the same losses.
"""

import gc
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from d2plm.bench.agreement import packed_rows
from d2plm.bench.arms import (
    Arm,
    Timings,
    Turns,
    require_same_losses,
    serve_arms,
    take_turns,
)
from d2plm.bench.rows import Row, ema_row, flops_rows, rate_unit, ratio_row, recompilation_row
from d2plm.bench.workload import TakeTurns, Workload, without_average, workload_of
from d2plm.core.errors import require_number
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.model.flops import training_flops
from d2plm.training.callbacks.base import Callback
from d2plm.training.callbacks.garbage_collection import GarbageCollection
from d2plm.training.callbacks.gradient_health import GradientHealth
from d2plm.training.callbacks.metrics import MetricLogger
from d2plm.training.trainer import Trainer

MODULE = "d2plm.bench.train"
FULL = "as it trains"
SAME_LOSSES = 1e-4  # relative, of arms with the same arithmetic
LOW_PRECISION = 2e-2  # of bf16 against fp32: 8 bits of mantissa, averaged over a batch
RECOMPILED_AFTER = 5  # steps
ENDURANCE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ENDURANCE |= {"intermediate_size": 64, "time_embedding_dim": 16}


def bench_train(
    proteins: Path,
    model: dict[str, Any],
    *,
    token_budget: int = 4096,
    max_length: int = 512,
    device: str = "auto",
    precision: str = "auto",
    compile: bool = True,
    turns: int = 20,
    steps: int = 3,
    threads: int | None = None,
    endurance_steps: int = 1000,
    temporary_dir: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], list[Timings]]:
    """Measure the step with and without each of its parts.

    Args:
        proteins: FASTA of real proteins.
        model: settings of a `DiTConfig`.
        token_budget: tokens of a step.
        compile: whether the arms but one are compiled.
        turns, steps: of each arm, and steps of a turn.
        threads: of each arm; None takes what training takes.
        endurance_steps: of a small model, over which nothing may grow; 0 leaves them out.
        report: called with one line per stage.

    Raises:
        BenchError: an arm fails, or the arms' losses differ.
        ConfigError: `endurance_steps` is too small to say anything.
    """
    if endurance_steps:
        require_number("endurance_steps", endurance_steps, integer=True, low=5 * RECOMPILED_AFTER)
    place = torch.device(resolve_device(device))
    dtype = resolve_precision(precision, place)
    low = dtype in (torch.bfloat16, torch.float16)
    sizes = {"token_budget": token_budget, "max_length": max_length}
    with workload_of(proteins, model, **sizes, temporary_dir=temporary_dir) as workload:
        settings = {"device": device, "precision": precision, "compile": compile}
        changes: dict[str, dict[str, Any]] = {
            FULL: {},
            "random residues, no disk": {"synthetic": True},
            "without EMA": {"average": False},
        }
        if compile:
            changes["not compiled"] = {"compile": False}
        if low and place.type == "cpu":
            changes["fp32"] = {"precision": "fp32"}
        arms = [
            Arm(label, MODULE, "train", {"workload": workload.arguments(), **settings, **change})
            for label, change in changes.items()
        ]
        timings = take_turns(
            arms, turns=turns, steps=steps, warm_up=RECOMPILED_AFTER, threads=threads, report=report
        )
        rounding = LOW_PRECISION if low else SAME_LOSSES
        tolerances = {
            # Gradients of attention on CUDA are summed in no fixed order.
            "without EMA": 0.0 if place.type == "cpu" else rounding,
            "not compiled": rounding,
            "fp32": LOW_PRECISION,
        }
        for label, tolerance in tolerances.items():
            if label in timings:
                require_same_losses([timings[FULL], timings[label]], tolerance)
        rows = _rate_rows(workload, timings, turns * steps, steps, place, dtype)
        rows += _part_rows(timings, place)
        report("packed against one sequence at a time")
        rows += packed_rows(workload)
        if endurance_steps:
            report(f"{endurance_steps:,} steps of a small model")
            rows += _endurance_rows(workload, endurance_steps, compile)
    return rows, list(timings.values())


def _rate_rows(
    workload: Workload,
    timings: dict[str, Timings],
    total: int,
    steps: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Row]:
    """Tokens a second, and with a known peak the MFU."""
    # Every batch counts, after those of the first turn, by its true lengths.
    batches = workload.batches(RECOMPILED_AFTER + total)[RECOMPILED_AFTER:]
    lengths = [batch.sequence_lengths() for batch in batches]
    tokens = sum(map(sum, lengths)) / total * steps
    unit = rate_unit(device)
    rows = [Row(name, timing.per_second(tokens), unit) for name, timing in timings.items()]
    rows.append(
        Row("padding", 100 * (1 - tokens / steps / workload.token_budget), "%", 3, at_most=True)
    )
    config = workload.new_model().config
    flops = training_flops(config, list(itertools.chain.from_iterable(lengths))) / total * steps
    return rows + flops_rows(flops, median(timings[FULL].seconds), device, dtype)


def _part_rows(timings: dict[str, Timings], device: torch.device) -> list[Row]:
    full, seconds = timings[FULL].seconds, {name: t.seconds for name, t in timings.items()}
    synthetic = seconds["random residues, no disk"]
    rows = [
        ratio_row("a step on random residues ÷ from the real loader", synthetic, full, 0.995),
        ema_row(full, seconds["without EMA"], device),
    ]
    for label in ("not compiled", "fp32"):
        if label in seconds:
            rows.append(ratio_row(f"{label} ÷ {FULL}", seconds[label], full))
    count = timings[FULL].counts["recompilations"]
    return [*rows, recompilation_row(count, f"after step {RECOMPILED_AFTER}")]


def _endurance_rows(workload: Workload, steps: int, compile: bool) -> list[Row]:
    small = {**workload.arguments(), "token_budget": 1024, "max_length": 256}
    small["model"] = {**ENDURANCE, "max_position_embeddings": 256}
    settings = {"workload": small, "steps": steps, "compile": compile}
    arm = Arm("endurance", MODULE, "endure", settings)
    counts = take_turns([arm], turns=1, steps=1)["endurance"].counts
    growth = f"growth of live objects, step {steps // 5} to {steps}"
    return [
        Row(growth, counts["objects"], "", 0, at_most=True),
        recompilation_row(counts["recompilations"], f"after step {RECOMPILED_AFTER} of {steps}"),
    ]


class CountCompilations(Callback):
    """How often the compiler has run since `RECOMPILED_AFTER` steps."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.before = turns, 0

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.step == RECOMPILED_AFTER:
            self.before = compilations()
        elif trainer.step > RECOMPILED_AFTER:
            self.turns.counts["recompilations"] = compilations() - self.before


class CountObjects(Callback):
    """How many objects there are more at the last step than at a fifth of the way."""

    def __init__(self, turns: Turns, steps: int) -> None:
        self.turns, self.steps, self.before = turns, steps, 0

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.step in (self.steps // 5, self.steps):
            gc.collect()
            found = len(gc.get_objects())
            self.turns.counts["objects"] = found - self.before
            self.before = found


def compilations() -> int:
    """How many graphs this process has compiled."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _work_train(
    turns: Turns,
    *,
    workload: dict[str, Any],
    average: bool = True,
    synthetic: bool = False,
    **settings: Any,
) -> None:
    counting = (CountCompilations(turns), TakeTurns(turns))
    callbacks = (GradientHealth(), GarbageCollection(), MetricLogger(), *counting)
    trainer = Workload(**workload).trainer(synthetic=synthetic, callbacks=callbacks, **settings)
    with nullcontext() if average else without_average(trainer):
        trainer.train()


def _work_endure(turns: Turns, *, workload: dict[str, Any], steps: int, compile: bool) -> None:
    counting = (CountCompilations(turns), CountObjects(turns, steps))
    callbacks = (GradientHealth(), GarbageCollection(), MetricLogger(), *counting)
    trainer = Workload(**workload).trainer(
        device="cpu", precision="fp32", compile=compile, max_steps=steps, callbacks=callbacks
    )
    turns.begin()
    trainer.train()
    turns(trainer.loss)
    turns(trainer.loss)


if __name__ == "__main__":
    serve_arms({"train": _work_train, "endure": _work_endure})
