"""Every benchmark is a script that explains itself; rows, ratios and arms are what they say."""

import argparse
import json
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measure import (
    BenchError,
    Row,
    Timings,
    publish,
    ratio_row,
    require_same_losses,
)
from benchmarks.workload import model_settings
from d2plm.config import compose
from d2plm.settings.model import ModelSettings

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [
    ".".join(file.relative_to(FOLDER).with_suffix("").parts)
    for file in FOLDER.rglob("*.py")
    if "parser(" in file.read_text() and file.stem != "measure"
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_help_and_is_run_by_the_makefile_or_the_gpu_script(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(f"benchmarks.{script}", run_name="__main__")
    assert f"usage: python -m benchmarks.{script} " in capsys.readouterr().out
    makefile, shell = FOLDER.with_name("Makefile").read_text(), (FOLDER / "gpu.sh").read_text()
    assert f"benchmarks.{script} " in makefile or f" {script} " in shell


@pytest.mark.parametrize("name", ["150m", "450m"])
def test_models_are_read_as_hydra_composes_them(name: str) -> None:
    assert ModelSettings(**model_settings(name)) == compose("train", [f"model={name}"]).model


def test_a_ratio_is_the_median_of_neighbouring_turns() -> None:
    row = ratio_row("slow ÷ fast", [2.0, 9.0, 8.0], [1.0, 3.0, 1.0], 2.5)
    assert (row.what, row.value, row.spread) == ("time of slow ÷ fast", 3.0, (2.5, 5.5))
    assert row.met is True
    assert ratio_row("one ÷ other", [3.0], [2.0]).spread == (1.5, 1.5)


def test_the_worse_end_of_the_range_over_states_is_compared_with_the_goal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = {
        "idle": [Row("ratio", 3.5, "×", 3, spread=(3.0, 4.0)), Row("loss", 0.5, "", 1, True)],
        "busy": [Row("ratio", 2.5, "×", 3, spread=(2.0, 3.0)), Row("loss", 0.25, "", 1, True)],
    }
    output = tmp_path / "peers.json"
    publish(argparse.Namespace(output=output), states)
    ratio, loss = capsys.readouterr().out.splitlines()[2:4]
    assert ratio.endswith("missed") and loss.endswith("met")
    rows = json.loads(output.read_text())["rows"]
    assert [(row["state"], row["what"], row["met"]) for row in rows] == [
        ("idle", "ratio", True),
        ("idle", "loss", True),
        ("busy", "ratio", False),
        ("busy", "loss", True),
    ]


def test_the_loop_that_keeps_a_core_busy_ends_with_a_killed_parent() -> None:
    script = "import os; from benchmarks.measure import busy_core\n"
    script += "if __name__ == '__main__':\n  with busy_core(): os.kill(os.getpid(), 9)"
    # The loop inherits the pipe, which is read to its end.
    ended = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=60)
    assert ended.returncode == -signal.SIGKILL


def test_arms_with_other_losses_are_not_compared() -> None:
    ours = Timings("ours", losses=[3.0, 2.0])
    assert require_same_losses([ours, Timings("same", losses=[3.0, 2.0002])], 1e-3) > 0
    for losses in ([3.0, 2.1], [3.0], [3.0, float("nan")]):
        with pytest.raises(BenchError, match="other"):
            require_same_losses([ours, Timings("other", losses=losses)], 1e-3)
