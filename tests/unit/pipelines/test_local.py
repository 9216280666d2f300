"""A local run's steps: their output, their signals, and what they need."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from d2plm.core.errors import LaunchError
from pipelines import local, steps
from tests.conftest import Captured, MonkeyPatch

RUN = """
import signal, sys
from pathlib import Path
from d2plm.core.processes import unwound_by_sigterm
from pipelines import local
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
folder = Path(sys.argv[1])
local.step_command = lambda *_: [sys.executable, "-c", (folder / "step.py").read_text(), folder]
with unwound_by_sigterm(), (folder / "log").open("w", buffering=1) as log:
    local._run_step("train", folder, log, "1", folder, {})
"""
# As training does: it saves on the first signal, and ends at once on a second one.
STEP = """
import signal, sys, time
received = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: received.append(number))
print("training", flush=True)
while not received:
    time.sleep(0.01)
time.sleep(0.3)
print(f"saved after {len(received)} signal" + "." * 100_000, flush=True)
"""


def run_step(folder: Path, code: str, log: io.TextIOBase) -> None:
    words = [sys.executable, "-c", code]
    with MonkeyPatch.context() as patch:
        patch.setattr(local, "step_command", lambda *_: words)
        local._run_step("train", folder, log, "1", folder, {"OF_THE_STEP": "1"})  # type: ignore[arg-type]


def test_output_reaches_the_terminal_and_the_log_if_it_can_be_written(
    tmp_path: Path, capsys: Captured
) -> None:
    code = "import os; print('3/10', flush=True); os.system('echo $OF_THE_STEP worker >&2')"
    log = io.StringIO()
    run_step(tmp_path, code, log)
    assert capsys.readouterr().out == log.getvalue() == "3/10\n1 worker\n"
    log.close()
    run_step(tmp_path, code, log)
    assert capsys.readouterr().out == "3/10\n1 worker\n"


def test_a_line_without_an_end_of_a_killed_step_is_shown_and_the_error_names_the_signal(
    tmp_path: Path, capsys: Captured, monkeypatch: MonkeyPatch
) -> None:
    ended: list[tuple[str, ...]] = []
    monkeypatch.setattr(steps, "finish", lambda *words: ended.append(words))
    code = "import os; os.write(1, b'in the middle of a li'); os.kill(os.getpid(), 9)"
    reason = "the step train ended with exit code 137, SIGKILL"
    with pytest.raises(LaunchError, match=reason):
        run_step(tmp_path, code, io.StringIO())
    assert capsys.readouterr().out == "in the middle of a li"
    assert ended == [("1", str(tmp_path), "FAILED", reason)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_a_step_once(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(STEP)
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, tmp_path],
        env={**os.environ, "D2PLM_PARENT": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == b"training\n"
    time.sleep(0.1)
    os.killpg(run.pid, number)
    last = run.communicate(timeout=60)[0].decode()
    assert last == "saved after 1 signal" + "." * 100_000 + "\n"  # more than a pipe holds
    assert (tmp_path / "log").read_text() == "training\n" + last


def test_a_local_run_needs_no_kfp() -> None:
    code = "import sys; import pipelines.command, pipelines.local; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "pipelines.local" in loaded
    assert not {"kfp", "kubernetes", "psutil"} & set(loaded)
