"""Measuring work: processes, turns, rows with goals, and the table of them.

A machine's speed drifts by tens of percent within minutes, so figures taken one after another are
not comparable. Arms, several ways to do the same work, therefore run side by side in processes of
their own and take turns of a few steps; a comparison reports the median of the ratios of
neighbouring turns, with quartiles. Times are CPU seconds of the process, which other processes
hardly affect, or seconds of the GPU's clock. No ratio is reported unless the arms' losses agree.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from d2plm.core.errors import D2PLMError
from d2plm.core.files import config_dir, write_text
from d2plm.core.machine import configure_threads, machine
from d2plm.core.table import Table

if TYPE_CHECKING:
    import torch

PROTEINS = config_dir().parent / "examples" / "data" / "uniprot_20k.fasta.gz"
SPAWN = multiprocessing.get_context("spawn")


class BenchError(D2PLMError):
    """The arms of a benchmark did not do the same work, or one of them failed."""


# --- rows --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table.

    Attributes:
        what: the quantity and its conditions.
        value, unit: the result.
        goal: the least (or, with `at_most`, the largest) value wanted; None if there is none.
        spread: quartiles, if the value is a median.
    """

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_most: bool = False
    spread: tuple[float, float] | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def ratio_row(
    what: str,
    numerator: Sequence[float],
    denominator: Sequence[float],
    goal: float | None = None,
    *,
    at_most: bool = False,
) -> Row:
    """Median ratio of two arms' times, measured in alternation."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive") if ratios[1:] else 3 * ratios
    return Row(f"time of {what}", middle, "×", goal, at_most, (low, high))


def rate_unit(device: "torch.device") -> str:
    """Unit of a rate in tokens: by the GPU's clock or by the CPU time of the process."""
    return "tokens/s" if device.type == "cuda" else "tokens/CPU-s"


def table(states: Mapping[str, Sequence[Row]]) -> str:
    """Aligned text: the rows of each state of the machine in a column and, of several, their range.

    The worse end of the range is what may be claimed, and is compared with the goal.
    """
    cells = [("", *states, *(["range"] if states.keys() - {""} else ()), "goal", "")]
    for same in zip(*states.values(), strict=True):
        low, high = (end(same, key=lambda row: row.value) for end in (min, max))
        values = [
            _number(row.value)
            + (f" ({' – '.join(map(_number, row.spread))})" if row.spread else "")
            for row in same
        ]
        if states.keys() - {""}:
            values.append(f"{_number(low.value)} – {_number(high.value)}")
        values[-1] = f"{values[-1]} {low.unit}".rstrip()
        cells.append((low.what, *values, *_goal(high if low.at_most else low)))
    return Table(cells[0], cells[1:]).text()


def _goal(row: Row) -> tuple[str, str]:
    goal = "" if row.goal is None else f"{'≤' if row.at_most else '≥'} {_number(row.goal)}"
    return goal, {None: "", True: "met", False: "missed"}[row.met]


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 0.9 else f"{value:.4g}"


# --- scripts -----------------------------------------------------------------------------------


def parser(script: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that every benchmark takes."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{script}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--proteins", type=Path, default=PROTEINS, help="FASTA of real proteins")
    made.add_argument("--output", type=Path, help="JSON file of rows, settings and machine")
    return made


def training_arguments(made: argparse.ArgumentParser) -> None:
    """Add the arguments of benchmarks that measure on batches of a training step."""
    made.add_argument("--token-budget", type=int, default=8192, help="tokens of a step")
    made.add_argument("--max-length", type=int, default=1024, help="tokens of a sequence")
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    made.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    made.add_argument("--turns", type=int, default=12, help="of each arm")
    made.add_argument("--steps", type=int, default=1, help="of a turn")
    made.add_argument("--threads", type=int, help="of the CPU; default: as training uses")


def publish(
    arguments: argparse.Namespace,
    rows: Sequence[Row] | Mapping[str, Sequence[Row]],
    details: Any = None,
) -> None:
    """Print the table; write rows, settings and machine to `--output` if it is given.

    Args:
        rows: of the benchmark, or of each state of the machine in which it ran.
    """
    states = rows if isinstance(rows, Mapping) else {"": rows}
    print(f"\n{table(states)}")
    if arguments.output is not None:
        content = {
            "machine": machine(),
            "settings": vars(arguments),
            "rows": [
                {**asdict(row), "met": row.met, **({"state": state} if state else {})}
                for state, some in states.items()
                for row in some
            ],
            "details": details,
        }
        write_text(arguments.output, json.dumps(content, indent=1, default=str) + "\n")
        print(f"wrote {arguments.output}")


