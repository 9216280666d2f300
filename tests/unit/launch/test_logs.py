"""Reading a log again after a break gives every line once, in order; nothing is read for ever."""

import time
import tracemalloc
from itertools import count, repeat
from pathlib import Path
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from d2plm.launch import logs
from d2plm.launch.client import PYTORCHJOB, lines
from d2plm.launch.job_log import logged
from d2plm.launch.logs import _Place, followed_log
from tests.conftest import MonkeyPatch

STAMPS = ["2026-01-02T03:04:05.1Z", "2026-01-02T03:04:05.12Z", "2026-01-02T03:04:06Z"]


@given(
    st.lists(st.sampled_from(range(3)), max_size=12).map(sorted),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4),
)
def test_every_line_comes_once(stamps: list[int], breaks: list[tuple[int, int]]) -> None:
    log = [f"{STAMPS[stamp]} line {number}" for number, stamp in enumerate(stamps)]
    place, read = _Place(), []
    for asked_again_from, broken_at in [*breaks, (0, len(log))]:
        seconds = sorted({stamps.index(s) for s in stamps[:asked_again_from]}, reverse=True)
        # Whole time stamps are sent again, and none that has not been read is left out.
        first = next((s for s in seconds if s <= len(read)), 0)
        read += list(place.new(iter(log[first : max(first, broken_at)])))
    assert read == [f"line {number}" for number in range(len(log))]


@given(st.lists(st.binary(max_size=9)), st.none() | st.integers(1, 12))
def test_lines_are_those_of_the_stream(parts: list[bytes], most: int | None) -> None:
    content = b"".join(parts)
    expected = content.removesuffix(b"\n").split(b"\n") if content else []
    read = lines(Mock(stream=lambda: parts), most)
    assert [*read] == [line[:most].decode(errors="replace") for line in expected]


def test_a_line_without_an_end_takes_no_memory() -> None:
    tracemalloc.start()
    (line,) = lines(Mock(stream=lambda: repeat(b"9" * 2**16, 2000)), 2**16)
    assert len(line) == 2**16 and tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_a_log_that_is_left_says_nothing(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "DRAIN_SECONDS", 0.1)
    monkeypatch.setattr(logs, "_unread", lambda *_: map(str, count()))
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        time.sleep(0.001)

    with followed_log(Mock(), PYTORCHJOB, "mine", hear):
        time.sleep(0.05)
    number = len(said)
    time.sleep(0.1)
    assert number > 0 and len(said) <= number + 1
    with logged(tmp_path / "log") as say:
        say("before")
    say("after")
    assert (tmp_path / "log").read_text() == "before\n"
