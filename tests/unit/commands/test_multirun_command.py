"""Sweeps: the runs, their names, and settings that are rejected before any run starts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from d2plm.commands import multirun
from d2plm.commands.multirun import collect, expand, folder_name, sweep_table
from d2plm.config import flat, parse_arguments
from d2plm.core.errors import ConfigError
from tests.conftest import MonkeyPatch, write_store

Sweep = Callable[..., Any]


def names(*words: str) -> list[str]:
    return list(expand(parse_arguments("train", ["--multirun", *words])))


def test_every_combination_is_a_run_and_the_last_key_varies_fastest() -> None:
    assert names("optimizer.learning_rate=1e-3,4e-4", "model=nano,8m", "trainer.seed=1") == [
        "optimizer.learning_rate=0.001,model=nano",
        "optimizer.learning_rate=0.001,model=8m",
        "optimizer.learning_rate=0.0004,model=nano",
        "optimizer.learning_rate=0.0004,model=8m",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.seed=1"], "no key has several values"),
        (["optimizer.learning_rate=1e-3,0.001"], "occurs twice"),
        (["trainer.seed=1,2", "trainer.seed=3,4"], "is set twice"),
        (["optimizer.learning_rate=interval(0,1)"], "has no list of values"),
        (["trainer.seed=1,2", "model_dir=x"], "set multirun_dir"),
        (["parallel=1,2"], "cannot vary"),
        (["model=glob(x*)"], "matches nothing"),
        (["trainer.seed=1,[2"], r"trainer.seed=1,\[2"),
    ],
)
def test_what_is_not_a_sweep_is_rejected(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        names(*words)


def test_a_run_s_folder_is_its_name_where_that_is_safe() -> None:
    safe = "optimizer.learning_rate=1e-05,model=nano"
    assert folder_name(safe) == safe
    odd, other = folder_name("data.input=a/b c"), folder_name("data.input=a/b:c")
    assert "/" not in odd and " " not in odd
    assert odd != other, "names that differ have folders that differ"
    assert len(folder_name("x" * 1000)) < 255


@pytest.fixture
def started(monkeypatch: MonkeyPatch, tmp_path: Path, proteins: list[Any]) -> list[dict[str, Any]]:
    """What would have been started on prepared data, in place of starting it."""
    calls: list[dict[str, Any]] = []
    folder = tmp_path / "run" / "data"
    chosen = {"train": proteins[:20], "validation": proteins[20:25]}
    stores = {name: write_store(folder / f"{name}_lmdb", some) for name, some in chosen.items()}
    monkeypatch.setattr("d2plm.assembly.sweep._run_here", lambda runs, *_: calls.append(runs))
    monkeypatch.setattr("d2plm.assembly.training_run.open_stores", lambda config: stores)
    return calls


@pytest.fixture
def sweep(tmp_path: Path, started: list[dict[str, Any]]) -> Sweep:
    def call(*words: str) -> dict[str, Any]:
        given = [f"work_dir={tmp_path / 'run'}", "tracking=none", *words]
        multirun.run(parse_arguments("train", ["--multirun", *given]))
        return started[-1]

    return call


def test_runs_differ_in_what_varies_and_in_their_folders(sweep: Sweep, tmp_path: Path) -> None:
    runs = sweep("optimizer.learning_rate=1e-3,4e-4", "trainer.max_steps=5")
    fast, slow = (runs[f"optimizer.learning_rate={rate}"] for rate in ("0.001", "0.0004"))
    differ = {key for key, value in flat(fast).items() if flat(slow)[key] != value}
    own = {"output_dir", "model_dir", "tracking.run_name"}
    assert differ == {"optimizer.learning_rate", *own}
    folder = tmp_path / "run" / "multirun" / "optimizer.learning_rate"
    assert fast.output_dir == str(folder / "optimizer.learning_rate=0.001")
    assert fast.model_dir == f"{fast.output_dir}/model"
    assert fast.data.prepared_dir == str(tmp_path / "run" / "data"), "shared"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optimizer.learning_rate=-1,1e-3,-2", "rate=-1.*rate=-2"),
        ("model.num_attention_heads=2,3", "num_attention_heads=3"),
        ("model=8m,nan0", "did you mean 'nano'"),
        ("data.token_budget=4096,10", "data.token_budget=10"),
        ("trainer.seed=1,2 model.hidden_sise=3", "'model.hidden_size'"),
    ],
)
def test_runs_are_checked(words: str, message: str, sweep: Sweep, started: list[Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep(*words.split())
    assert not started


def test_a_worker_does_not_sweep(sweep: Sweep, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ConfigError, match="cannot run under torchrun"):
        sweep("trainer.seed=1,2")


def finished(folder: Path, seed: int, nelbo: float) -> Any:
    rows = [
        {"step": 1, "validation_nelbo": 9.0, "validation_perplexity": 99.0},
        {"step": 2, "validation_nelbo": nelbo, "validation_perplexity": 2 * nelbo},
        {"step": 3, "loss": 1.0},
    ]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parse_arguments("train", [f"output_dir={folder}", f"trainer.seed={seed}"]).compose()


def test_the_table_has_the_last_figures_the_best_first(tmp_path: Path) -> None:
    runs = {f"s={i}": finished(tmp_path / str(i), i, nelbo) for i, nelbo in enumerate((2.5, 2.25))}
    varied = {name: {"s": name[-1]} for name in runs}
    results = collect(varied, runs)
    assert results["best"] == "s=1"
    assert [row["validation_nelbo"] for row in results["runs"]] == [2.25, 2.5]
    assert results["same_residues"]
    lines = sweep_table(results).splitlines()
    assert lines[0] == "| s | validation NELBO, nats/residue | perplexity | step |"
    assert lines[2] == "| 1 | 2.2500 | 4.500 | 2 |"
    assert lines[-1] == "Best: s=1."
    elsewhere = replace(runs["s=1"], data=replace(runs["s=1"].data, prepared_dir="elsewhere"))
    results = collect(varied, {**runs, "s=1": elsewhere})
    assert "do not compare" in sweep_table(results)


def test_a_run_without_a_figure_comes_last_and_is_never_best(tmp_path: Path) -> None:
    runs = {f"s={i}": finished(tmp_path / str(i), i, 2.5) for i in range(2)}
    varied = {name: {"s": name[-1]} for name in runs}
    (tmp_path / "0" / "metrics.jsonl").unlink()
    results = collect(varied, runs)
    assert [row["name"] for row in results["runs"]] == ["s=1", "s=0"]
    assert sweep_table(results).splitlines()[3] == "| 0 | – | – | – |"
    (tmp_path / "1" / "metrics.jsonl").unlink()
    assert collect(varied, runs)["best"] is None