def say(line: str) -> None:
    """Report progress on standard error."""
    print(line, file=sys.stderr, flush=True)


# --- work in a process of its own --------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A result and its cost.

    Attributes:
        result: returned by the work.
        cpu_seconds: of the process, without its children.
        peak_bytes: peak memory of the process.
    """

    result: Any
    cpu_seconds: float
    peak_bytes: int


def in_new_process(work: Callable[..., Any], **arguments: Any) -> Measured:
    """Run an importable function in a fresh process, whose peak memory is its own.

    Raises:
        BenchError: if the process is killed.
    """
    with ProcessPoolExecutor(1, SPAWN) as alone:
        try:
            return alone.submit(_measure, work, arguments).result()
        except BrokenProcessPool:
            raise BenchError(f"{work.__name__} was killed") from None


def _measure(work: Callable[..., Any], arguments: dict[str, Any]) -> Measured:
    cpu = time.process_time()
    result = work(**arguments)
    return Measured(result, time.process_time() - cpu, peak_bytes())


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    # ru_maxrss would include the memory of the parent at the moment of the fork.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


@contextmanager
def busy_core() -> Iterator[None]:
    """Have a loop keep one core busy inside the block: the first that this process may use.

    The loop also ends when this process is killed.
    """
    process = SPAWN.Process(target=_loop, args=(os.getpid(),))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _loop(parent: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while os.getppid() == parent:
        pass


# --- arms --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to do the work.

    Attributes:
        name: in tables.
        work: importable function that prepares, calls `Turns.begin`, and then the turns themselves
            at the end of each step.
        arguments: keyword arguments of `work`, beside the turns.
    """

    name: str
    work: Callable[..., None]
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Timings:
    """Times of an arm, one number for each turn after the warm-up.

    Attributes:
        cpu: CPU seconds of its process.
        cuda: seconds of the GPU's clock; empty without a GPU.
        wall: seconds that passed.
        losses: of every step, including the warm-up.
    """

    name: str
    cpu: list[float] = field(default_factory=list)
    cuda: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Of each turn, by the GPU's clock if there is a GPU, else CPU seconds."""
        return self.cuda or self.cpu

    def per_second(self, amount: float) -> float:
        """Median rate, if each turn processes `amount`."""
        return amount / median(self.seconds)


def take_turns(
    arms: Sequence[Arm],
    *,
    turns: int,
    steps: int = 1,
    warm_up: int = 1,
    threads: int | None = None,
    pinned: bool = False,
) -> dict[str, Timings]:
    """Run all arms side by side, `steps` steps of one and then of the next, `turns` times.

    Args:
        warm_up: steps of each arm before measuring.
        threads: of each arm; None leaves the choice to the arm.
        pinned: whether all arms share one CPU, on which a single thread is disturbed least.

    Raises:
        BenchError: if an arm fails; its traceback is on standard error.
    """
    timings = {arm.name: Timings(arm.name) for arm in arms}
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    with patch.dict(os.environ, chosen), ExitStack() as stack:
        configure_threads()  # inherited by the arms, the peers' too
        processes = {}
        for arm in arms:  # one after another: their first steps need most memory
            say(f"{arm.name}: warming up")
            process = processes[arm.name] = stack.enter_context(_Process(arm, pinned))
            timings[arm.name].losses += process.ask(warm_up)["losses"]
        for turn in range(turns):
            first = turn % len(arms)  # each arm is first equally often
            for arm in (*arms[first:], *arms[:first]):
                took = processes[arm.name].ask(steps)
                timings[arm.name].cpu.append(took["cpu"])
                timings[arm.name].wall.append(took["wall"])
                timings[arm.name].losses += took["losses"]
                if took["cuda"] is not None:
                    timings[arm.name].cuda.append(took["cuda"])
            last = (f"{arm.name} {timings[arm.name].seconds[-1]:.3g} s" for arm in arms)
            say(f"turn {turn + 1} of {turns}: {', '.join(last)}")
    return timings


