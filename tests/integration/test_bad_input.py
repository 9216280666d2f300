"""Bad input gets one clear line and a non-zero exit, and nothing half-written."""

import shlex
import tempfile
from pathlib import Path

import pytest

from d2plm.cli import main
from tests.commands import CLOSED_PIPE, d2plm
from tests.conftest import Captured, Exports, MonkeyPatch
from tests.integration.conftest import Prepared

GOOD = ">a\nMKTAYIAKQR\n>b\nGSHMLVAGGN\n"


@pytest.mark.parametrize("stdout", ["/dev/full", CLOSED_PIPE])
@pytest.mark.parametrize(
    "words",
    [
        *("", "train --help", "data stats store={store} --json"),
        "data export store={store} output=-",
        "score {fasta} model_dir={model} evaluation.masks_per_sequence=1",
    ],
)
def test_standard_output_that_is_full_or_closed_is_an_error(
    words: str, stdout: str, prepared: Prepared, exports: Exports, tmp_path: Path
) -> None:
    (tmp_path / "in.fasta").write_text(GOOD)
    places = {
        "fasta": tmp_path / "in.fasta",
        "store": f"'{prepared.work_dir / 'data' / 'train_lmdb'}'",
        "model": exports.masked,
    }
    result = d2plm(*(word.format(**places) for word in shlex.split(words)), stdout=stdout)
    assert result.returncode == 1
    said = result.stderr.strip().splitlines()[-1:]
    if stdout == CLOSED_PIPE:  # as filters
        assert "error" not in result.stderr
    else:
        assert said[0].startswith("d2plm: error: standard output cannot")
    assert "Traceback" not in result.stderr


def test_a_deleted_folder(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Captured) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in ("--help", "train --cfg", "ingest input=x output=y"):
        assert main(words.split()) == 1
        assert "the working folder was deleted" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "ingest input=bad.fasta output=new/out",
        "prepare data.input=bad.fasta work_dir=new",
        "embed bad.fasta model_dir={model} output=new/out",
        "embed long.fasta model_dir={model} output=new/out",
        "score bad.fasta model_dir={model} output=new/out.csv",
        "score long.fasta model_dir=models:/none/1 tracking_uri=sqlite:///new/mlflow.db",
        "generate model_dir={model} generation.templates=bad.fasta output=new/out.fasta",
        "generate model_dir={model} generation.relatives=bad.fasta output=new/out.fasta",
        "relatives bad.fasta reference=long.fasta output=new/out cache_dir=new/cache",
        "adapt bad.fasta init_from={model} work_dir=new",
        "train {prepared} output_dir=new trainer.global_batch_tokens=3000",
        "train {prepared} output_dir=new trainer.global_batch_tokens=3000 distributed.processes=2",
        "train {prepared} output_dir=new init_from={model} trainer.freeze=[none]",
        "export {prepared} output_dir=new",
        "register {prepared} output_dir=new model_dir={model}",
    ],
)
def test_a_rejected_command_is_one_line_and_leaves_nothing_behind(
    words: str,
    prepared: Prepared,
    exports: Exports,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capfd: Captured,
) -> None:
    (tmp_path / "bad.fasta").write_text(">a\nMK1T\n")
    (tmp_path / "long.fasta").write_text(f">a\n{'MKTAYIAKQR' * 300}\n")
    given = "experiment=debug", f"data.prepared_dir='{prepared.work_dir / 'data'}'", "work_dir=new"
    places = {"model": exports.masked, "prepared": shlex.join(given)}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main([*shlex.split(words.format(**places)), "--quiet"]) != 0
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("d2plm: error: ")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bad.fasta", "long.fasta"]
