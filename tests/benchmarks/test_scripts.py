"""Every benchmark is a script that explains itself; rows, ratios and arms are what they say."""

import argparse
import json
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.measure import BenchError, Row, Timings, publish, ratio_row, require_same_losses
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
    assert f"benchmarks.{script}" in makefile.split() or f" {script} " in shell


@pytest.mark.parametrize("name", ["150m", "450m"])
def test_models_are_read_as_hydra_composes_them(name: str) -> None:
    assert ModelSettings(**model_settings(name)) == compose("train", [f"model={name}"]).model


def test_a_ratio_is_the_median_of_neighbouring_turns() -> None:
    row = ratio_row("slow ÷ fast", [2.0, 9.0, 8.0], [1.0, 3.0, 1.0], 2.5)
    assert (row.what, row.value, row.spread) == ("time of slow ÷ fast", 3.0, (2.5, 5.5))
    assert row.met is True
    assert ratio_row("one ÷ other", [3.0], [2.0]).spread == (1.5, 1.5)


def test_the_table_says_which_goals_are_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("ratio", 2.5, "×", 3, spread=(2.0, 3.0)), Row("loss", 0.25, "", 1, at_most=True)]
    output = tmp_path / "peers.json"
    publish(argparse.Namespace(output=output), rows)
    ratio, loss = capsys.readouterr().out.splitlines()[2:4]
    assert ratio.split() == ["ratio", "2.5", "(2", "–", "3)", "×", "≥", "3", "missed"]
    assert loss.split() == ["loss", "0.25", "≤", "1", "met"]
    assert [row["what"] for row in json.loads(output.read_text())["rows"]] == ["ratio", "loss"]


def test_arms_with_other_losses_are_not_compared() -> None:
    ours = Timings("ours", losses=[3.0, 2.0])
    assert require_same_losses([ours, Timings("same", losses=[3.0, 2.0002])], 1e-3) > 0
    for losses in ([3.0, 2.1], [3.0], [3.0, float("nan")]):
        with pytest.raises(BenchError, match="other"):
            require_same_losses([ours, Timings("other", losses=losses)], 1e-3)
