"""Bad input gets one clear line and a non-zero exit, and nothing half-written."""

import gzip
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from d2plm.core.errors import DataError
from tests.commands import d2plm
from tests.integration.conftest import Prepared, few_proteins

GOOD = ">a\nMKTAYIAKQR\n>b\nGSHMLVAGGN\n"


def refusal(*words: str, **changes: str) -> str:
    """The error line of a rejected command, besides its progress messages."""
    result = d2plm(*words, "--quiet", **changes)
    assert result.returncode != 0, result.stdout
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("d2plm: error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "is empty"),
        (">a\nMKT\n>b\n", "record 'b' has no sequence"),
        (">a\nMK1T\n", "holds '1'"),
        ("MKTAYI\n", "not FASTA"),
    ],
)
def test_a_bad_fasta_file_is_rejected(content: str | None, message: str, tmp_path: Path) -> None:
    fasta, store = tmp_path / "in.fasta", tmp_path / "store"
    if content is not None:
        fasta.write_text(content)
    assert message in refusal("ingest", f"input={fasta}", f"output={store}")
    assert not store.exists()


def test_a_truncated_gzip_file_is_rejected(tmp_path: Path) -> None:
    fasta = tmp_path / "in.fasta.gz"
    whole = gzip.compress((GOOD * 500).encode())
    fasta.write_bytes(whole[: len(whole) // 2])
    assert "truncated" in refusal("ingest", f"input={fasta}", f"output={tmp_path / 's'}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_stepz=3", "did you mean 'trainer.max_steps'"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate=-1"),
        ("trainer.max_steps=0", "trainer.max_steps=0"),
        ("data.token_budget=10", "data.token_budget=10"),
        ("model.num_attention_heads=3", "model.num_attention_heads=3"),
        ("paradigm.prediction_type=epsilon", "must be residue"),
        ("paradigm.schedule=cosin", "did you mean 'cosine'"),
        ("trainer.precision=fp8", "trainer.precision='fp8'"),
        ("schedule.warmup_ratio=2", "schedule.warmup_ratio=2"),
        ("trainer.max_epochs=2", "set exactly one"),
        ("callbacks.evaluation.evry=3", "did you mean 'callbacks.evaluation.every'"),
        ("callbacks.early_stopping.patience=0", "callbacks.early_stopping.patience=0"),
    ],
)
def test_a_bad_setting_is_rejected_by_name_before_training(
    override: str, message: str, prepared: Prepared, tmp_path: Path
) -> None:
    line = refusal("train", *prepared.arguments(), f"output_dir={tmp_path / 'o'}", override)
    assert message in line
    assert not (tmp_path / "o" / "checkpoints").exists()


def test_an_unknown_command_suggests_the_right_one() -> None:
    assert "did you mean 'train'" in refusal("trian")


def test_an_unknown_experiment_is_named() -> None:
    assert "demoo" in refusal("train", "experiment=demoo")


def test_a_missing_mandatory_value_is_named() -> None:
    assert "input" in refusal("ingest", "output=x")


def test_without_mmseqs_the_three_mends_are_named(tmp_path: Path) -> None:
    line = refusal(
        "prepare",
        f"data.input={few_proteins(tmp_path / 'f.fasta', 5)}",
        f"work_dir={tmp_path / 'run'}",
        MMSEQS_BIN=str(tmp_path / "absent"),
    )
    assert "MMSEQS_BIN" in line


def test_a_folder_without_write_permission_is_named() -> None:
    from d2plm.data.ingest import ingest

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        fasta = few_proteins(folder / "f.fasta", 5)
        locked = folder / "locked"
        locked.mkdir(mode=0o555)
        with as_ordinary_user(), pytest.raises(DataError, match="locked"):
            ingest(fasta, locked / "store")
        assert not any(locked.iterdir())


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Root may write anywhere: give that up inside the block."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_work_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    fasta = few_proteins(tmp_path / "f.fasta", 5)
    assert "file" in refusal(
        "prepare", f"data.input={fasta}", f"work_dir={tmp_path / 'file' / 'run'}", "tracking=none"
    )


def test_a_folder_that_is_not_a_model_is_named(tmp_path: Path) -> None:
    fasta = few_proteins(tmp_path / "f.fasta", 5)
    assert "no such file or folder" in refusal(
        "score", f"model_dir={tmp_path / 'none'}", f"input={fasta}"
    )
    (tmp_path / "empty").mkdir()
    assert "not a model folder" in refusal(
        "generate", f"model_dir={tmp_path / 'empty'}", f"output={tmp_path / 'g.fasta'}"
    )


def test_a_dead_tracking_server_is_named(prepared: Prepared, tmp_path: Path) -> None:
    line = refusal(
        "train",
        *prepared.arguments(),
        f"output_dir={tmp_path / 'o'}",
        MLFLOW_TRACKING_URI="http://127.0.0.1:9",
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
    )
    assert "127.0.0.1:9" in line


def test_help_names_only_commands_that_exist() -> None:
    lines = d2plm("--help").stdout.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    for name in [name for name in names if not name.startswith("-")]:
        assert d2plm(name, "--help").returncode == 0, name


def test_help_loads_nothing_that_is_slow_to_import() -> None:
    code = (
        "import sys; from d2plm.cli import main; main(['--help']); "
        "slow = {'torch', 'hydra', 'numpy', 'mlflow', 'transformers', 'kfp'} & set(sys.modules); "
        "sys.exit(f'{slow} were imported' if slow else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
