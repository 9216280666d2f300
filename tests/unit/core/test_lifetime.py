"""Children end with the process that started them, even if it is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from d2plm.core.lifetime import for_children, watched

# Starts a child, writes the numbers of all its descendants, and waits.
PARENT = """
import os, subprocess, sys, threading, time, psutil
from d2plm.core.lifetime import for_children, watched
environment = {{**os.environ, **for_children()}}
def start():
    subprocess.Popen({command}, env=environment, start_new_session=True)
thread = threading.Thread(target=start)  # that ends before the child does
thread.start()
thread.join()
while len(children := psutil.Process().children(recursive=True)) < {number}:
    time.sleep(0.01)
print(*(child.pid for child in children), flush=True)
time.sleep(100)
"""
PYTHON_CHILD = """
import subprocess, sys, time
from d2plm.core.lifetime import end_with_parent
end_with_parent()
time.sleep(100)
"""


def running(pids: list[int]) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["status"])  # leaves out those that end meanwhile
        if process.pid in pids and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (f"[sys.executable, '-c', {PYTHON_CHILD!r}]", 1),
        ("watched(['sh', '-c', 'sleep 100 & sleep 100; true'])", 4),
        # Between them is a shell, as there is in the pipeline's steps.
        (f"['sh', '-c', '\"$0\" -c \"$1\"; true', sys.executable, {PYTHON_CHILD!r}]", 2),
    ],
    ids=["python", "another program", "behind a shell"],
)
def test_children_end_with_a_parent_that_is_killed(command: str, number: int) -> None:
    words = [sys.executable, "-c", PARENT.format(command=command, number=number)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        time.sleep(1)  # a child that ends by itself would have done so
        alive = running(children)
        parent.kill()
    end = time.monotonic() + 30
    while running(children) and time.monotonic() < end:
        time.sleep(0.05)
    assert (len(alive), running(children)) == (number, [])


def test_a_child_of_a_parent_that_is_gone_already_ends_at_once() -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], **captured())
    environment = {**os.environ, **for_children(), "D2PLM_PARENT": gone.stdout.strip()}
    child = subprocess.run([sys.executable, "-c", PYTHON_CHILD], env=environment, timeout=60)
    assert child.returncode == -9


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -TERM $$", -15)])
def test_a_watched_program_ends_as_it_would_alone(script: str, code: int, tmp_path: Path) -> None:
    ran = subprocess.run(watched(["sh", "-c", script]), cwd=tmp_path, start_new_session=True)
    assert ran.returncode == code


def captured() -> dict[str, object]:
    return {"stdout": subprocess.PIPE, "text": True, "check": True}
