"""Children end with the process that started them, however it ends; their exit codes are passed on.

Most tests run a script as the parent and look at the processes that it leaves.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from d2plm.core import processes
from d2plm.core.errors import LaunchError
from d2plm.core.processes import Job, deferred, end_with_parent, run, run_jobs, run_program
from tests.conftest import MonkeyPatch

# A program of ours, and one that has a child of its own and ends orderly on SIGTERM.
CHILD = """
import time
from d2plm.core.processes import end_with_parent
end_with_parent()
time.sleep(100)
"""
ORDERLY = """
import sys, time
from pathlib import Path
from d2plm.core.processes import end_with_parent, run, unwound_by_sigterm
end_with_parent()
with unwound_by_sigterm():
    try:
        run([sys.executable, "-c", sys.argv[2]])
    finally:
        time.sleep(0.2)
        Path(sys.argv[1]).write_text("saved")
"""
# Runs `statement`, after it was told the number of processes; writes their ids once all are there.
PARENT = """
import os, signal, subprocess, sys, threading, time, psutil
from pathlib import Path
from d2plm.core import processes
from d2plm.core.processes import *
def tell(number):
    while len(children := psutil.Process().children(recursive=True)) < number:
        time.sleep(0.01)
    print(*(child.pid for child in children), flush=True)
python, folder, number, child = sys.executable, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
threading.Thread(target=tell, args=[number], daemon=True).start()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with unwound_by_sigterm():
    {statement}
"""
STATEMENTS = {
    "python": ("run([python, '-c', child])", 1),
    # Between them is a shell, as there is in the pipeline's steps.
    "behind a shell": ("run(['sh', '-c', '\"$0\" -c \"$1\"; true', python, child])", 2),
    "jobs": ("[*run_jobs([Job(n, [[python, '-c', child]], folder / n) for n in 'ab'], 2)]", 2),
    # The shell that watches it, the program, and two of its own.
    "program": ("run_program(['sh', '-c', 'sleep 99 & sleep 99; true'], folder, folder / 'l')", 4),
}


def running(pids: list[int], seconds: float = 0) -> list[int]:
    """Those of the processes that run, still after so many seconds."""
    limit = time.monotonic() + seconds
    while True:
        found = [
            process.pid
            for process in psutil.process_iter(["status"])  # leaves out those that end meanwhile
            if process.pid in pids and process.info["status"] != psutil.STATUS_ZOMBIE
        ]
        if not found or time.monotonic() >= limit:
            return found
        time.sleep(0.05)


def left_after(
    statement: str, number: int, child: str, folder: Path, end: Callable[[int], None]
) -> tuple[int, int, list[int]]:
    """The parent's exit code, how many children it had, and which outlive `end(its id)`."""
    words = [sys.executable, "-c", PARENT.format(statement=statement), str(folder), str(number)]
    with subprocess.Popen(
        [*words, child], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        time.sleep(0.1)  # a child that ends by itself would have done so
        alive = running(pids)
        end(parent.pid)
        code = parent.wait(90)
    return code, len(alive), running(pids, seconds=30)


@pytest.mark.parametrize(
    ("kind", "number", "send"),
    [
        *((kind, signal.SIGKILL, os.kill) for kind in [*STATEMENTS][1:]),
        ("python", signal.SIGTERM, os.killpg),
        ("jobs", signal.SIGTERM, os.kill),
        ("program", signal.SIGINT, os.killpg),
    ],
)
def test_children_end_with_a_parent_that_is_killed_or_signalled(
    kind: str, number: signal.Signals, send: Callable[[int, int], None], tmp_path: Path
) -> None:
    statement, children = STATEMENTS[kind]
    left = left_after(statement, children, CHILD, tmp_path, lambda pid: send(pid, number))
    code = 128 + number if number == signal.SIGTERM else -number  # Python's own end by SIGINT
    assert left == (code, children, [])


def test_a_child_of_a_parent_that_is_gone_already_ends_at_once(monkeypatch: MonkeyPatch) -> None:
    gone = subprocess.run(["/bin/sh", "-c", "echo $$"], stdout=subprocess.PIPE, check=True)
    environment = {processes.PARENT: gone.stdout.decode().strip()}
    assert run([sys.executable, "-c", CHILD], environment) == 128 + signal.SIGKILL
    # A process that was told its parent tells no child of its own.
    monkeypatch.setenv(*next(iter(processes.for_children().items())))
    end_with_parent()
    assert processes.PARENT not in os.environ
    before = threading.active_count()
    end_with_parent()
    assert threading.active_count() == before


def test_sigterm_lets_a_child_and_its_child_end_orderly(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    statement = f"run([python, '-c', {ORDERLY!r}, {str(saved)!r}, child])"
    left = left_after(statement, 2, CHILD, tmp_path, lambda pid: os.kill(pid, signal.SIGTERM))
    assert left == (128 + signal.SIGTERM, 2, [])
    assert saved.read_text() == "saved"


def test_a_child_that_ignores_sigterm_is_killed_by_a_second_signal(tmp_path: Path) -> None:
    def twice(pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.3)
        os.kill(pid, signal.SIGTERM)

    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{CHILD}"
    statement = "processes.GRACE_SECONDS = 1000; run([python, '-c', child])"
    left = left_after(statement, 1, stubborn, tmp_path, twice)
    assert left == (128 + signal.SIGTERM, 1, [])


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137)])
def test_exit_codes_are_passed_on(script: str, code: int, tmp_path: Path) -> None:
    assert run(["sh", "-c", script]) == code
    assert run_program(["sh", "-c", script], tmp_path, tmp_path / "log") == code


