"""d2plm scaling: the runs, their cost, and settings that are rejected before any run starts."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.assembly.training_run import model_config
from d2plm.commands import scaling
from d2plm.commands.scaling import plan, run
from d2plm.config import compose
from d2plm.core.errors import ConfigError
from d2plm.evaluation.scaling import Law
from d2plm.model.flops import token_parameters, training_flops
from tests.conftest import Captured, MonkeyPatch
from tests.evaluations import invented_evaluation

LENGTHS = np.random.default_rng(0).integers(40, 900, 500)
LAW = Law(2.7, 1.2, 0.3, 30.0, 0.4)


def experiment(*words: str) -> Any:
    return compose("scaling", ["experiment=scaling", *words])


def test_the_experiment_is_three_sizes_with_three_budgets() -> None:
    runs = plan(experiment())
    expected = [(size, n) for size in ("small", "medium", "large") for n in (100, 300, 900)]
    assert [(one.name, one.trainer.max_steps) for one in runs.values()] == expected
    for (size, steps), (name, one) in zip(expected, runs.items(), strict=True):
        nominal = {"small": 0.1e6, "medium": 0.4e6, "large": 1.5e6}[size]
        assert token_parameters(model_config(one)) == pytest.approx(nominal, rel=0.15)
        assert name == one.tracking.run_name == f"{size}, {steps} steps"
        assert one.output_dir == f"runs/scaling/{size}/steps{steps}"


def test_a_budget_in_flops_is_that_of_the_training() -> None:
    runs = plan(experiment("steps=null", "flops=[1e12,3e12,1e13]"))
    for one, budget in zip(runs.values(), [1e12, 3e12, 1e13] * 3, strict=True):
        assert (one.trainer.flops_budget, one.trainer.max_steps) == (budget, None)
    folders = [one.output_dir for one in runs.values()]
    assert len({*folders}) == 9 and folders[0] == "runs/scaling/small/flops1e+12"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps=[1,2,2]"], "at least 3 different"),
        (["steps=[1,2,0]"], r"steps=\[1, 2, 0\]"),
        (["steps=null"], "exactly one"),
        (["flops=[1e12,2e12,3e12]"], "exactly one"),
        (["sizes.large.model.hidden_size=x"], "model.hidden_size='x'"),
        (["sizes.small.model.hidden_sizes=64"], "sizes.small: .*'model.hidden_sizes'"),
    ],
)
def test_what_gives_no_law_is_rejected(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(experiment(f"work_dir={tmp_path}", *words))
    assert not any(tmp_path.iterdir())


def test_sizes_must_differ(tmp_path: Path) -> None:
    config = experiment(f"work_dir={tmp_path}")
    config.sizes["medium"] = config.sizes["small"]
    with pytest.raises(ConfigError, match="different numbers of parameters"):
        run(config)


@pytest.fixture
def in_place_of_training(monkeypatch: MonkeyPatch) -> dict[str, Any]:
    """Runs that end at once, with the bounds of a known law."""
    seen: dict[str, Any] = {"masks": {}}

    class Store:
        lengths = LENGTHS

    def execute(runs: Mapping[str, Any], commands: Any, parallel: int) -> None:
        seen["runs"], seen["commands"], seen["parallel"] = runs, commands, parallel

    def forecast(config: Any) -> dict[str, str]:
        assert "runs" not in seen, "all runs are checked before the first starts"
        seen.setdefault("checked", []).append(config.tracking.run_name)
        return {}

    def run_of(folder: Path) -> Any:
        return next(run for run in seen["runs"].values() if run.model_dir == str(folder))

    def load_scores(folder: Path) -> tuple[Any, None]:
        run = run_of(folder)
        tokens = run.trainer.max_steps * 4096
        nelbo = float(LAW.loss(token_parameters(model_config(run)), tokens))
        digests = {"validation": "v", "masks": seen["masks"].get(run.name, "m")}
        return invented_evaluation(math.exp(nelbo), {}, digests=digests), None

    for name, stand_in in (
        ("prepare_data", lambda config, runs: None),
        ("training_stores", lambda config: {"train": Store()}),
        ("load_scores", load_scores),
        ("read_provenance", lambda folder: {"step": run_of(folder).trainer.max_steps}),
    ):
        monkeypatch.setattr(scaling, name, stand_in)
    monkeypatch.setattr("d2plm.assembly.sweep.forecast", forecast)
    monkeypatch.setattr("d2plm.assembly.sweep._run_here", execute)
    monkeypatch.setattr("d2plm.evaluation.scaling.resampled_laws", lambda law, *_, **__: [law] * 2)
    return seen


def test_every_run_is_trained_and_evaluated_and_the_law_is_written(
    in_place_of_training: dict[str, Any], tmp_path: Path, capsys: Captured
) -> None:
    results = run(experiment(f"work_dir={tmp_path}"))
    assert in_place_of_training["commands"] == ("train", "evaluate")
    assert in_place_of_training["parallel"] == 2
    names = list(in_place_of_training["runs"])
    assert in_place_of_training["checked"] == names
    assert len(names) == 9
    assert names[0] == "large, 900 steps", "the longest run first"
    runs = in_place_of_training["runs"]
    for point, name in zip(results["points"], reversed(names), strict=True):
        assert point["tokens"] == runs[name].trainer.max_steps * 4096
        segments = np.minimum(LENGTHS + 2, 512).tolist()
        whole = training_flops(model_config(runs[name]), segments)
        assert point["flops"] == pytest.approx(whole * point["tokens"] / sum(segments))
    assert results["law"]["irreducible"] == pytest.approx(LAW.irreducible, rel=0.01)
    assert results["law"]["alpha"] == pytest.approx(LAW.alpha, rel=0.05)
    assert json.loads((tmp_path / "scaling.json").read_text()) == json.loads(json.dumps(results))
    assert (tmp_path / "scaling.md").read_text() == capsys.readouterr().out
    assert (tmp_path / "scaling.png").is_file()


def test_other_masks_make_no_law(in_place_of_training: dict[str, Any], tmp_path: Path) -> None:
    in_place_of_training["masks"]["medium"] = "others"
    with pytest.raises(ConfigError, match="different residues or masks"):
        run(experiment(f"work_dir={tmp_path}"))
    assert not (tmp_path / "scaling.json").exists()
