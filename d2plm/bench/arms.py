"""Arms: several ways to do the same work, each in a process of its own, timed by turns.

A machine's speed drifts by tens of percent within minutes, so that figures taken one after another
say little. Here one arm takes a few steps, then the next, and again; what is reported is the median
of the ratios of neighbours, with its spread. Times are those of the process's own CPUs, which other
processes hardly touch, or of the GPU's clock. No ratio is given unless the arms' losses agree.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import IO, Any, NoReturn

from d2plm.bench.measure import peak_bytes
from d2plm.core.errors import BenchError, D2PLMError


@dataclass(frozen=True)
class Arm:
    """One way to do the work.

    Attributes:
        name: in tables.
        module: whose `__main__` part calls `serve_arms`.
        work: the name of the function there.
        arguments: of it, JSON.
    """

    name: str
    module: str
    work: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Timings:
    """What an arm took, a number for each of its turns after the first, which warms up.

    Attributes:
        cpu: seconds of its process on all CPUs.
        wall: seconds on the clock.
        cuda: seconds of the GPU's clock; empty without one.
        losses: of every step, those of the first turn included.
        peak_bytes: most host memory that the process held.
        counts: what the arm counted itself, at its end.
    """

    name: str
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    cuda: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> list[float]:
        """Of each turn, by the GPU's clock where there is one, else of the CPUs."""
        return self.cuda or self.cpu

    def per_second(self, amount: float) -> float:
        """Median rate, where each turn does so much."""
        return amount / median(self.seconds)


def take_turns(
    arms: Sequence[Arm],
    *,
    turns: int,
    steps: int = 1,
    warm_up: int = 1,
    threads: int | None = None,
    pinned: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Timings]:
    """Run all arms side by side, `steps` steps of one and then of the next, `turns` times.

    Args:
        warm_up: steps of each arm before the first that counts.
        threads: of each arm; None leaves it to the arm.
        pinned: whether all share one CPU, on which a single thread is disturbed the least.
        report: told of each turn in a line.

    Raises:
        BenchError: if an arm fails; what it wrote has gone to standard error.
    """
    timings = {arm.name: Timings(arm.name) for arm in arms}
    with ExitStack() as stack:
        processes = {}
        for arm in arms:  # one after another: what they do first is large and must not overlap
            report(f"{arm.name}: warming up")
            process = processes[arm.name] = stack.enter_context(_Process(arm, threads, pinned))
            timings[arm.name].losses += process.go(warm_up)["losses"]
        for turn in range(turns):
            # Each arm is first equally often.
            order = list(arms) if turn % 2 == 0 else list(reversed(arms))
            for arm in order:
                _note(timings[arm.name], processes[arm.name].go(steps))
            report(
                f"turn {turn + 1} of {turns}: "
                + ", ".join(f"{arm.name} {timings[arm.name].seconds[-1]:.3g} s" for arm in arms)
            )
        for arm in arms:
            last = processes[arm.name].end()
            timings[arm.name].peak_bytes = last["peak_bytes"]
            timings[arm.name].counts = last["counts"]
    return timings


def require_same_losses(timings: Sequence[Timings], tolerance: float) -> float:
    """The largest relative difference between the arms' losses, step by step.

    Raises:
        BenchError: if it is above `tolerance`, or the arms took other numbers of steps: they did
            not do the same work, and their times must not be compared.
    """
    largest = 0.0
    first = timings[0]
    for other in timings[1:]:
        if len(other.losses) != len(first.losses):
            raise BenchError(
                f"{first.name} and {other.name} took {len(first.losses)} and {len(other.losses)} "
                "steps: no ratio is given"
            )
        for step, (a, b) in enumerate(zip(first.losses, other.losses, strict=True), 1):
            difference = abs(a - b) / max(abs(a), 1e-12)
            if not difference <= tolerance:
                raise BenchError(
                    f"{first.name} and {other.name} did not do the same work: losses {a:.6f} and "
                    f"{b:.6f} at step {step} (at most {tolerance:g} apart is allowed); no ratio is "
                    "given"
                )
            largest = max(largest, difference)
    return largest