def test_what_a_program_leaves_running_is_killed_and_its_output_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    script = "sleep 100 & echo $!; pwd; cat; echo ' the end ' >&2; echo"
    assert run_program(["sh", "-c", script], tmp_path, log) == 0
    first, pid, *rest = log.read_text().splitlines()
    assert (first, rest) == ("before", [str(tmp_path), " the end ", ""])
    assert not running([int(pid)], seconds=30)
    assert processes.last_lines(log, 5, start=len("before\n")) == f"{pid} | {tmp_path} | the end"


@pytest.mark.parametrize("code", [137, 255, 2])
def test_a_trainings_exit_code_is_kept(code: int, monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    ran = []
    monkeypatch.setattr(processes, "run", lambda *words: ran.append(words) or code)
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    monkeypatch.delenv(processes.GLOO_INTERFACE, raising=False)
    with pytest.raises(LaunchError) as caught:
        processes.train_locally(tmp_path / "config.yaml", processes=2)
    assert caught.value.exit_code == code
    assert ("resumes it" in str(caught.value)) == (code != 2)
    ((command, environment),) = ran
    assert {"--nproc-per-node=2", "--local-addr=localhost"} <= {*command}
    assert environment[processes.GLOO_INTERFACE].startswith("lo")  # no look-up of its own name
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == "1"  # the user's own


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_block(number: int) -> None:
    def stop(*_: object) -> None:
        raise ZeroDivisionError

    before = signal.signal(number, stop)
    finished = False
    try:
        with pytest.raises(ZeroDivisionError), deferred():
            signal.raise_signal(number)
            finished = True
        assert finished
        assert signal.getsignal(number) is stop
        with ThreadPoolExecutor() as pool, deferred():  # another thread holds nothing back
            pool.submit(deferred().__enter__).result()
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("error", [SystemExit, ValueError])
def test_a_handler_is_kept_on_exit(error: type[BaseException], monkeypatch: MonkeyPatch) -> None:
    at_exit = list[Any]()
    monkeypatch.setattr(atexit, "register", lambda *words: at_exit.append(words))
    before, handler = signal.getsignal(signal.SIGUSR1), Mock()
    try:
        with pytest.raises(error), processes.handled(handler, signal.SIGUSR1, kept_on_exit=True):
            raise error
        kept = signal.getsignal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    ignored = [(signal.signal, signal.SIGUSR1, signal.SIG_IGN)]
    assert (kept, at_exit) == ((handler, ignored) if error is SystemExit else (before, []))


def test_jobs_run_in_order_with_shares_of_cores(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = f"cd {tmp_path}; echo $OMP_NUM_THREADS; touch $$.runs; sleep 0.1; echo *.runs | wc -w"
    words = [["sh", "-c", f"{code}; rm $$.runs"], ["echo", "second"]]
    jobs = [Job(f"job {i}", words, tmp_path / f"{i}.log") for i in range(4)]
    assert {job.name for job in run_jobs(jobs, parallel=2)} == {job.name for job in jobs}
    for job in jobs:
        threads, running, second = job.log.read_text().split()
        assert int(threads) == max((os.cpu_count() or 1) // 2, 1)
        assert int(running) <= 2
        assert second == "second"


def test_a_failure_names_the_job_its_last_line_and_its_log(tmp_path: Path) -> None:
    began = tmp_path / "endless.log"
    broken = f"until [ -s {began} ]; do sleep 0.02; done; echo no luck; exit 1"
    scripts = {"endless": "echo $$; exec sleep 100", "broken": broken}
    jobs = [Job(one, [["sh", "-c", scripts[one]]], tmp_path / f"{one}.log") for one in scripts]
    with pytest.raises(LaunchError, match=r"broken: .*no luck.*broken\.log"):
        list(run_jobs(jobs, parallel=2))
    assert not running([int(began.read_text())]), "the other job was ended"


def test_a_child_that_does_not_end_in_time_is_killed(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.1)
    stubborn = "trap '' TERM; echo ready; while true; do sleep 0.1; done"
    child = processes.child(["sh", "-c", stubborn], stdout=subprocess.PIPE)
    with pytest.raises(ZeroDivisionError), child as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        _ = 1 / 0
    assert process.returncode == -signal.SIGKILL
