"""Files are written whole or not at all, and a lock has one holder at a time and leaves no file."""

import logging
import os
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from d2plm.core import waiting
from d2plm.core.errors import ConfigError, DataError
from d2plm.core.files import require_other_output, write_text, written_beside
from d2plm.core.locks import locked
from tests.conftest import Logged, MonkeyPatch


def test_a_folder_replaces_the_one_that_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for content in ("old", "new"):
        with written_beside(folder) as partial:
            partial.mkdir()
            (partial / content).write_text(content)
    assert [file.name for file in folder.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("leftover", [True, False])
def test_a_failure_leaves_what_was_there(tmp_path: Path, leftover: bool) -> None:
    file = tmp_path / "table.csv"
    file.write_text("before")
    if leftover:
        (tmp_path / "partial.table.csv").mkdir()
    with pytest.raises(ValueError, match="no"), written_beside(file) as partial:
        partial.write_text("half")
        raise ValueError("no")
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_umask_applies_to_files_of_a_library(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with written_beside(tmp_path / "model") as partial:
            (partial / "inside").mkdir(parents=True)
            for file in (partial / "weights", partial / "inside" / "weights"):
                file.touch(0o600)
        write_text(tmp_path / "secret", "", mode=0o600)
    finally:
        os.umask(before)
    modes = [file.stat().st_mode & 0o777 for file in sorted(tmp_path.rglob("*"))]
    folder, plain = 0o777 & ~umask, 0o666 & ~umask
    assert modes == [folder, folder, plain, plain, 0o600]


def test_a_file_never_replaces_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").touch()
    refused = pytest.raises(DataError, match="folder: cannot be written")
    with refused, written_beside(tmp_path / "folder") as partial:
        partial.touch()
    assert (tmp_path / "folder" / "kept").exists()


def test_what_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    full = pytest.raises(DataError, match=r"out: cannot be written \(No space left on device\)")
    with full, written_beside(tmp_path / "out"):
        Path("/dev/full").write_text("much")
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "deeper" / "x", Path("/dev/null")):
        with pytest.raises(DataError, match=str(place)), written_beside(place):
            raise AssertionError("the block must not run")


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with written_beside(tmp_path / "link") as partial:
        partial.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_two_writers_of_one_path_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"

    def second() -> None:
        with written_beside(file) as partial:
            partial.write_text(f"{file.read_text()} and second")

    thread = threading.Thread(target=second)
    with written_beside(file) as partial:
        thread.start()
        thread.join(0.2)
        partial.write_text("first")
    thread.join()
    assert file.read_text() == "first and second"
    assert list(tmp_path.iterdir()) == [file]


def test_an_output_that_is_read_is_rejected(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "family.fasta").touch()
    (tmp_path / "linked.fasta").symlink_to("family.fasta")
    for output in ("family.fasta", "./family.fasta", tmp_path / "family.fasta", "linked.fasta"):
        with pytest.raises(ConfigError, match=r"output='[^(]*': .*another file"):
            require_other_output("output", output, [None, "family.fasta"])
    require_other_output("output", "other.fasta", [None, "family.fasta"])
    require_other_output("output", None, ["family.fasta"])


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_holder_waits_for_the_first(fails: bool, tmp_path: Path, caplog: Logged) -> None:
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
    caplog.set_level(logging.INFO)
    refused = pytest.raises(DataError, match=r"data\.max_wait_seconds=0\.3")
    second = locked(file, busy, max_wait_seconds=0.3, limit_key="data.max_wait_seconds")
    with locked(file, "busy"), refused, second:
        pass
    assert caplog.text.count(busy) > 2
    assert not file.exists()


def test_progress_starts_a_wait_anew(monkeypatch: MonkeyPatch, caplog: Logged) -> None:
    monkeypatch.setattr(waiting, "REPORT_SECONDS", 0.02)
    done = count()
    with caplog.at_level(logging.INFO), waiting.waiting("steps", lambda: next(done)):
        time.sleep(0.2)
    assert next(done) > 2 and not caplog.text
