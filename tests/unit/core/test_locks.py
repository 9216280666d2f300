"""A lock has one holder at a time, in this process or in another, and leaves no file."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from d2plm.core.errors import DataError
from d2plm.core.locks import locked

ROOT = Path(__file__).parents[3]
HOLDER = """
import signal, sys
from pathlib import Path
from d2plm.core.locks import locked
with locked(Path(sys.argv[1]), "busy"):
    print("held", flush=True)
    signal.pause()
"""


def test_a_second_holder_is_rejected_until_the_first_has_released_the_lock(tmp_path: Path) -> None:
    file = tmp_path / "new" / "lock"
    with locked(file, "busy"):
        with pytest.raises(DataError, match=r"^busy; wait for it"), locked(file, "busy"):
            pass
        assert file.exists()
    with locked(file, "busy"):
        pass
    assert not file.exists()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        waited: list[str] = []

        def kill(line: str) -> None:
            waited.append(line)
            os.kill(process.pid, signal.SIGKILL)

        with locked(file, "busy", waiting=kill):
            assert waited == ["busy: waiting for it"]


def test_a_lock_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(DataError, match=r"file/lock: cannot be written"),
        locked(tmp_path / "file" / "lock", "busy"),
    ):
        pass


def test_a_folder_that_takes_no_files_is_an_error_instead_of_endless_waiting() -> None:
    with (
        pytest.raises(DataError, match=r"^/proc/lock: cannot be written"),
        locked(Path("/proc/lock"), "busy", waiting=print),
    ):
        pass
