"""The speedrun: entries compose, finished runs are reused, the table covers all seeds."""

import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.measure import BenchError
from benchmarks.speedrun import run as speedrun

ENTRIES = {"good": ["trainer.max_steps=1"], "bad": ["trainer.max_steps=2"]}


def line(entry: str, seed: int, perplexity: float) -> dict[str, Any]:
    settings = speedrun.settings_digest(ENTRIES[entry])
    return {
        "entry": entry,
        "seed": seed,
        "settings": settings,
        "perplexity": perplexity,
        "million_tokens": 2.0,
        "cpu_seconds": 100.0 + seed,
        "held_out": "all",
    }


def test_the_page_has_the_table_of_the_entries_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = cache(lambda *overrides, of=speedrun.settings_digest: of(overrides))
    monkeypatch.setattr(speedrun, "settings_digest", lambda overrides: digest(*overrides))
    entries, results = yaml.safe_load(speedrun.ENTRIES.read_text()), speedrun.read_results()
    for result in results:
        assert result["settings"] == speedrun.settings_digest(entries[result["entry"]])
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    assert speedrun.table(entries, results) in page


def test_the_table_has_the_mean_of_the_seeds_of_the_entries_as_they_are_and_the_best_last() -> None:
    results = [line("good", seed, 17.0 + seed / 10) for seed in (1, 0)] + [line("bad", 0, 18.0)]
    old = {**line("good", 0, 1.0), "settings": "others"}
    *_, bad, good = speedrun.table(ENTRIES, [old, *results]).splitlines()
    assert bad.startswith("| bad | 2.0 | 100 | **18.000** | 18.000 |")
    assert good.startswith("| good | 2.0 | 100 | **17.050** | 17.000 17.100 |")


def test_two_entries_are_compared_over_their_common_seeds() -> None:
    # Differences of 0.1 and 0.3: mean 0.2, standard error 0.1, t(1) 12.706.
    results = [line("good", seed, 17.0) for seed in (0, 1, 2)]
    results += [line("bad", seed, 17.0 * np.exp(x)) for seed, x in ((0, 0.1), (1, 0.3))]
    shown = speedrun.difference(ENTRIES, results, ("bad", "good"))
    assert shown == "bad − good: +0.200 nats [-1.071, +1.471], 2 seeds"
    with pytest.raises(BenchError, match="seed"):
        speedrun.difference(ENTRIES, results[:3], ("bad", "good"))


def test_only_what_is_missing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedrun, "ENTRIES", tmp_path / "entries.yaml")
    monkeypatch.setattr(speedrun, "RESULTS", tmp_path / "results.jsonl")
    (tmp_path / "entries.yaml").write_text("good: [trainer.max_steps=1]")
    (tmp_path / "results.jsonl").write_text(json.dumps(line("good", 0, 17.0)) + "\n")
    monkeypatch.setattr(speedrun, "run", lambda name, overrides, seed: line(name, seed, 17.2))
    monkeypatch.setattr(sys, "argv", ["run", "--all", "--seeds", "0", "1", "--table"])
    speedrun.main()
    assert [result["seed"] for result in speedrun.read_results()] == [0, 1]
    monkeypatch.setattr(sys, "argv", ["run", "fast"])
    with pytest.raises(BenchError, match="fast"):
        speedrun.main()


def test_results_of_other_proteins_are_reported_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speedrun, "RESULTS", tmp_path / "results.jsonl")
    (tmp_path / "results.jsonl").write_text(json.dumps(line("good", 0, 17.0)) + "\n")
    monkeypatch.setattr(speedrun, "SequenceStore", lambda path: SimpleNamespace(digest="others"))
    with pytest.raises(BenchError, match="held-out"):
        speedrun.run("good", ENTRIES["good"], 1)


def test_a_curve_is_the_one_that_its_entries_lie_on() -> None:
    entries = {str(seconds): [f"trainer.max_steps={seconds}"] for seconds in (100, 400, 1600)}
    results = [
        {
            "entry": name,
            "settings": speedrun.settings_digest(overrides),
            "cpu_seconds": float(name),
            "perplexity": float(np.exp(2.8 + 0.5 * float(name) ** -0.5)),
        }
        for name, overrides in entries.items()
    ]
    first, *_, last = speedrun.curve(entries, results, [*entries], [10_000]).splitlines()
    assert first == "3 entries: L = 2.800 nats (16.44), b = 0.50"
    assert last == f"10,000 CPU seconds: {np.exp(2.805):.3f}"
    with pytest.raises(BenchError, match="three"):
        speedrun.curve(entries, results, ["100", "400"], [])
