"""d2plm scaling: the runs, their cost, and settings that are rejected before any run starts."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.assembly.training_run import build_schedule, model_config
from d2plm.commands import scaling
from d2plm.commands.scaling import plan, run
from d2plm.config import changed, compose
from d2plm.core.errors import ConfigError
from d2plm.evaluation.result import Evaluation
from d2plm.evaluation.scaling import Law
from d2plm.model.flops import training_flops
from tests.evaluations import invented_evaluation

LENGTHS = np.random.default_rng(0).integers(40, 900, 500)
LAW = Law(2.7, 1.2, 0.3, 30.0, 0.4)


def experiment(*words: str) -> Any:
    return compose("scaling", ["experiment=scaling", *words])


def test_the_experiment_is_three_sizes_with_three_budgets() -> None:
    grid = plan(experiment(), LENGTHS)
    expected = ["small"] * 3 + ["medium"] * 3 + ["large"] * 3
    assert [planned.point.size for planned in grid] == expected
    for planned in grid:
        nominal = {"small": 0.1e6, "medium": 0.4e6, "large": 1.5e6}[planned.point.size]
        assert planned.point.parameters == pytest.approx(nominal, rel=0.15)
        steps = planned.config.trainer.max_steps
        assert planned.point.tokens == steps * 4096
        assert planned.config.output_dir == f"runs/scaling/{planned.point.size}/steps{steps}"
        assert planned.config.name == planned.point.size
    assert len({planned.config.output_dir for planned in grid}) == 9


def test_the_sizes_of_the_text_grid_are_the_shipped_models() -> None:
    config = compose("scaling", ["experiment=scaling_text"])
    for size, changes in config.sizes.items():
        sized = changed(config, changes, size)
        assert sized.model == compose("train", [f"model=text_{size}"]).model


def test_a_run_s_schedule_ends_with_its_budget() -> None:
    for planned in plan(experiment(), LENGTHS):
        steps = planned.config.trainer.max_steps
        factor = build_schedule(planned.config)(steps)
        assert factor(steps) == pytest.approx(0, abs=1e-6)
        assert factor(steps // 2) > 0.3


def test_the_flops_are_those_of_the_training_proteins() -> None:
    planned = plan(experiment(), LENGTHS)[-1]
    segments = np.minimum(LENGTHS + 2, 512).tolist()
    whole = training_flops(model_config(planned.config), segments)
    assert planned.point.flops == pytest.approx(whole * planned.point.tokens / sum(segments))


def test_a_budget_in_flops_gives_each_size_its_steps() -> None:
    grid = plan(experiment("steps=null", "flops=[1e12,3e12,1e13]"), LENGTHS)
    for planned, budget in zip(grid, [1e12, 3e12, 1e13] * 3, strict=True):
        step = planned.point.flops / planned.config.trainer.max_steps
        assert abs(planned.point.flops - budget) <= step / 2
    by_size = [planned.config.trainer.max_steps for planned in grid[2::3]]
    assert by_size == sorted(by_size, reverse=True), "the same compute is fewer steps when larger"


def test_a_budget_of_less_than_a_step_is_rejected() -> None:
    with pytest.raises(ConfigError, match="less than one step of size"):
        plan(experiment("steps=null", "flops=[10,20,30]"), LENGTHS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps=[1,2]"], r"steps=\[1, 2\]: must be .*at least 3"),
        (["steps=[1,2,2]"], "at least 3 different"),
        (["steps=[1,2,0]"], r"steps=\[1, 2, 0\]: must be"),
        (["steps=[1,2,2.5]"], r"steps=\[1, 2, 2.5\]: must be"),
        (["steps=null"], "exactly one"),
        (["flops=[1e12,2e12,3e12]"], "exactly one"),
        (["parallel=0"], "parallel=0"),
        (["sizes.large.model.hidden_size=x"], r"model.hidden_size='x': must be"),
        (["sizes.small.model.hidden_sizes=64"], r"sizes.small: unknown key 'model.hidden_sizes'"),
    ],
)
def test_what_gives_no_law_is_rejected_before_anything_is_computed(
    words: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(experiment(f"work_dir={tmp_path}", *words))
    assert not any(tmp_path.iterdir())


def test_sizes_must_differ(tmp_path: Path) -> None:
    config = experiment(f"work_dir={tmp_path}")
    config.sizes["medium"] = config.sizes["small"]
    with pytest.raises(ConfigError, match="different numbers of parameters"):
        run(config)
    del config.sizes["medium"]
    with pytest.raises(ConfigError, match="at least 3"):
        run(config)


def test_a_dry_run_forecasts_every_run_and_starts_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forecast(config: Any) -> dict[str, str]:
        return {"training": f"{config.trainer.max_steps} steps"}

    monkeypatch.setattr("d2plm.assembly.many_runs.forecast", forecast)
    words = [f"work_dir={tmp_path}", "data.residues=random", "dry_run=true"]
    forecasts = run(experiment(*words))
    assert next(iter(forecasts)) == "large, 900 steps" and len(forecasts) == 9
    assert forecasts["small, 100 steps"] == {"training": "100 steps"}
    printed = capsys.readouterr().out
    assert all(name in printed for name in forecasts)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def in_place_of_training(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs that end at once, with the bounds of a known law."""
    seen: dict[str, Any] = {"masks": {}}

    class Store:
        lengths = LENGTHS

    def run_all(runs: Mapping[str, Any], commands: Any, parallel: int) -> None:
        seen["runs"], seen["commands"], seen["parallel"] = runs, commands, parallel

    def load_scores(folder: Path) -> tuple[Evaluation, None]:
        planned = next(p for p in seen["grid"] if p.config.model_dir == str(folder))
        nelbo = float(LAW.loss(planned.point.parameters, planned.point.tokens))
        masks = seen["masks"].get(planned.point.size, "m")
        digests = {"validation": "v", "masks": masks}
        return invented_evaluation(math.exp(nelbo), {}, digests=digests), None

    def planned(*arguments: Any) -> Any:
        seen["grid"] = plan(*arguments)
        return seen["grid"]

    for name, stand_in in (
        ("prepare_data", lambda config: None),
        ("training_stores", lambda config: {"train": Store()}),
        ("check_runs", lambda runs: seen.setdefault("checked", list(runs))),
        ("run_all", run_all),
        ("load_scores", load_scores),
        ("plan", planned),
    ):
        monkeypatch.setattr(scaling, name, stand_in)
    monkeypatch.setattr("d2plm.evaluation.scaling.resampled_laws", lambda law, *_, **__: [law] * 2)
    return seen


def test_every_run_is_trained_and_evaluated_and_the_law_is_written(
    in_place_of_training: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(experiment(f"work_dir={tmp_path}"))
    assert in_place_of_training["commands"] == ("train", "evaluate")
    assert in_place_of_training["parallel"] == 2
    names = list(in_place_of_training["runs"])
    assert in_place_of_training["checked"] == names
    assert len(names) == 9
    assert names[0] == "large, 900 steps", "the longest run first"
    assert results["law"]["irreducible"] == pytest.approx(LAW.irreducible, rel=0.01)
    assert results["law"]["alpha"] == pytest.approx(LAW.alpha, rel=0.05)
    assert json.loads((tmp_path / "scaling.json").read_text()) == json.loads(json.dumps(results))
    assert (tmp_path / "scaling.md").read_text() == capsys.readouterr().out
    assert (tmp_path / "scaling.png").is_file()


def test_bounds_on_different_masks_make_no_law(
    in_place_of_training: dict[str, Any], tmp_path: Path
) -> None:
    in_place_of_training["masks"]["medium"] = "others"
    with pytest.raises(ConfigError, match="different residues or masks"):
        run(experiment(f"work_dir={tmp_path}"))
    assert not (tmp_path / "scaling.json").exists()
