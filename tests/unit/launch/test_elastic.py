"""The cause among many failing workers: one exit code and one message."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from torch.distributed import run
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from d2plm.core.processes import LOST
from d2plm.launch.elastic import first_failure, leave_error, main
from tests.commands import python_c
from tests.conftest import Captured, MonkeyPatch


def failed(
    exitcode: int, text: str = "", time_ns: int = 0, code: int = 1, is_bug: bool = False
) -> Any:
    """A failed worker, which may have reported an error."""
    error = {"text": text, "time_ns": time_ns, "exit_code": code, "is_bug": is_bug}
    return SimpleNamespace(exitcode=exitcode, error_file_data={"d2plm": error} if text else {})


FRAMES = 'Traceback (most recent call last):\n  File "trainer.py", line 7, in step\n' * 20
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:6313"


@pytest.mark.parametrize(
    ("nodes", "failures", "code", "said"),
    [
        ("2", [failed(-signal.SIGABRT)], LOST, "rank 0"),  # of another node
        ("1", [failed(-signal.SIGABRT)], 134, "rank 0"),
        ("1", [failed(1, "closed", 20), failed(2, "no such key", 10, 2)], 2, "no such key"),
        ("1", [failed(1, "closed", 1), failed(-9)], 137, "rank 1 was killed by SIGKILL"),
        ("1", [failed(7)], 7, ""),
        *(("1", [failed(code)], 143, "") for code in (143, -15)),
        ("1", [failed(1, CLOSED, 1)], 1, CLOSED),  # on one machine: a bug
        ("1:2", [failed(1, CLOSED, 1)], 138, CLOSED),
        ("1:2", [failed(1, f"{FRAMES}{CLOSED}\n", 1, is_bug=True)], 138, CLOSED),
        ("1:2", [failed(2, "no such key", 1, 2)], 2, "no such key"),
    ],
)
def test_one_of_many_failures_is_the_cause(
    nodes: str, failures: list[Any], code: int, said: str, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NNODES", nodes)
    found, message = first_failure(dict(enumerate(failures)))
    assert found == code and said in message
    assert len(message.splitlines()) <= 1


def test_an_error_is_left_where_torchrun_looks(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    for quiet, path, is_left in (
        *(("1", "", False), ("", str(file), False)),  # under torchrun itself a worker prints it
        *(("1", str(tmp_path / "no" / "folder"), False), ("1", str(file), True)),
    ):
        for name, value in (("D2PLM_QUIET_WORKERS", quiet), ("TORCHELASTIC_ERROR_FILE", path)):
            monkeypatch.delenv(name, raising=False)
            if value:
                monkeypatch.setenv(name, value)
        assert leave_error("text", 3) == is_left == file.exists()
    content = json.loads(file.read_text())
    assert content["message"] == content["d2plm"]["text"] == "text"
    assert content["d2plm"]["exit_code"] == 3


@pytest.fixture
def torchrun(monkeypatch: MonkeyPatch) -> Iterator[Mock]:
    """In place of torchrun; what the entry point changes in its process is restored."""
    replaced = Mock()
    monkeypatch.setattr(run, "main", replaced)
    before, level = signal.getsignal(signal.SIGUSR1), logging.root.manager.disable
    with patch.dict(os.environ):
        yield replaced
    signal.signal(signal.SIGUSR1, before)
    logging.disable(level)


def test_absent_nodes_are_worth_another_try(torchrun: Mock, capsys: Captured) -> None:
    torchrun.side_effect = RendezvousConnectionError("The connection to the store has failed.")
    assert main() > 127
    assert capsys.readouterr().err.count("cannot be reached") == 1


@pytest.mark.parametrize(("given", "expected"), [("auto", "1"), ("3", "3")])
def test_a_pod_without_gpus_has_one_process(
    torchrun: Mock, monkeypatch: MonkeyPatch, given: str, expected: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    os.environ["PET_NPROC_PER_NODE"] = given
    seen: list[str] = []
    torchrun.side_effect = lambda _: seen.append(os.environ["PET_NPROC_PER_NODE"])
    assert main() == 0
    assert seen == [expected]


SIGNALLED = """
import runpy, threading, time
from torch.distributed import TCPStore, run
from torch.distributed.elastic.multiprocessing.api import SignalException

def launched(words):
    store = TCPStore("127.0.0.1", 0, is_master=True)
    store.set("key", "value")

    def beat():
        while True:
            store.get("key")

    threading.Thread(target=beat, daemon=True).start()
    time.sleep(0.1)
    raise SignalException("of a cluster", 15)

run.main = launched
runpy.run_module("d2plm.launch.elastic", run_name="__main__")
"""


def test_a_heartbeat_after_a_signal_does_not_change_the_exit_code() -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, SIGNALLED]  # no stdout
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (143, "")


RENDEZVOUS = """
import subprocess, sys, threading, time
from d2plm.launch import elastic
elastic.REPORT_SECONDS = 0.05
threading.Thread(target=elastic._report_rendezvous, daemon=True).start()
time.sleep(0.2)
subprocess.Popen(["sleep", "1"])
print("started", file=sys.stderr, flush=True)
time.sleep(0.2)
"""


def test_a_node_reports_that_it_waits_for_the_others_until_it_has_workers() -> None:
    before, _, after = python_c(RENDEZVOUS).stderr.partition("started")
    assert "waiting for the other nodes for" in before and not after.strip()
