"""A lock has one holder at a time, in this process or in another, and leaves no file."""

import logging
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from d2plm.core import waiting
from d2plm.core.errors import DataError
from d2plm.core.locks import locked
from tests.conftest import Logged, MonkeyPatch


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_holder_waits_and_finds_what_the_first_has_left(
    fails: bool, tmp_path: Path, caplog: Logged
) -> None:
    file = tmp_path / "new" / "deeper" / "lock"
    found: list[list[str]] = []

    def second() -> None:
        with locked(file, "the first is busy"):
            found.append([one.name for one in file.parent.iterdir()])

    thread = threading.Thread(target=second)
    with suppress(ValueError), locked(file, "busy"):
        thread.start()
        while "the first is busy: waiting for it" not in caplog.text:
            time.sleep(0.01)
        time.sleep(0.02)  # the waiting thread is now between two attempts
        assert not found
        if fails:
            raise ValueError
        (file.parent / "result").touch()
    thread.join()
    assert [sorted(names) for names in found] == [["lock"] if fails else ["lock", "result"]]
    left = [one.name for one in tmp_path.rglob("*")]
    assert left == ([] if fails else ["new", "deeper", "result"])


def test_a_lock_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for lock in (tmp_path / "file" / "lock", Path("/proc/lock")):
        with pytest.raises(DataError, match=f"^{lock}: "), locked(lock, "busy"):
            pass


def test_a_wait_is_reported_every_minute_and_ends_at_its_limit(
    tmp_path: Path, monkeypatch: MonkeyPatch, caplog: Logged
) -> None:
    monkeypatch.setattr(waiting, "REPORT_SECONDS", 0.05)
    file = tmp_path / "lock"
    busy = "another training writes"
    with (
        caplog.at_level(logging.INFO),
        locked(file, "busy"),
        pytest.raises(DataError, match=r"data\.max_wait_seconds=0\.3"),
        locked(file, busy, max_wait_seconds=0.3, limit_key="data.max_wait_seconds"),
    ):
        pass
    assert caplog.text.count(busy) > 2
    assert not file.exists()


def test_progress_starts_a_wait_anew(monkeypatch: MonkeyPatch, caplog: Logged) -> None:
    monkeypatch.setattr(waiting, "REPORT_SECONDS", 0.02)
    done = count()
    with caplog.at_level(logging.INFO), waiting.waiting("steps", lambda: next(done)):
        time.sleep(0.2)
    assert next(done) > 2 and not caplog.text
