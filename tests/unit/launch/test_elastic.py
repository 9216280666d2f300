"""The cause among many failing workers: one exit code and one message."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from d2plm.core.processes import LOST
from d2plm.launch.elastic import first_failure, leave_error, main


def failed(exitcode: int, data: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(exitcode=exitcode, error_file_data=data or {})


@pytest.mark.parametrize(("nodes", "lost"), [("2", True), ("1", False)])
def test_an_abort_is_the_loss_of_another_node_where_there_are_several(
    nodes: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NNODES", nodes)
    code, message = first_failure({0: failed(-signal.SIGABRT)})
    assert (code == LOST) == lost
    assert ("another node's worker has ended" in message) == lost
    assert "rank 0" in message


def told(text: str, time_ns: int, exit_code: int = 1, is_bug: bool = False) -> dict[str, Any]:
    error = {"text": text, "time_ns": time_ns, "exit_code": exit_code, "is_bug": is_bug}
    return {"d2plm": error}


def test_the_first_that_reported_an_error_is_the_cause() -> None:
    failures = {
        0: failed(1, told("connection closed by peer", 20)),
        1: failed(2, told("no such key", 10, 2)),
    }
    assert first_failure(failures) == (2, "no such key")


def test_a_killed_worker_is_the_cause_whatever_the_others_tell() -> None:
    failures = {0: failed(1, told("connection closed by peer", 1)), 1: failed(-9)}
    code, message = first_failure(failures)
    assert code == 137
    assert "rank 1 was killed by SIGKILL" in message


@pytest.mark.parametrize(("exitcode", "expected"), [(143, 143), (-15, 143), (7, 7)])
def test_without_a_message_the_code_is_passed_on(exitcode: int, expected: int) -> None:
    assert first_failure({0: failed(exitcode)}) == (expected, "")


def test_a_connection_that_another_nodes_loss_has_broken_is_worth_another_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (
        "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:6313"
    )
    failures = {0: failed(1, told(text, 1))}
    monkeypatch.delenv("PET_NNODES", raising=False)
    assert first_failure(failures)[0] == 1  # on one machine: a bug
    monkeypatch.setenv("PET_NNODES", "1:2")
    assert first_failure(failures) == (138, text)
    frames = 'Traceback (most recent call last):\n  File "trainer.py", line 7, in step\n'
    code, message = first_failure({0: failed(1, told(f"{frames * 20}{text}\n", 1, is_bug=True))})
    assert code == 138
    assert text in message
    assert len(message.splitlines()) == 1
    assert first_failure({0: failed(2, told("no such key", 1, 2))})[0] == 2


def test_an_error_is_left_where_torchrun_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("D2PLM_QUIET_WORKERS", "1")
    assert not leave_error("text", 1)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert leave_error("text", 3)
    content = json.loads((tmp_path / "error.json").read_text())
    assert content["message"] == "text"
    assert (content["d2plm"]["text"], content["d2plm"]["exit_code"]) == ("text", 3)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "folder"))
    assert not leave_error("text", 1)


def test_under_torchrun_itself_a_worker_tells_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("D2PLM_QUIET_WORKERS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert not leave_error("text", 1)
    assert not (tmp_path / "error.json").exists()


def test_nodes_that_cannot_be_reached_are_no_defect_and_worth_another_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import logging
    import signal

    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    def lose(_words: list[str]) -> None:
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr(run, "main", lose)
    monkeypatch.delenv("D2PLM_QUIET_WORKERS", raising=False)
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    before, level = signal.getsignal(signal.SIGUSR1), logging.root.manager.disable
    try:
        assert main() > 127
    finally:
        signal.signal(signal.SIGUSR1, before)
        logging.disable(level)
        for name in ("D2PLM_QUIET_WORKERS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
            monkeypatch.delenv(name, raising=False)
    assert capsys.readouterr().err.count("cannot be reached") == 1


def test_a_pod_without_gpus_has_one_process_if_its_job_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = (
        "import os, torch\nfrom torch.distributed import run\nfrom d2plm.launch import elastic\n"
        "torch.cuda.is_available = lambda: False\n"
        "run.main = lambda _: print(os.environ['PET_NPROC_PER_NODE'])\nelastic.main()"
    )
    for given, expected in (("auto", "1"), ("3", "3")):
        monkeypatch.setenv("PET_NPROC_PER_NODE", given)
        shown = subprocess.check_output([sys.executable, "-c", script], text=True)
        assert shown.strip() == expected


SIGNALLED = """
import sys, time, weakref
from datetime import timedelta
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.utils import _PeriodicTimer
from d2plm.launch import elastic

class Rendezvous:
    def __init__(self):
        self.timer = _PeriodicTimer(timedelta(seconds=0.01), self.beat, weakref.ref(self))
        self.timer.start()

    @staticmethod
    def beat(reference):
        held = reference()
        time.sleep(0.5)

def launched(words):
    rendezvous = Rendezvous()
    time.sleep(0.25)
    raise SignalException("of a cluster", 15)

run.main = launched
code = elastic.main()
time.sleep(1)
sys.exit(code)
"""


def test_a_heartbeat_in_the_middle_of_a_signal_prints_no_traceback() -> None:
    run = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (143, "")


RENDEZVOUS = """
import subprocess, sys, threading, time
from d2plm.launch import elastic
elastic.REPORT_SECONDS = 0.2
threading.Thread(target=elastic._report_rendezvous, daemon=True).start()
time.sleep(1)
subprocess.Popen(["sleep", "1"])
print("started", file=sys.stderr, flush=True)
time.sleep(1)
"""


def test_a_node_reports_that_it_waits_for_the_others_until_it_has_workers() -> None:
    run = subprocess.run([sys.executable, "-c", RENDEZVOUS], capture_output=True, text=True)
    before, _, after = run.stderr.partition("started")
    assert "waiting for the other nodes for" in before and not after.strip()