class _Process:
    """An arm's process; it works when it is told to and waits in between."""

    def __init__(self, arm: Arm, threads: int | None, pinned: bool) -> None:
        environment = dict(os.environ)
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.name = arm.name
        answers, theirs = os.pipe()
        settings = {"answers": theirs, "pinned": pinned}
        command = [sys.executable, "-m", arm.module, arm.work]
        command += [json.dumps(arm.arguments), json.dumps(settings)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sys.stderr,  # trainers print, and the table is for standard output
            pass_fds=[theirs],
            env=environment,
            text=True,
        )
        os.close(theirs)
        self.answers = os.fdopen(answers)

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.answers.close()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def go(self, steps: int) -> dict[str, Any]:
        """Have it take so many steps; gives what they took."""
        return self._ask(str(steps))

    def end(self) -> dict[str, Any]:
        """Have it end; gives its memory and counts."""
        return self._ask("end")

    def _ask(self, word: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which its answer tells
        answer = self.answers.readline()
        if not answer:
            code = self.process.wait()
            raise BenchError(f"the arm {self.name} failed (exit code {code}), see above")
        return dict(json.loads(answer))


class Turns:
    """The side of an arm: called at the end of each step, it waits where a turn is over.

    Attributes:
        counts: what the arm wants to have reported at its end.
    """

    def __init__(self, answers: IO[str]) -> None:
        self.counts: dict[str, float] = {}
        self._answers = answers
        self._losses: list[Any] = []
        self._left = 0

    def begin(self) -> None:
        """Wait for the first turn; before it nothing is timed."""
        self._await()

    def __call__(self, loss: Any) -> None:
        """A step is done; `loss` is a number or a 0-d tensor, which is read at the turn's end."""
        self._losses.append(loss)
        self._left -= 1
        if self._left:
            return
        cuda = self._cuda_seconds()
        took = {
            "cpu": time.process_time() - self._cpu,
            "wall": time.perf_counter() - self._wall,
            "cuda": cuda,
        }
        self._answer(took | {"losses": [float(loss) for loss in self._losses]})
        self._losses.clear()
        self._await()

    def _await(self) -> None:
        word = sys.stdin.readline().strip()
        if not word.isdigit():
            self._end()
        self._left = int(word)
        self._start_event = self._cuda_event()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def _end(self) -> NoReturn:
        self._answer({"peak_bytes": peak_bytes(), "counts": self.counts})
        os._exit(0)  # a trainer in the middle of its run has nothing to tidy up here

    def _answer(self, content: dict[str, Any]) -> None:
        self._answers.write(json.dumps(content) + "\n")
        self._answers.flush()

    def _cuda_seconds(self) -> float | None:
        if self._start_event is None:
            return None
        stop = self._cuda_event()
        stop.synchronize()
        return float(self._start_event.elapsed_time(stop)) / 1e3

    @staticmethod
    def _cuda_event() -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None  # it may be there, and this arm not use it
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def serve_arms(works: dict[str, Callable[..., None]]) -> None:
    """The other side of an `Arm`: run the work that the command line names, by turns.

    A work is called with `Turns` and its arguments; it prepares, calls `begin`, and from then on
    the turns themselves at each step's end.
    """
    work, arguments, settings = works[sys.argv[1]], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    if settings["pinned"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with os.fdopen(settings["answers"], "w") as answers:
        try:
            work(Turns(answers), **arguments)
        except D2PLMError as error:
            raise SystemExit(f"d2plm: error: {error}") from None


def _note(timings: Timings, took: dict[str, Any]) -> None:
    timings.cpu.append(took["cpu"])
    timings.wall.append(took["wall"])
    if took["cuda"] is not None:
        timings.cuda.append(took["cuda"])
    timings.losses += took["losses"]
