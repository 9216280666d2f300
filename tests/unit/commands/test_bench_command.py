"""d2plm bench: settings, what is written, and what is refused before anything is measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from d2plm.bench.rows import Row, ratio_row, table
from d2plm.commands import bench
from d2plm.config import compose
from d2plm.core.errors import ConfigError
from tests.conftest import FASTA

FEW = FASTA.with_name("uniprot_500.fasta.gz")
TINY = [
    f"proteins={FEW}",
    "model.hidden_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.intermediate_size=32",
    "device=cpu",
    "token_budget=512",
    "max_length=128",
    "turns=2",
    "steps=1",
    "threads=1",
]


@pytest.mark.parametrize("command", ["train", "generate", "peers"])
def test_a_model_that_is_chosen_is_the_one_that_is_measured(command: str) -> None:
    wanted = compose("train", ["model=8m"])["model"]
    assert compose(f"bench_{command}", ["model=8m"])["model"] == wanted


def test_the_training_benchmark_measures_the_demo_s_model() -> None:
    wanted = compose("pipeline", ["experiment=demo"])["model"]
    assert compose("bench_train", [])["model"] == wanted


@pytest.mark.slow
def test_results_are_printed_and_written_as_json_picture_and_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import mlflow

    output, uri = tmp_path / "results" / "train.json", f"sqlite:///{tmp_path}/runs.db"
    settings = ["compile=false", "endurance_steps=25", "precision=fp32"]
    bench.run_train(
        compose("bench_train", [*TINY, *settings, f"output={output}", f"tracking_uri={uri}"])
    )
    printed = capfd.readouterr().out
    content = json.loads(output.read_text())
    rows = {row["what"]: row for row in content["rows"]}
    for row in rows.values():
        assert row["what"] in printed
    assert rows["packed against one at a time, fp32: loss"]["met"] is True
    assert rows["recompilations after step 5"]["value"] == 0
    assert rows["time of a step with EMA ÷ without"]["goal"] == 1.02
    assert {"as it trains", "without EMA"} <= {arm["name"] for arm in content["arms"]}
    assert content["settings"]["token_budget"] == 512
    assert content["machine"]["versions"]["torch"]
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("d2plm-bench")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and len(run.data.metrics) == len(rows)
    logged = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert logged == {"train.json", "train.png"}


@pytest.mark.parametrize(
    ("command", "changes", "key"),
    [
        ("train", ["turns=0"], "turns"),
        ("train", ["steps=0"], "steps"),
        ("train", ["threads=0"], "threads"),
        ("train", ["endurance_steps=3"], "endurance_steps"),
        ("attention", ["heads=0"], "heads"),
        ("generate", ["number=0"], "number"),
        ("generate", ["cases=[]"], "cases"),
        ("peers", ["token_budget=0"], "token_budget"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(
    command: str, changes: list[str], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{key}="):
        getattr(bench, f"run_{command}")(compose(f"bench_{command}", changes))


def test_a_ratio_is_the_median_of_neighbours_and_says_that_it_is_of_times() -> None:
    row = ratio_row("slow ÷ fast", [2.0, 9.0, 8.0], [1.0, 3.0, 1.0], 2.5)
    assert (row.what, row.value, row.spread) == ("time of slow ÷ fast", 3.0, (2.5, 5.5))
    assert row.met is True
    assert ratio_row("one ÷ other", [3.0], [2.0]).spread == (1.5, 1.5)


def test_the_table_says_which_goals_are_met() -> None:
    rows = [Row("speed", 1234.5, "tokens/s", 2000), Row("cost", 0.5, "", 1, at_most=True)]
    lines = table(rows).splitlines()[1:]
    assert [line.split() for line in lines] == [
        ["speed", "1,234", "tokens/s", "≥", "2,000", "missed"],
        ["cost", "0.5", "≤", "1", "met"],
    ]


def as_metric(what: str, **changes: Any) -> str:
    from d2plm.bench.report import metric_name

    return metric_name(Row(what, 1.0, **{"unit": "", **changes}))


def test_rows_have_names_that_mlflow_takes() -> None:
    assert as_metric("HF, to 1,024 ÷ ours", unit="×") == "HF to 1 024 over ours"
    assert as_metric("padding", unit="%") == "padding percent"
