"""The order in which requests are computed, and which are refused, by a clock that passes set."""

import math
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2plm.serving.schedule import SHARE, BusyError, HungUp, Job, Schedule, Work

PASS = 0.1  # seconds


class Simulated(Executor):
    """A schedule whose passes take PASS seconds each on its own clock, but for its `pace`.

    Attributes:
        ended: name of each request and when it was finished, in that order.
        used: name → seconds that its passes took.
    """

    def __init__(self, timeout: float = 60.0) -> None:
        self.now, self.pace = 0.0, 1.0
        self.tasks: list[Callable[[], Any]] = []
        self.arriving: list[tuple[float, str, float]] = []
        self.ended: dict[str, float] = {}
        self.used: dict[str, float] = {}
        self.jobs: dict[str, Job] = {}
        self.schedule = Schedule(timeout, lambda: self.now)
        self.schedule.thread = self

    def submit(self, task: Any, /, *_: Any, **__: Any) -> Any:
        self.tasks.append(task)

    def send(self, name: str, seconds: float) -> Job:
        def run(progress: Callable[[float], None]) -> list[dict[str, Any]]:
            number = max(round(seconds / PASS), 1)
            for index in range(number):
                self.now += self.pace * seconds / number
                self.used[name] = self.used.get(name, 0) + self.pace * seconds / number
                self.arrive()
                progress((index + 1) / number)
            self.ended[name] = self.now
            return []

        self.jobs[name] = self.schedule.accept(Work("score", seconds, run))
        return self.jobs[name]

    def arrive(self) -> None:
        """Send what has been due by now; refused requests are left out."""
        while self.arriving and self.arriving[0][0] <= self.now:
            _, name, seconds = self.arriving.pop(0)
            try:
                self.send(name, seconds)
            except BusyError:
                self.jobs.pop(name, None)

    def run(self) -> None:
        while self.tasks or self.arriving:
            if not self.tasks:
                self.now = max(self.now, self.arriving[0][0])
                self.arrive()
            while self.tasks:
                self.tasks.pop(0)()


def test_a_short_request_waits_for_one_pass_of_long_ones() -> None:
    it = Simulated()
    for number in range(3):
        it.send(f"long {number}", 10)
    it.arriving = [(2.05, "short", 0.01)]
    it.run()
    assert it.ended["short"] < 2.05 + 2 * PASS


def test_long_requests_keep_their_share_beside_short_ones_without_end() -> None:
    it = Simulated()
    it.send("long", 30)
    it.arriving = [(number * 0.01, f"short {number}", 0.02) for number in range(3000)]
    it.run()
    assert it.ended["long"] == pytest.approx(30 / (1 - SHARE), rel=0.02)
    during = [name for name, end in it.ended.items() if end < it.ended["long"]]
    assert sum(it.used[name] for name in during) == pytest.approx(30 * SHARE / (1 - SHARE), rel=0.1)


def test_half_the_work_overtakes_a_long_request() -> None:
    for seconds in (1, 4, 9, 20, 30):
        it = Simulated()
        it.send("long", 20)
        it.arriving = [(10, "other", seconds)]  # half of the work is left, and less when it waits
        it.run()
        assert (it.ended["other"] < it.ended["long"]) == (seconds < 5)


def test_those_that_wait_start_with_the_least_work_and_a_failure_is_of_its_request_alone() -> None:
    it = Simulated()
    for name, seconds in (("b", 9), ("c", 12), ("a", 3)):
        it.send(name, seconds)
    failing = it.schedule.accept(Work("score", 0.1, Mock(side_effect=ValueError)))
    it.run()
    assert isinstance(failing.exception(), ValueError)
    assert [*it.ended] == ["a", "b", "c"]


@given(
    requests=st.lists(
        st.tuples(st.floats(0, 20), st.sampled_from([0.02, 0.2, 0.4, 1.0, 5.0, 20.0, 45.0])),
        min_size=1,
        max_size=40,
    )
)
def test_every_accepted_request_is_done_in_time(requests: list[tuple[float, float]]) -> None:
    it, due = Simulated(), 0.0
    for number, (gap, seconds) in enumerate(requests):
        due += gap
        it.arriving.append((due, str(number), seconds))
    it.run()
    assert it.ended.keys() == it.jobs.keys()
    for name, job in it.jobs.items():
        assert it.ended[name] <= job.deadline + 1  # a pass, and what is short


def test_what_would_be_late_or_make_others_late_is_refused() -> None:
    it = Simulated()
    with pytest.raises(
        BusyError, match=r"takes about 55\.0 seconds and would not be finished"
    ) as e:
        it.send("too long on its own", 55)
    assert e.value.retry_after == math.ceil(55 / (1 - SHARE) - 60)
    it.send("long", 30)
    it.send("next", 20)
    with pytest.raises(BusyError, match="within 60 seconds"):
        it.send("late", 10)
    with pytest.raises(BusyError):
        it.send("makes another late", 5)
    it.send("short", 0.1)  # has a share of its own
    it.run()
    it.send("late", 10)


def test_a_dropped_request_is_not_computed_on_and_leaves_its_time_to_others() -> None:
    it = Simulated()
    it.send("running", 30)
    waiting = it.send("waiting", 20)
    with pytest.raises(BusyError):
        it.send("other", 25)
    it.schedule.drop(waiting)
    it.arriving = [(6.0, "unused", 0.01)]
    it.send("other", 20)
    arrive = it.arrive

    def hang_up() -> None:
        arrive()
        if it.now > 25:
            it.schedule.drop(it.jobs["running"])

    it.arrive = hang_up  # type: ignore[method-assign]
    it.run()
    assert "waiting" not in it.used
    assert it.used["running"] < 6
    assert isinstance(it.jobs["running"].exception(), HungUp)
    assert it.schedule.jobs == []


@pytest.mark.parametrize("pace", [0.3, 3.0])
def test_estimates_follow_the_machine(pace: float) -> None:
    it = Simulated()
    it.pace = pace
    it.send("first", 20)
    it.run()
    it.send("second", 15)
    with pytest.raises(BusyError):
        it.send("third", 60 / pace)
    assert it.jobs["second"].seconds == pytest.approx(15 * min(pace, 1), rel=0.05)
    if pace < 1:
        it.send("third", 100)


@pytest.mark.parametrize("seconds", [0.1, 2.0])
def test_equal_requests_are_answered_in_their_order(seconds: float) -> None:
    it = Simulated()
    it.send("long", 20)
    it.pace = 0.5  # the estimates of later ones are lower
    it.arriving = [(number * 0.2, str(number), seconds) for number in range(1, 20)]
    it.run()
    del it.ended["long"]
    assert [*it.ended] == [str(number) for number in range(1, 20) if str(number) in it.jobs]
