"""The speedrun: entries compose, finished runs are reused, the table covers all seeds."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from benchmarks.measure import BenchError
from benchmarks.speedrun import run as speedrun

GOOD = {"good": ["trainer.max_steps=1"]}


def line(entry: str, seed: int, perplexity: float, settings: str = "") -> dict[str, Any]:
    return {
        "entry": entry,
        "seed": seed,
        "settings": settings or speedrun.settings_digest(GOOD["good"]),
        "perplexity": perplexity,
        "million_tokens": 2.0,
        "cpu_seconds": 100.0 + seed,
        "held_out": "all",
    }


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of results with the first seed of the only entry, and the same of other settings."""
    monkeypatch.setattr(speedrun, "ENTRIES", tmp_path / "entries.yaml")
    monkeypatch.setattr(speedrun, "RESULTS", tmp_path / "results.jsonl")
    (tmp_path / "entries.yaml").write_text(json.dumps(GOOD))
    lines = (line("good", 0, 17.0), line("good", 1, 1.0, settings="others"))
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return tmp_path / "results.jsonl"


def test_the_page_has_the_table_of_the_entries_as_they_are() -> None:
    runs = speedrun.runs_of(yaml.safe_load(speedrun.ENTRIES.read_text()))
    assert sum(map(len, runs.values())) == len(speedrun.read_results())
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    assert speedrun.table(runs) in page


def test_the_table_has_the_mean_of_the_seeds_and_the_best_last() -> None:
    good = [line("good", seed, 17.0 + seed / 10, "now") for seed in (1, 0)]
    runs = {"good": good, "bad": [line("bad", 0, 18.0, "now")], "none": []}
    *_, bad, good_row = speedrun.table(runs).splitlines()
    assert bad.startswith("| bad | 2.0 | 100 | **18.000** | 18.000 |")
    assert good_row.startswith("| good | 2.0 | 100 | **17.050** | 17.000 17.100 |")


def test_only_what_is_missing_is_run(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedrun, "run", lambda name, overrides, seed: line(name, seed, 17.2))
    monkeypatch.setattr(sys, "argv", ["run", "--all", "--seeds", "0", "1", "--table"])
    speedrun.main()
    assert [result["seed"] for result in speedrun.runs_of(GOOD)["good"]] == [0, 1]
    monkeypatch.setattr(sys, "argv", ["run", "fast"])
    with pytest.raises(BenchError, match="fast"):
        speedrun.main()


def test_results_of_other_proteins_are_reported_before_a_run(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speedrun, "SequenceStore", lambda path: SimpleNamespace(digest="others"))
    with pytest.raises(BenchError, match="held-out"):
        speedrun.run("good", GOOD["good"], 1)
