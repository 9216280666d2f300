"""Profiler: a trace of the chosen steps and of no other, beside a table of its operators."""

import gzip
import json
from pathlib import Path

import pytest

from d2plm.settings.callbacks import ProfilerSettings
from d2plm.training.callbacks.profiler import Profiler
from tests.unit.training.conftest import Build, Recorder


def spans(file: Path) -> list[str]:
    """The names of everything in a trace."""
    with gzip.open(file, "rt") as stream:
        return [event.get("name", "") for event in json.load(stream)["traceEvents"]]


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "run" / "profile").iterdir())


def test_the_chosen_steps_are_traced_and_no_other(build: Build, tmp_path: Path) -> None:
    profiler = Profiler(ProfilerSettings(start=2, steps=2))
    build(profiler, gradient_accumulation_steps=2, max_steps=5).train()
    assert files(tmp_path) == ["rank0.step-2.json.gz", "rank0.step-2.txt"]
    names = spans(tmp_path / "run" / "profile" / "rank0.step-2.json.gz")
    steps = sorted({name for name in names if name.startswith("ProfilerStep#")})
    assert steps == ["ProfilerStep#2", "ProfilerStep#3"]
    assert names.count("optimizer") == 2
    assert names.count("forward") == names.count("backward") == 4
    assert "Self CPU" in (tmp_path / "run" / "profile" / "rank0.step-2.txt").read_text()


def test_a_training_that_breaks_off_leaves_what_was_traced(build: Build, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(Profiler(ProfilerSettings(start=1, steps=100)), Recorder(stop_after=3)).train()
    assert files(tmp_path) == ["rank0.step-1.json.gz", "rank0.step-1.txt"]
    assert spans(tmp_path / "run" / "profile" / "rank0.step-1.json.gz").count("optimizer") == 2
