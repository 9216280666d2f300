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
        (["trian"], "train"),
        (["Train"], "train"),
        (["--versoin"], "--version"),
        (["completon", "bash"], "completion"),
        (["checkpoint", "lst", "x"], "list"),
        (["pipeline", "rnu"], "run"),
        (["train", "trainer.max_stepz=3"], "trainer.max_steps"),
        (["train", "--trianer.max_steps", "3"], "--trainer.max_steps"),
        (["train", "--mutlirun"], "--multirun"),
        (["train", "--jsno"], "--json"),
        (["train", "experiment=demoo"], "demo"),
        (["pipeline", "run", "experiment=dmo"], "demo"),
        (["train", "model=nanoo"], "nano"),
        (["train", "paradigm=flowmatching"], "flow_matching"),
        (["train", "tracking=mflow"], "mlflow"),
        (["train", "modle=nano"], "model"),
        (["train", "--config-name", "pipelin"], "pipeline"),
        (["pipeline", "run", "workdir=x"], "work_dir"),
        (["pipeline", "submit", "--wiat=true"], "wait"),
    ],
)
def test_a_mistyped_word(words: list[str], meant: str, capsys: Captured) -> None:
    assert f"did you mean '{meant}'?" in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["ingest", "input=uniprot_50.fasta.gz", "output=x"], "uniprot_500.fasta.gz"),
        (["prepare", "data.input=uniprot_50.fasta.gz"], "uniprot_500.fasta.gz"),
        (["ingest", "input=uniprot.fasta", "format=csv", "output=x"], "uniprot_500.fasta.gz"),
        (["generate", "model_dir=runs/dmeo/model"], "runs/demo/model"),
        (["evaluate", "model_dir=runs/dmeo/model"], "runs/demo/model"),
        (["register", "model_dir=runs/dmeo/model", "tracking=none"], "runs/demo/model"),
        (["score", "model_dir=runs/demo/modell", "input=x.fasta"], "runs/demo/model"),
        (["data", "stats", "store=runs/demo/dat"], "runs/demo/data"),
        (["train", "data.prepared_dir=runs/demo/dta"], "runs/demo/data"),
        (["train", "--config-file", "runs/demo/confg.yaml"], "runs/demo/config.yaml"),
        (["checkpoint", "list", "runs/dem"], "runs/demo"),
        (["replay", "runs/demoo", "--step", "3"], "runs/demo"),
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
    assert f"did you mean '{meant}'?" in refusal(capsys, *words)


def test_every_part_of_a_path_may_be_wrong(tmp_path: Path) -> None:
    right = tmp_path / "Runs" / "demo" / "model"
    right.mkdir(parents=True)
    assert nearest_path(tmp_path / "runs" / "dmeo" / "modle") == f" (did you mean '{right}'?)"


@pytest.mark.parametrize("path", ["quite/another", "runs/xylophone", "", "."])
def test_what_is_like_nothing_is_not_guessed(
    path: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert nearest_path(path) == ""
