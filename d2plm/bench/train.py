"""How fast a training step is, what each part of it brings, and that it leaves nothing behind.

The arms are the trainer itself with one thing changed. All but those of other residues train on the
same batches and must have the same losses.
"""

import gc
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from d2plm.bench.arms import (
    Arm,
    Timings,
    Turns,
    per_second,
    ratio_row,
    require_same_losses,
    serve_arms,
    take_turns,
)
from d2plm.bench.measure import Row
from d2plm.bench.workload import TakeTurns, Workload
from d2plm.model.flops import training_flops
from d2plm.noise import Key
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.precision import resolve_device, resolve_precision
from d2plm.training.callbacks.base import Callback
from d2plm.training.callbacks.garbage_collection import GarbageCollection
from d2plm.training.callbacks.gradient_health import GradientHealth
from d2plm.training.callbacks.metrics import MetricLogger
from d2plm.training.throughput import known_peak
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
    """
    place = torch.device(resolve_device(device))
    low = resolve_precision(precision, place) in (torch.bfloat16, torch.float16)
    with tempfile.TemporaryDirectory(prefix="d2plm-bench-", dir=temporary_dir) as name:
        workload = Workload.of_fasta(
            proteins,
            Path(name, "store"),
            token_budget=token_budget,
            max_length=max_length,
            model={**model, "max_position_embeddings": max_length},
        )
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
            Arm(label, MODULE, "train", {**workload.arguments(), **settings, **change})
            for label, change in changes.items()
        ]
        timings = take_turns(
            arms, turns=turns, steps=steps, warm_up=RECOMPILED_AFTER, threads=threads, report=report
        )
        full = timings[FULL]
        require_same_losses([full, timings["without EMA"]], 0.0)
        for label, tolerance in (("not compiled", LOW_PRECISION if low else SAME_LOSSES),):
            if label in timings:
                require_same_losses([full, timings[label]], tolerance)
        if "fp32" in timings:
            require_same_losses([full, timings["fp32"]], LOW_PRECISION)
        rows = _rate_rows(workload, timings, turns * steps, steps, place)
        rows += _part_rows(timings, place)
        report("packed against one sequence at a time")
        rows += _exactness_rows(workload)
        if endurance_steps:
            report(f"{endurance_steps:,} steps of a small model")
            rows += _endurance_rows(workload, endurance_steps, compile)
    return rows, list(timings.values())


def _rate_rows(
    workload: Workload, timings: dict[str, Timings], total: int, steps: int, place: torch.device
) -> list[Row]:
    """Tokens a second, and with a known peak the MFU."""
    # Every batch counts, after those of the first turn, by its true lengths.
    batches = workload.batches(RECOMPILED_AFTER + total)[RECOMPILED_AFTER:]
    lengths = [batch.sequence_lengths() for batch in batches]
    tokens = sum(map(sum, lengths)) / total * steps
    unit = "tokens/s" if place.type == "cuda" else "tokens/CPU-s"
    rows = [Row(name, per_second(tokens, timing), unit) for name, timing in timings.items()]
    rows.append(
        Row("padding", 100 * (1 - tokens / steps / workload.token_budget), "%", 3, at_most=True)
    )
    config = workload.new_model().config
    flops = training_flops(config, list(itertools.chain.from_iterable(lengths))) / total * steps
    rate = per_second(flops, timings[FULL]) / 1e12
    rows.append(Row("model FLOP/s", rate, "TFLOP/s"))
    peak = known_peak(place, torch.bfloat16)
    if peak is not None:
        rows.append(Row(f"MFU, of {peak:g} TFLOP/s (datasheet)", 100 * rate / peak, "%", 55))
    return rows


def _part_rows(timings: dict[str, Timings], place: torch.device) -> list[Row]:
    full = timings[FULL].seconds
    ema_goal = 1.005 if place.type == "cuda" else 1.02
    compared = {
        "random residues ÷ real loader": ("random residues, no disk", 0.995, False),
        "with EMA ÷ without": ("without EMA", ema_goal, True),
    }
    rows = []
    for what, (label, goal, at_most) in compared.items():
        other = timings[label].seconds
        pair = (full, other) if at_most else (other, full)
        rows.append(ratio_row(what, *pair, goal, at_most=at_most))
    for label in ("not compiled", "fp32"):
        if label in timings:
            rows.append(ratio_row(f"{label} ÷ {FULL}", timings[label].seconds, full))
    rows.append(
        Row(
            f"recompilations after step {RECOMPILED_AFTER}",
            timings[FULL].counts["recompilations"],
            "",
            0,
            at_most=True,
        )
    )
    return rows


def _exactness_rows(workload: Workload) -> list[Row]:
    """The largest relative difference of loss and gradients, packed against one at a time."""
    model, paradigm = workload.new_model().train(), AbsorbingDiffusion()
    (batch,) = workload.batches(1)
    corrupted = paradigm.corrupt(batch, Key(workload.seed))
    bounds = batch.cu_seqlens.tolist()
    logits = model(corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times)
    nats = torch.nn.functional.nll_loss(
        paradigm.log_probabilities(logits), corrupted.targets, reduction="none"
    )
    packed = (nats * corrupted.weights).sum()
    packed.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = 0.0
    for segment, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if not batch.real()[segment]:
            continue
        own = model(
            corrupted.tokens[start:stop],
            torch.tensor([0, stop - start], dtype=torch.int32),
            stop - start,
            corrupted.times[segment : segment + 1],
        )
        nats = torch.nn.functional.nll_loss(
            paradigm.log_probabilities(own), corrupted.targets[start:stop], reduction="none"
        )
        loss = (nats * corrupted.weights[start:stop]).sum()
        loss.backward()
        alone += float(loss.detach())
    worst = max(
        float((p.grad - gradients[name]).norm() / gradients[name].norm().clamp(min=1e-30))
        for name, p in model.named_parameters()
        if p.grad is not None
    )
    return [
        Row(
            "packed against one at a time, fp32: loss",
            abs(float(packed.detach()) - alone) / abs(alone),
            "relative",
            1e-5,
            at_most=True,
        ),
        Row("packed against one at a time: gradients", worst, "relative", 1e-5, at_most=True),
    ]


def _endurance_rows(workload: Workload, steps: int, compile: bool) -> list[Row]:
    small = {**workload.arguments(), "token_budget": 1024, "max_length": 256}
    small["model"] = {**ENDURANCE, "max_position_embeddings": 256}
    arm = Arm("endurance", MODULE, "endure", {**small, "steps": steps, "compile": compile})
    timings = take_turns([arm], turns=1, steps=1)["endurance"]
    return [
        Row(
            f"growth of live objects, step {steps // 5} to {steps}",
            timings.counts["objects"],
            "",
            0,
            at_most=True,
        ),
        Row(
            f"recompilations after step {RECOMPILED_AFTER} of {steps}",
            timings.counts["recompilations"],
            "",
            0,
            at_most=True,
        ),
    ]


class WithoutEMA(Trainer):
    """What the moving average costs is what this one does not take."""

    def build_ema(self, decay: float) -> None:
        super().build_ema(decay)
        self.ema.update = lambda: None  # type: ignore[method-assign]


class CountCompilations(Callback):
    """How often the compiler has run since `RECOMPILED_AFTER` steps."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.before = turns, 0

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == RECOMPILED_AFTER:
            self.before = compilations()
        elif trainer.step > RECOMPILED_AFTER:
            self.turns.counts["recompilations"] = compilations() - self.before


class CountObjects(Callback):
    """How many objects there are more at the last step than at a fifth of the way."""

    def __init__(self, turns: Turns, steps: int) -> None:
        self.turns, self.steps, self.before = turns, steps, 0

    def on_step_end(self, trainer: Trainer) -> None:
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
    turns: Turns, *, average: bool = True, synthetic: bool = False, **given: Any
) -> None:
    settings = {key: given.pop(key) for key in ("device", "precision", "compile")}
    kind = Trainer if average else WithoutEMA
    counting = (CountCompilations(turns), TakeTurns(turns))
    callbacks = (GradientHealth(), GarbageCollection(), MetricLogger(), *counting)
    trainer = Workload(**given).trainer(kind, synthetic=synthetic, callbacks=callbacks, **settings)
    trainer.train()


def _work_endure(turns: Turns, *, steps: int, compile: bool, **workload: Any) -> None:
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
