"""Two of every command at once in one new folder: both work, or one is rejected in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.integration.conftest import REPOSITORY, few_proteins

pytestmark = pytest.mark.thorough


def both(*words: str) -> list[str]:
    """Run a command twice at once; returns what each wrote."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "d2plm", *words],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    written = [process.communicate(timeout=600)[0] for process in running]
    codes = sorted(process.returncode for process in running)
    assert codes[0] == 0, written
    for process, text in zip(running, written, strict=True):
        assert "Traceback" not in text, text
        if process.returncode:
            last = text.strip().splitlines()[-1]
            assert last.startswith("d2plm: error: "), text
    return written


def test_two_of_every_command_at_once(tmp_path: Path) -> None:
    work, few = tmp_path / "a run", few_proteins(tmp_path / "few.fasta", 60)
    settings = ["experiment=debug", f"data.input={few}", f"work_dir='{work}'"]
    model = f"model_dir='{work / 'diffusion' / 'model'}'"
    both("ingest", f"input={few}", f"output='{tmp_path / 'raw'}'")
    both("prepare", *settings)
    both("train", *settings)
    both("evaluate", *settings)
    both("register", *settings)
    both("report", f"output_dir='{work / 'diffusion'}'")
    both("export", *settings, f"model_dir='{tmp_path / 'exported'}'")
    both("generate", model, "generation.number=2", f"output='{tmp_path / 'made.fasta'}'")
    both(
        "score", model, f"input='{tmp_path / 'made.fasta'}'", f"output='{tmp_path / 'scores.csv'}'"
    )
    both("pipeline", "run", *settings)
    client = MlflowClient(f"sqlite:///{work / 'mlflow.db'}")
    (model_known,) = client.search_registered_models()
    assert len(client.search_model_versions(f"name = '{model_known.name}'")) == 1
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert len(runs) == 1
    lines = (work / "diffusion" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(set(lines)), "no row is written twice"
    assert (tmp_path / "made.fasta").read_text().count(">") == 2
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 3
