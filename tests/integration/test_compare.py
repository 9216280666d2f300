"""d2plm compare: every arm with every seed, the table, and resuming an interrupted run."""

import json
import os
from pathlib import Path

import pytest

from tests.commands import d2plm
from tests.integration.conftest import few_proteins

pytestmark = pytest.mark.thorough  # trains several models


def arguments(proteins: Path, work_dir: Path) -> list[str]:
    small = ("hidden_size=32", "num_hidden_layers=1", "num_attention_heads=2")
    return [
        "experiment=compare_shuffled",
        f"data.input={proteins}",
        *("data.validation_fraction=0.2", "data.search.sensitivity=4.0"),
        "data.search_directions=from_held_out",
        *("data.max_length=128", "data.token_budget=2048", "model.max_position_embeddings=128"),
        *(f"model.{size}" for size in (*small, "intermediate_size=32")),
        *("trainer.max_steps=2", "trainer.compile=false", "callbacks.evaluation.every=2"),
        *("callbacks.evaluation.sequences=4", "evaluation.masks_per_sequence=1"),
        *("evaluation.nearest_identity=false", "seeds=[3]", f"work_dir='{work_dir}'"),
    ]


def test_arms_are_trained_evaluated_and_set_beside_one_another(tmp_path: Path) -> None:
    proteins, work_dir = few_proteins(tmp_path / "few.fasta"), tmp_path / "a comparison"
    result = d2plm("compare", *arguments(proteins, work_dir))
    assert result.returncode == 0, result.stdout + result.stderr
    comparison = json.loads((work_dir / "compare_shuffled.json").read_text())
    assert list(comparison["arms"]) == ["diffusion", "shuffled"]
    assert comparison["arms"]["diffusion"]["difference"] is None
    difference = comparison["arms"]["shuffled"]["difference"]
    low, high = difference["interval"]
    assert low < difference["value"] < high
    assert "| shuffled | " in result.stdout
    assert (work_dir / "compare_shuffled.md").read_text() in result.stdout
    assert (work_dir / "compare_shuffled.png").stat().st_size > 5_000
    config = (work_dir / "shuffled" / "seed3" / "config.yaml").read_text()
    assert "residues: shuffled" in config
    assert "seed: 3" in config

    weights = work_dir / "diffusion" / "seed3" / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    os.remove(work_dir / "shuffled" / "seed3" / "model" / "evaluation.json")
    again = d2plm("compare", *arguments(proteins, work_dir))
    assert again.returncode == 0, again.stdout + again.stderr
    assert weights.stat().st_mtime_ns == before, "a finished run is not trained again"
    assert json.loads((work_dir / "compare_shuffled.json").read_text()) == comparison
