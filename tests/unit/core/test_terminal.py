"""What commands say and where: streams, quiet, JSON, single lines, progress, suggestions."""

import json
import logging
import warnings
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from d2plm.cli import main
from d2plm.core import progress as progress_module
from d2plm.core.files import nearest_path
from d2plm.core.progress import Progress
from d2plm.core.terminal import VARIABLE, done, output_in, result, write_document
from tests.conftest import Captured, MonkeyPatch


@pytest.fixture(autouse=True)
def default_output(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    file = tmp_path / "few.fasta"
    file.write_text(">a\nMKTAYIAKQR\n>b\nGSHMLVAGGN\n>a2\nMKTAYIAKQR\n")
    return file


@pytest.mark.parametrize("words", [["--json", "ingest"], ["ingest", "--json"]])
def test_json_is_all_of_standard_output(words: list[str], few: Path, capsys: Captured) -> None:
    assert main([*words, f"input={few}", f"output={few.parent / 'store'}"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["sequences"] == 2
    assert "reading" in captured.err


def test_quiet_leaves_what_was_asked_for_and_errors(few: Path, capsys: Captured) -> None:
    store = few.parent / "store"
    assert main(["ingest", "--quiet", f"input={few}", f"output={store}"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["data", "head", "--quiet", f"store={store}", "number=1"]) == 0
    assert capsys.readouterr().out.startswith(">")
    assert main(["data", "head", "--quiet", f"store={few.parent / 'stoer'}"]) == 1
    assert str(few.parent / "stoer") in capsys.readouterr().err


def test_a_command_that_fails_prints_its_findings_as_json(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "step-00000005").mkdir()
    assert main(["checkpoint", "verify", str(tmp_path), "--json"]) == 1
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)
    assert (row["checkpoint"], row["whole"]) == (f"{tmp_path}/step-00000005", False)
    assert captured.err.startswith("d2plm: error: 1 of 1 checkpoints")


def test_results_are_left_to_the_document(capsys: Captured) -> None:
    @dataclass
    class Found:
        where: Path
        value: float

    with output_in({"json"}):
        result("for people")
        done("for people")
        print("from a library")
        write_document({"found": Found(Path("a/b"), float("nan")), "array": np.arange(2)})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"found": {"where": "a/b", "value": None}, "array": [0, 1]}
    assert captured.err == "from a library\n"


def warn_and_log() -> None:
    for _ in range(3):
        warnings.warn_explicit("first\nsecond", UserWarning, "/x/site-packages/torch/a.py", 7)
        logging.getLogger("library.store").warning("the store is old\nupgrade it")
        logging.getLogger("another").info("running a migration")
    logging.getLogger("d2plm.data").warning("a folder is old")
    logging.getLogger("d2plm.data").info("reading it")


@pytest.mark.filterwarnings("always")
def test_a_warning_is_one_line_and_shown_once_unless_quiet_or_debug(capsys: Captured) -> None:
    with output_in(set()):
        warn_and_log()
    warned = [f"warning: {one} is old" for one in ("library: the store", "a folder")]
    said = ["warning: torch: first", *warned, "reading it"]
    assert capsys.readouterr().err.splitlines() == said
    with output_in({"quiet"}):
        warn_and_log()
        logging.getLogger("d2plm").error("bro\x1b[31mken\x07, é\ta")  # no control characters
    assert capsys.readouterr().err == "error: bro\\x1b[31mken\\x07, é\ta\n"
    with output_in({"debug"}):
        warn_and_log()
    assert capsys.readouterr().err.count("running a migration") == 3


@pytest.fixture
def time(monkeypatch: MonkeyPatch) -> Mock:
    """Whose `monotonic` a test sets."""
    clock = Mock(monotonic=Mock(return_value=0.0))
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


@pytest.mark.parametrize("modes", [set(), {"quiet"}])
def test_without_a_terminal_lines_are_plain(modes: set[str], time: Mock, capsys: Captured) -> None:
    with output_in(modes), Progress("scoring", 100_000, start=10_000, unit="tokens") as progress:
        for done_, seconds in ((11_000, 1), (20_000, 10), (30_000, 20), (31_000, 21)):
            time.monotonic.return_value = seconds
            progress.update(done_)
    line = "scoring  30,000/100,000 tokens  1.0k tokens/s  1 min 10 s left\n"
    assert capsys.readouterr() == ("", "" if modes else line)


def test_on_a_terminal_there_is_a_bar_which_goes_away(time: Mock, monkeypatch: MonkeyPatch) -> None:
    shown = StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", shown)
    for name, value in (("NO_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    with Progress("scoring", 100, unit="proteins") as progress:
        time.monotonic.return_value = 10
        progress.update(50)
        progress.say("[half] way")
    assert "50/100 proteins  5 proteins/s  10 s left" in shown.getvalue()
    assert "[half] way" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[2K")  # the bar's line is erased


def refusal(capsys: Captured, *words: str) -> str:
    assert main([*words, "--quiet"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        *(("Trian", "train"), ("--versoin", "--version"), ("checkpoint lst x", "list")),
        *(("pipeline run experiment=dmo", "demo"), ("train modle=nano", "model")),
        *(("train --jsno", "--json"), ("train --config-name pipelin", "pipeline")),
    ],
)
def test_a_mistyped_word(words: str, meant: str, capsys: Captured) -> None:
    assert f"'{meant}'?" in refusal(capsys, *words.split())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("ingest input=uniprot_50.fasta.gz output=x", "uniprot_500.fasta.gz"),
        ("evaluate model_dir=runs/dmeo/model", "runs/demo/model"),
        ("data stats store=runs/demo/dat", "runs/demo/data"),
        ("train --config-file runs/demo/confg.yaml", "runs/demo/config.yaml"),
        ("checkpoint list Runs/dem", "runs/demo"),  # every part may be wrong
    ],
)
def test_a_mistyped_path(
    words: str, meant: str, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    for folder in ("model", "data"):
        (tmp_path / "runs" / "demo" / folder).mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "config.yaml").touch()
    (tmp_path / "uniprot_500.fasta.gz").touch()
    monkeypatch.chdir(tmp_path)
    assert f"'{meant}'?" in refusal(capsys, *words.split())


@pytest.mark.parametrize("path", ["quite/another", "runs/xylophone", "", "."])
def test_what_is_like_nothing_is_left(path: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert nearest_path(path) == ""