def require_same_losses(timings: Sequence[Timings], tolerance: float) -> float:
    """The largest relative difference between the arms' losses, step by step.

    Raises:
        BenchError: if it exceeds `tolerance` or the numbers of steps differ: the arms did not do
            the same work, and their times are not comparable.
    """
    first, *others = timings
    largest = 0.0
    for other in others:
        if len(other.losses) != len(first.losses):
            raise BenchError(
                f"{first.name} and {other.name} took {len(first.losses)} and {len(other.losses)} "
                "steps: no ratio is reported"
            )
        for step, (a, b) in enumerate(zip(first.losses, other.losses, strict=True), 1):
            difference = abs(a - b) / max(abs(a), 1e-12)
            if not difference <= tolerance:
                raise BenchError(
                    f"{first.name} and {other.name} did not do the same work: losses {a:.6f} and "
                    f"{b:.6f} at step {step} (allowed difference: {tolerance:g}); no ratio is "
                    "reported"
                )
            largest = max(largest, difference)
    return largest


class _Process:
    """An arm's process, which waits between its turns."""

    def __init__(self, arm: Arm, pinned: bool) -> None:
        self.name = arm.name
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(theirs, arm.work, arm.arguments, pinned))
        self.process.start()
        theirs.close()

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def ask(self, steps: int) -> dict[str, Any]:
        """Have it do `steps` steps; returns times and losses."""
        try:
            self.pipe.send(steps)
            answer: dict[str, Any] = self.pipe.recv()
        except (BrokenPipeError, ConnectionResetError, EOFError):
            self.process.join()
            raise BenchError(
                f"the arm {self.name} failed (exit code {self.process.exitcode}), see above"
            ) from None
        return answer


def _serve(
    pipe: Connection, work: Callable[..., None], arguments: dict[str, Any], pinned: bool
) -> None:
    os.dup2(2, 1)  # trainers print, and standard output is for the table
    if pinned and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    try:
        work(Turns(pipe), **arguments)
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None


class Turns:
    """The arm's side: called at the end of each step, it waits when a turn is over."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._losses: list[Any] = []

    def begin(self) -> None:
        """Wait for the first turn; nothing before it is timed."""
        import torch

        self._left: int = self._pipe.recv()
        # There may be a GPU that this arm does not use.
        self._on_gpu = Marks(cuda=torch.cuda.is_initialized())
        self._on_gpu.mark()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def __call__(self, loss: Any) -> None:
        """End a step; `loss` is a number or a 0-d tensor, read at the end of the turn."""
        self._losses.append(loss)
        self._left -= 1
        if self._left:
            return
        self._on_gpu.mark()
        (seconds,) = self._on_gpu.seconds()
        took = {
            "cpu": time.process_time() - self._cpu,
            "wall": time.perf_counter() - self._wall,
            "cuda": seconds if self._on_gpu.cuda else None,
        }
        self._pipe.send(took | {"losses": [float(loss) for loss in self._losses]})
        self._losses.clear()
        self.begin()


class Marks:
    """Moments on the GPU's clock, without waiting for it; or, without `cuda`, of CPU time."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.moments: list[Any] = []

    def mark(self) -> None:
        """Note this moment of the device's work."""
        if not self.cuda:
            self.moments.append(time.process_time())
            return
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.moments.append(event)

    def seconds(self) -> list[float]:
        """Between each moment and the next."""
        if not self.cuda:
            return [b - a for a, b in pairwise(self.moments)]
        self.moments[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self.moments)]


def alternate(
    work: Mapping[str, Callable[[int], Any]], turns: int, *, cuda: bool = False
) -> dict[str, list[float]]:
    """Seconds of each turn of each work in this process; every other turn is in reverse order.

    Each is called with the number of the turn; turn -1 warms up.
    """
    marks, order = Marks(cuda), []
    for turn in range(-1, turns):
        for name in [*work] if turn % 2 else reversed([*work]):
            marks.mark()
            work[name](turn)
            marks.mark()
            order.append(name)
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for name, took in zip(order, marks.seconds()[::2], strict=True):
        seconds[name].append(took)
    return {name: times[1:] for name, times in seconds.items()}
