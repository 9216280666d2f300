"""Measuring work: rows with goals, their table, and arms that take turns.

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
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
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


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table.

    Attributes:
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
        """Whether the goal is reached; None without a goal."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def median_row(
    what: str, values: Sequence[float], unit: str, goal: float | None = None, at_most: bool = False
) -> Row:
    """Median of several values, with quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if values[1:] else 3 * [*values]
    return Row(what, middle, unit, goal, at_most, (low, high))


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
    return median_row(f"time of {what}", ratios, "×", goal, at_most)


def rate_unit(device: "torch.device") -> str:
    """Unit of a rate in tokens: by the GPU's clock or by the CPU time of the process."""
    return "tokens/s" if device.type == "cuda" else "tokens/CPU-s"


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    cells = []
    for row in rows:
        spread = f" ({' – '.join(map(_number, row.spread))})" if row.spread else ""
        goal = "" if row.goal is None else f"{'≤' if row.at_most else '≥'} {_number(row.goal)}"
        met = {None: "", True: "met", False: "missed"}[row.met]
        cells.append((row.what, f"{_number(row.value)}{spread} {row.unit}".rstrip(), goal, met))
    return Table(("", "", "goal", ""), cells).text()


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 0.9 else f"{value:.4g}"


# --- scripts -----------------------------------------------------------------------------------


def run_script(main: Callable[[], None]) -> None:
    """Run a script; an error of D2PLM is one line."""
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None


def parser(script: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of a script of this folder."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{script}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def measuring_parser(script: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of a benchmark that publishes rows."""
    made = parser(script, description)
    made.add_argument("--output", type=Path, help="JSON file of rows, settings and machine")
    return made


def training_parser(
    script: str, description: str | None, **defaults: Any
) -> argparse.ArgumentParser:
    """A parser of a benchmark that measures on batches of a training step."""
    made = measuring_parser(script, description)
    made.add_argument("--token-budget", type=int, default=8192, help="tokens of a step")
    made.add_argument("--max-length", type=int, default=1024, help="tokens of a sequence")
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    made.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    made.add_argument("--turns", type=int, default=12, help="of each arm")
    made.add_argument("--steps", type=int, default=1, help="of a turn")
    made.add_argument("--threads", type=int, help="of the CPU; default: as training uses")
    made.set_defaults(**defaults)
    return made


def publish(given: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Print the table; write rows, settings and machine to `--output` if it is given."""
    print(f"\n{table(rows)}")
    if given.output is not None:
        content = {"machine": machine(), "settings": vars(given), "rows": [*map(asdict, rows)]}
        write_text(given.output, json.dumps(content, indent=1, default=str) + "\n")


def say(line: str) -> None:
    """Report progress on standard error."""
    print(line, file=sys.stderr, flush=True)


# --- arms --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to do the work.

    Attributes:
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
        seconds: by the GPU's clock if the arm uses a GPU, else CPU seconds of its process.
        wall: seconds that passed.
        losses: of every step, including the warm-up.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def take_turns(
    arms: Sequence[Arm],
    *,
    turns: int,
    steps: int = 1,
    warm_up: int = 1,
    threads: int | None = None,
) -> dict[str, Timings]:
    """Run all arms side by side, `steps` steps of one and then of the next, `turns` times.

    Args:
        warm_up: steps of each arm before measuring.
        threads: of each arm; None leaves the choice to the arm. Arms of one thread share one CPU,
            on which they disturb each other least.

    Raises:
        BenchError: if an arm fails; its traceback is on standard error.
    """
    timings = {arm.name: Timings(arm.name) for arm in arms}
    chosen = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    with patch.dict(os.environ, chosen), ExitStack() as stack:
        configure_threads()  # inherited by the arms, the peers' too
        ask = {}
        for arm in arms:  # one after another: their first steps need most memory
            say(f"{arm.name}: warming up")
            ask[arm.name] = stack.enter_context(_process(arm, pinned=threads == 1))
            timings[arm.name].losses += ask[arm.name](warm_up)["losses"]
        for turn in range(turns):
            first = turn % len(arms)  # each arm is first equally often
            for arm in (*arms[first:], *arms[:first]):
                took, own = ask[arm.name](steps), timings[arm.name]
                own.seconds.append(took["seconds"])
                own.wall.append(took["wall"])
                own.losses += took["losses"]
            last = (f"{name} {own.seconds[-1]:.3g} s" for name, own in timings.items())
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
            raise BenchError(f"{first.name} and {other.name} took different numbers of steps")
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


@contextmanager
def _process(arm: Arm, *, pinned: bool) -> Iterator[Callable[[int], dict[str, Any]]]:
    """A process of the arm, which waits between its turns; called with a number of steps."""
    pipe, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_serve, args=(theirs, arm.work, arm.arguments, pinned))
    process.start()
    theirs.close()

    def ask(steps: int) -> dict[str, Any]:
        try:
            pipe.send(steps)
            answer: dict[str, Any] = pipe.recv()
        except (BrokenPipeError, ConnectionResetError, EOFError):
            process.join()
            code = process.exitcode
            raise BenchError(f"the arm {arm.name} failed (exit code {code}), see above") from None
        return answer

    try:
        yield ask
    finally:
        process.kill()
        process.join()


def _serve(
    pipe: Connection, work: Callable[..., None], arguments: dict[str, Any], pinned: bool
) -> None:
    os.dup2(2, 1)  # trainers print, and standard output is for the table
    if pinned and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    work(Turns(pipe), **arguments)


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
        self._marks = Marks(cuda=torch.cuda.is_initialized())
        self._marks.mark()
        self._wall = time.perf_counter()

    def __call__(self, loss: Any) -> None:
        """End a step; `loss` is a number or a 0-d tensor, read at the end of the turn."""
        self._losses.append(loss)
        self._left -= 1
        if self._left == 0:
            self._marks.mark()
            (seconds,) = self._marks.seconds()
            took = {"seconds": seconds, "wall": time.perf_counter() - self._wall}
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
