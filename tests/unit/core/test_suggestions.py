"""One-line errors about typing mistakes suggest what was meant."""

from pathlib import Path

import pytest

from d2plm.cli import main
from d2plm.core.files import nearest_path
from tests.conftest import Captured, MonkeyPatch


def refusal(capsys: Captured, *words: str) -> str:
    assert main([*words, "--quiet"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        *((["Trian"], "train"), (["--versoin"], "--version"), (["checkpoint", "lst", "x"], "list")),
        *((["train", "trainer.max_stepz=3"], "trainer.max_steps"), (["train", "--jsno"], "--json")),
        (["train", "--trianer.max_steps", "3"], "--trainer.max_steps"),
        *((["pipeline", "run", "experiment=dmo"], "demo"), (["train", "modle=nano"], "model")),
        (["train", "--config-name", "pipelin"], "pipeline"),
    ],
)
def test_a_mistyped_word(words: list[str], meant: str, capsys: Captured) -> None:
    assert f"'{meant}'?" in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["ingest", "input=uniprot_50.fasta.gz", "output=x"], "uniprot_500.fasta.gz"),
        (["evaluate", "model_dir=runs/dmeo/model"], "runs/demo/model"),
        (["data", "stats", "store=runs/demo/dat"], "runs/demo/data"),
        (["train", "data.prepared_dir=runs/demo/dta"], "runs/demo/data"),
        (["train", "--config-file", "runs/demo/confg.yaml"], "runs/demo/config.yaml"),
        (["checkpoint", "list", "Runs/dem"], "runs/demo"),  # every part may be wrong
    ],
)
def test_a_mistyped_path(
    words: list[str], meant: str, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    for folder in ("model", "data"):
        (tmp_path / "runs" / "demo" / folder).mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "config.yaml").touch()
    (tmp_path / "uniprot_500.fasta.gz").touch()
    monkeypatch.chdir(tmp_path)
    assert f"'{meant}'?" in refusal(capsys, *words)


@pytest.mark.parametrize("path", ["quite/another", "runs/xylophone", "", "."])
def test_what_is_like_nothing_is_left(path: str, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert nearest_path(path) == ""
