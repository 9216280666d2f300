"""Sweeps, comparisons and scaling laws: their runs, what is rejected before any, and results."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from mlflow import MlflowClient

from d2plm.assembly.sweep import Sweep, one_run, run_sweep
from d2plm.assembly.training_run import model_config
from d2plm.commands import compare, multirun, scaling
from d2plm.commands.multirun import collect, expand, folder_name, sweep_table
from d2plm.config import compose, flat, parse_arguments
from d2plm.core.errors import ConfigError
from d2plm.evaluation.scaling import Law
from d2plm.model.flops import token_parameters, training_flops
from tests.conftest import Captured, MonkeyPatch, write_store
from tests.evaluations import invented_evaluation

Start = Callable[..., Any]


def names(*words: str) -> list[str]:
    return list(expand(parse_arguments("train", ["--multirun", *words])))


def test_every_combination_is_a_run_and_the_last_key_varies_fastest() -> None:
    rates, models = ("0.001", "0.0004"), ("nano", "8m")
    expected = [f"optimizer.learning_rate={rate},model={one}" for rate in rates for one in models]
    given = "optimizer.learning_rate=1e-3,4e-4", "model=nano,8m", "trainer.seed=1"
    assert names(*given) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(("trainer.seed=1", "no key has several values"), ("parallel=1,2", "cannot vary")),
        ("optimizer.learning_rate=1e-3,0.001", "occurs twice"),
        ("optimizer.learning_rate=interval(0,1)", "has no list of values"),
        ("trainer.seed=1,2 trainer.seed=3,4", "is set twice"),
        ("trainer.seed=1,2 model_dir=x", "set multirun_dir"),
        *(("model=glob(x*)", "matches nothing"), ("trainer.seed=1,[2", r"trainer.seed=1,\[2")),
    ],
)
def test_what_is_not_a_sweep_is_rejected(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        names(*words.split())


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

    def record(runs: dict[str, Any], commands: list[str], parallel: int) -> None:
        assert (list(commands), parallel) == (["train"], 1)
        calls.append(runs)

    monkeypatch.setattr("d2plm.assembly.sweep._run_here", record)
    monkeypatch.setattr("d2plm.assembly.training_run.open_stores", lambda config: stores)
    return calls


@pytest.fixture
def sweep(tmp_path: Path, started: list[dict[str, Any]]) -> Start:
    def call(*words: str) -> dict[str, Any]:
        given = [f"work_dir={tmp_path / 'run'}", "tracking=none", *words]
        multirun.run(parse_arguments("train", ["--multirun", *given]))
        return started[-1]

    return call


def test_runs_differ_in_what_varies_and_in_their_folders(sweep: Start, tmp_path: Path) -> None:
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
        *(("model.num_attention_heads=2,3", "heads=3"), ("model=8m,nan0", "did you mean 'nano'")),
        ("data.token_budget=4096,10", "data.token_budget=10"),
        ("trainer.seed=1,2 model.hidden_sise=3", "'model.hidden_size'"),
    ],
)
def test_runs_are_checked(words: str, message: str, sweep: Start, started: list[Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep(*words.split())
    assert not started


def test_a_worker_does_not_sweep(sweep: Start, monkeypatch: MonkeyPatch) -> None:
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


Runs = dict[str, Any]


@pytest.fixture
def executed(monkeypatch: MonkeyPatch) -> dict[str, Any]:
    """The runs that would have been started, in place of starting them."""
    found: dict[str, Any] = {}
    monkeypatch.setattr("d2plm.assembly.sweep._run_here", lambda runs, *_: found.update(runs))
    monkeypatch.setattr("d2plm.assembly.sweep.forecast", lambda config: {"steps": "1"})
    return found


def swept(tmp_path: Path, *words: str) -> dict[str, Any]:
    base = [f"work_dir={tmp_path}", f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}", *words]
    runs = {
        name: one_run(compose("compare", [*base, f"paradigm={name}"]), name, tmp_path / name)
        for name in ("diffusion", "flow_matching")
    }
    listed = Sweep(
        *(runs["diffusion"], runs, ("train", "evaluate")),
        varied={"paradigm": runs},
        results=tmp_path / "results",
        reduce=lambda: {"best": "diffusion"},
        table=lambda document: f"| {document['best']} |",
        plot=lambda document, file: file.touch(),
    )
    return dict(run_sweep(listed))


def test_runs_have_a_parent(
    executed: Runs, tmp_path: Path, new_mlflow_store: Path, capsys: Captured
) -> None:
    shutil.copy(new_mlflow_store, tmp_path)
    assert swept(tmp_path) == {"best": "diffusion"}
    assert capsys.readouterr().out == "| diffusion |\n"
    tracking = [run.tracking for run in executed.values()]
    assert [one.run_name for one in tracking] == ["diffusion", "flow_matching"]
    assert {one.experiment for one in tracking} == {"d2plm-diffusion"}
    (parent,) = {one.parent_run_id for one in tracking}
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert client.get_run(parent).data.params == {"paradigm": "diffusion, flow_matching"}
    files = {file.path for file in client.list_artifacts(parent)}
    assert files == {f"results.{suffix}" for suffix in ("json", "md", "png")}


def test_bad_runs_are_not_started_and_a_dry_run_writes_nothing(
    executed: Runs, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    forecasts = swept(tmp_path, "dry_run=true")
    assert forecasts == {"diffusion": {"steps": "1"}, "flow_matching": {"steps": "1"}}
    impossible = Mock(side_effect=ConfigError("impossible"))
    monkeypatch.setattr("d2plm.assembly.sweep.forecast", impossible)
    with pytest.raises(ConfigError, match=r"no run was started\. diffusion and 1 more: impossible"):
        swept(tmp_path)
    assert not executed and not any(tmp_path.iterdir())


@pytest.mark.parametrize("experiment", ["paradigms", "losses", "shuffled"])
def test_every_arm_is_a_whole_configuration(experiment: str) -> None:
    config = compose("compare", [f"experiment=compare_{experiment}"])
    assert next(iter(config.arms)) == "diffusion"
    for arm in config.arms:
        settings = compare.run_settings(config, arm, 7)
        assert (settings.trainer.seed, settings.trainer.max_steps) == (7, 1000)
        assert settings.output_dir == f"runs/compare/{arm}/seed7"
        assert settings.data.token_budget == config.data.token_budget, "equal budgets"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment=compare_losses", "seeds=[]"], "seeds"),
        (["experiment=compare_losses", "seeds=[1,1]"], "seeds"),
        (["experiment=compare_losses", "arms.x.paradigm.losss=mean"], "arms"),
        ([], r"arms.*at least two"),
    ],
)
def test_impossible_settings_start_nothing(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        compare.run(compose("compare", [*words, f"work_dir={tmp_path}"]))
    assert not any(tmp_path.iterdir())


LENGTHS = np.random.default_rng(0).integers(40, 900, 500)
LAW = Law(2.7, 1.2, 0.3, 30.0, 0.4)


def experiment(*words: str) -> Any:
    return compose("scaling", ["experiment=scaling", *words])


def test_the_experiment_is_three_sizes_with_three_budgets() -> None:
    runs = scaling.plan(experiment())
    expected = [(size, n) for size in ("small", "medium", "large") for n in (100, 300, 900)]
    for (size, steps), (name, one) in zip(expected, runs.items(), strict=True):
        assert (one.name, one.trainer.max_steps) == (size, steps)
        assert name == one.tracking.run_name == f"{size}, {steps} steps"
        assert one.output_dir == f"runs/scaling/{size}/steps{steps}"


def test_a_budget_in_flops_is_that_of_the_training() -> None:
    runs = scaling.plan(experiment("steps=null", "flops=[1e12,3e12,1e13]"))
    for one, budget in zip(runs.values(), [1e12, 3e12, 1e13] * 3, strict=True):
        assert (one.trainer.flops_budget, one.trainer.max_steps) == (budget, None)
    folders = [one.output_dir for one in runs.values()]
    assert len({*folders}) == 9 and folders[0] == "runs/scaling/small/flops1e+12"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((["steps=[1,2,2]"], "at least 3 different"), (["steps=[1,2,0]"], r"steps=\[1, 2, 0\]")),
        *((["steps=null"], "exactly one"), (["flops=[1e12,2e12,3e12]"], "exactly one")),
        (["sizes.large.model.hidden_size=x"], "model.hidden_size='x'"),
        (["sizes.small.model.hidden_sizes=64"], "sizes.small: .*'model.hidden_sizes'"),
    ],
)
def test_what_gives_no_law_is_rejected(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        scaling.run(experiment(f"work_dir={tmp_path}", *words))
    assert not any(tmp_path.iterdir())


def test_sizes_differ_and_masks_agree(in_place_of_training: dict[str, Any], tmp_path: Path) -> None:
    config = experiment(f"work_dir={tmp_path}")
    in_place_of_training["masks"]["medium"] = "others"
    with pytest.raises(ConfigError, match="different residues or masks"):
        scaling.run(config)
    assert not (tmp_path / "scaling.json").exists()
    config.sizes["medium"] = config.sizes["small"]
    with pytest.raises(ConfigError, match="different numbers of parameters"):
        scaling.run(config)


@pytest.fixture
def in_place_of_training(monkeypatch: MonkeyPatch) -> dict[str, Any]:
    """Runs that end at once, with the bounds of a known law."""
    seen: dict[str, Any] = {"masks": {}}

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
        ("training_stores", lambda config: {"train": Mock(lengths=LENGTHS)}),
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
    results = scaling.run(experiment(f"work_dir={tmp_path}"))
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
