"""A local run: the steps' output reaches the terminal and the log."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pipelines.run_here import arguments_kept, step_output

STEP = """
import os, subprocess
from pipelines import steps
print("of KFP", flush=True)
with steps.step("train"):
    print("training 3/10")
    subprocess.run(["sh", "-c", "echo of a worker >&2"])
"""


def test_what_a_step_and_its_processes_write_reaches_the_terminal_and_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "log").open("w") as log, step_output(tmp_path / "pipe", log):
        environment = {**os.environ, "D2PLM_OUTPUT": ""}
        kfp = subprocess.run([sys.executable, "-c", STEP], stdout=subprocess.PIPE, env=environment)
    assert kfp.stdout == b"of KFP\n"
    written = capsys.readouterr().out
    assert sorted(written.splitlines()) == ["", "of a worker", "training 3/10", "── train ──"]
    assert (tmp_path / "log").read_text() == written


def test_a_line_that_a_killed_step_left_without_an_end_is_shown_and_ends_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "log").open("w") as log, step_output(tmp_path / "pipe", log):
        (tmp_path / "pipe").write_text("killed in the middle of a li")
    assert capsys.readouterr().out == "killed in the middle of a li"


def test_output_continues_where_the_log_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115  # closing it fails
    with step_output(tmp_path / "pipe", log):
        (tmp_path / "pipe").write_text("first\n")
        (tmp_path / "pipe").write_text("second\n")
    with suppress(OSError):
        log.close()
    assert capsys.readouterr().out == "first\nsecond\n"


def test_a_path_with_the_interpreter_s_name_reaches_a_step_as_it_is() -> None:
    from kfp.local import subprocess_task_handler as handler

    words = ["sh", "-c", "python3 -m executor", '{"work_dir": "/home/python3-course"}']
    with arguments_kept():
        replaced = handler.replace_python_executable(words, "/bin/mine")
    assert replaced == ["sh", "-c", "/bin/mine -m executor", words[-1]]
    assert "python3" not in handler.replace_python_executable(words, "/bin/mine")[-1]
