"""Schedule: which request is computed next, and which is refused because it would be late.

One thread computes, one forward pass at a time. After each pass of a long request, others are
computed inside it, on its stack: short ones for a SHARE of the time, then long ones with at most
half as much work left. The least work goes first, because most answers are then sent soonest. A
request that would be late or make another one late is refused when it arrives; an accepted one is
finished unless its client hangs up.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import ceil, inf
from threading import Lock
from typing import Any

from d2plm.core.errors import D2PLMError

SHARE = 1 / 9  # share of short requests in the time while both kinds wait
SHORT = 0.5, 1 / 20  # limits of short requests: seconds, fraction of the timeout
PACE_SECONDS = 5.0  # seconds of work over which the pace is averaged

Rows = list[dict[str, Any]]
Progress = Callable[[float], None]  # argument: fraction of the work that is done


@dataclass(frozen=True)
class Work:
    """A checked request: its `kind`, estimated `seconds`, and how to compute it."""

    kind: str
    seconds: float
    run: Callable[[Progress], Rows]


@dataclass
class Speed:
    """Seconds per `forward` pass, per `token`, and per token and residue of a `relative`.

    `kinds` are factors of kinds of work that take more or less.
    """

    forward: float = 0.0
    token: float = 0.0
    relative: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict)

    def seconds(self, kind: str, forward: float, tokens: int, relatives: float) -> float:
        """Estimate the seconds of work; `relatives`: number of residues of all relatives."""
        each = self.token + relatives * self.relative
        return self.kinds.get(kind, 1.0) * (forward * self.forward + tokens * each)


def measured(work: Work) -> float:
    """Minimum seconds of the work in a few repetitions, which other processes may disturb."""
    least, began = inf, time.monotonic()
    for _ in range(5):
        start = time.monotonic()
        work.run(lambda done: None)
        least = min(least, time.monotonic() - start)
        if time.monotonic() - began > 1:
            break
    return least


class BusyError(D2PLMError):
    """A request that would be late, or make others late; it may fit after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class HungUp(Exception):  # noqa: N818  # ends the computation of a request that is dropped
    pass


class Job(Future[Rows]):
    """An accepted request.

    Attributes:
        seconds: estimate of its work, at the pace of the machine when it was accepted.
        progress: fraction of the work that is done.
        deadline: time at which it must be finished.
        started, dropped: whether it has been started, and whether its client has hung up.
    """

    def __init__(self, work: Work, seconds: float, deadline: float, is_short: bool) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # only `Schedule.drop` ends it early
        self.work, self.seconds, self.progress = work, seconds, 0.0
        self.deadline, self.is_short = deadline, is_short
        self.started = self.dropped = False

    @property
    def rank(self) -> float:
        """Order of computation: 0 for short jobs, otherwise the work left, halved once started."""
        left = self.work.seconds * (1 - self.progress)
        return 0.0 if self.is_short else left / 2 if self.started else left


class Schedule:
    """Computes requests, each within `timeout` seconds after it was accepted."""

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout, self.clock = timeout, clock
        self.jobs: list[Job] = []  # neither done nor dropped
        self.pace: dict[str, float] = {}  # measured ÷ estimated seconds of each kind
        self._short = min(SHORT[0], SHORT[1] * timeout)
        self._credit, self._lock = 0.0, Lock()
        self.thread: Executor = ThreadPoolExecutor(1)

    def accept(self, work: Work) -> Job:
        """Accept a request, which is then computed in the thread of the schedule.

        Raises:
            BusyError: if it or an accepted request would be late.
        """
        with self._lock:
            pace = self.pace.get(work.kind, 1.0)
            if not self.jobs:  # without work, a slow pace would never be corrected
                pace = min(pace, 1.0)
            seconds = work.seconds * pace
            job = Job(work, seconds, self.clock() + self.timeout, seconds <= self._short)
            if (late := self._lateness(job)) > 0:
                raise BusyError(
                    f"this request takes about {seconds:.1f} seconds and would not be finished "
                    f"within {self.timeout:g} seconds, with those that the server has accepted; "
                    "send it later, or request fewer residues, masks or steps at a time",
                    ceil(min(late, self.timeout)),
                )
            self.jobs.append(job)
        self.thread.submit(self.compute_next)
        return job

    def drop(self, job: Job) -> None:
        """Stop computing a request, after the forward pass in progress if it has been started."""
        with self._lock:
            job.dropped = True
            if job in self.jobs and not job.started:
                self.jobs.remove(job)

    def compute_next(self) -> None:
        """Compute the waiting long request with the least work, or else the first short one."""
        if job := self._take():
            self._compute(job)

    def _lateness(self, new: Job) -> float:
        """Maximum seconds by which the short, or long, requests would be late with a `new` one."""
        end, worst = self.clock(), -inf
        share = 1 - SHARE
        if new.is_short:
            share = 1 if all(job.is_short for job in self.jobs) else SHARE
        same = (job for job in [*self.jobs, new] if job.is_short == new.is_short)
        for job in sorted(same, key=lambda job: job.rank):
            end += 0 if job.dropped else job.seconds * (1 - job.progress) / share
            worst = max(worst, end - job.deadline)
        return worst

    def _take(self, *, is_short: bool | None = None, most: float = inf) -> Job | None:
        with self._lock:
            waiting = (
                job
                for job in self.jobs
                if not job.started and job.rank <= most and is_short in (None, job.is_short)
            )
            job = min(waiting, key=lambda job: (job.is_short, job.rank), default=None)
            if job is not None:
                job.started = True
            return job

    def _compute(self, job: Job) -> None:
        began = self.clock()

        def after_pass(done: float) -> None:
            nonlocal began
            if job.dropped:
                raise HungUp
            took, expected = self.clock() - began, job.work.seconds * (done - job.progress)
            if expected > 0:
                pace = self.pace.get(job.work.kind, 1.0)
                weight = min(expected / PACE_SECONDS, 1.0)
                self.pace[job.work.kind] = pace + weight * (took / expected - pace)
            job.progress = done
            if not job.is_short:
                self._compute_others(job, took)
            began = self.clock()

        try:
            job.set_result(job.work.run(after_pass))
        except BaseException as error:
            job.set_exception(error)
        finally:
            with self._lock:
                self.jobs.remove(job)

    def _compute_others(self, job: Job, took: float) -> None:
        """Compute the jobs that may overtake `job`, one pass of which `took` this many seconds."""
        self._credit = min(self._credit, 0.0) + took * SHARE / (1 - SHARE)
        while self._credit > 0 and (short := self._take(is_short=True)):
            began = self.clock()
            self._compute(short)
            self._credit -= min(self.clock() - began, self._short)  # less after a disturbance
        while other := self._take(is_short=False, most=job.rank):
            self._compute(other)
