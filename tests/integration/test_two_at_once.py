"""Two of every command at once in one new folder: both work, or one is rejected in one line."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.commands import d2plm, python_c
from tests.integration.conftest import FORKED_STEPS, few_proteins

pytestmark = pytest.mark.thorough


def both(*words: str) -> None:
    """Run a command twice at once."""
    with ThreadPoolExecutor(2) as pool:
        run = partial(python_c, FORKED_STEPS) if words[0] == "pipeline" else d2plm
        ended = list(pool.map(lambda _: run(*words), range(2)))
    assert 0 in {one.returncode for one in ended}, ended
    for one in ended:
        assert "Traceback" not in one.stderr, one.stderr
        if one.returncode:
            assert one.stderr.strip().splitlines()[-1].startswith("d2plm: error: "), one.stderr


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
