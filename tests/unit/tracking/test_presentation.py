"""Presentation of a run: its name, sections of metrics, description, and no secrets."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from d2plm.assembly.tracked_run import log_settings, tracking_arguments
from d2plm.commands.evaluate import metrics_of
from d2plm.config import compose
from d2plm.core.number_text import short_number
from d2plm.core.redaction import redacted_settings
from d2plm.evaluation.result import Evaluation
from d2plm.tracking.description import description, shortened
from d2plm.tracking.registry import EVALUATED
from d2plm.tracking.runs import in_sections
from d2plm.training.callbacks.metric_logger import MetricLogger
from tests.evaluations import invented_bound, invented_evaluation, invented_given_relatives

DOCUMENT = Path(__file__).parents[3] / "docs" / "tracking.md"


@pytest.fixture
def evaluation() -> Evaluation:
    """An evaluation with a rival."""
    rival: Any = invented_bound(math.log(16.5), 0.055)
    baselines = {"uniform": 20.0, "composition": 17.599}
    return invented_evaluation(17.4371, baselines, others={"other": rival})


@pytest.mark.parametrize(
    ("name", "title"), [("demo", "demo flow matching"), ("flow_matching", "flow_matching")]
)
def test_a_run_without_a_name_is_called_by_experiment_paradigm_and_time(
    name: str, title: str
) -> None:
    config = compose("train", [f"name={name}", "paradigm=flow_matching"])
    assert re.fullmatch(rf"{title} \d\d-\d\d \d\d:\d\d", tracking_arguments(config)["run_name"])


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.123, "0.12"),
        (9.96, "10"),
        (946, "946"),
        (999.6, "1.0k"),
        (21_345, "21.3k"),
        (2_115_489, "2.1M"),
        (449_900_000, "450M"),
        (3_000_000_000, "3.0B"),
    ],
)
def test_a_number_is_short(number: float, text: str) -> None:
    assert short_number(number) == text


def test_metrics_of_training_are_shown_in_sections() -> None:
    row = {"loss": 1.0, "validation_nelbo": 2.0, "mfu": 0.5, "peak_memory_gib": 3.0, "own": 4.0}
    assert in_sections(row) == {
        "train/loss": 1.0,
        "validation/nelbo": 2.0,
        "time/mfu": 0.5,
        "system/peak_memory_gib": 3.0,
        "train/own": 4.0,
    }
    assert in_sections({"mine/own": 1.0}) == {"mine/own": 1.0}


def test_every_metric_of_training_is_in_the_document_under_its_group() -> None:
    text = DOCUMENT.read_text()
    documented = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    described = " ".join(type(metric).__doc__ or "" for metric in MetricLogger().metrics)
    plain = {word for word in described.split("`")[1::2] if word.isidentifier()}
    assert {"loss", "grad_norm", "tokens_per_second", "mfu", "peak_memory_gib"} <= plain
    assert {*in_sections(dict.fromkeys(plain, 0.0))} <= documented
    assert {"validation/nelbo", "validation/perplexity", "evaluation/perplexity"} <= documented


def test_a_description_says_how_to_resume_the_run_and_contains_the_card(tmp_path: Path) -> None:
    known: dict[str, Any] = {"name": "demo", "paradigm": "flow_matching", "output_dir": tmp_path}
    model_dir = tmp_path / "model"
    begun = description(**known, model_dir=model_dir)
    assert begun.startswith("**demo**: flow matching.")
    assert f"d2plm train --config-file {tmp_path / 'config.yaml'}" in begun
    assert str(model_dir) in begun
    model_dir.mkdir()
    (model_dir / "README.md").write_text("---\nlibrary_name: d2plm\n---\n\n# A model\n")
    done = description(**known, model_dir=model_dir, version=("d2plm-x", "3"))
    assert "(#/models/d2plm-x/versions/3)" in done
    assert done.endswith("\n\n# A model")


def test_a_text_that_is_too_long_ends_with_a_whole_paragraph_and_a_closed_block() -> None:
    text = "first\n\n```\ncode\n\nmore code\n```\n\nlast"
    assert shortened(text, 100) == text
    rest = "\n\n… the rest is in README.md of the model"
    assert shortened(text + 60 * "x", 24 + len(rest)) == f"first\n\n```\ncode\n```{rest}"


def test_secrets_of_a_configuration_are_not_shown() -> None:
    settings = {
        "launcher": {"environment": {"HF_TOKEN": "s3cret", "MODE": "fast", "EMPTY_TOKEN": ""}},
        "data": {
            "token_budget": 4096,
            "experts_per_token": 2,
            "input": ["s3://key:s3cret@bucket/x"],
        },
        "password": "s3cret",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "off": None,
    }
    assert redacted_settings(settings) == {
        "launcher": {"environment": {"HF_TOKEN": "***", "MODE": "fast", "EMPTY_TOKEN": ""}},
        "data": {"token_budget": 4096, "experts_per_token": 2, "input": ["s3://***@bucket/x"]},
        "password": "***",
        "AWS_SECRET_ACCESS_KEY": "***",
        "off": None,
    }


def test_the_models_own_figures_come_first_in_a_list_by_name_and_all_are_the_models(
    evaluation: Evaluation,
) -> None:
    evaluation = replace(evaluation, given_relatives=invented_given_relatives())
    others = ["grad_norm/blocks.3", "system/cpu", "time/mfu", "train/loss", "validation/nelbo"]
    sent = [name.partition("/")[0] for name in metrics_of(evaluation)]
    assert list(dict.fromkeys(sent)) == ["evaluation", "given_relatives", "versus"]
    names = sorted([*metrics_of(evaluation), *others])
    assert names[0] == "evaluation/nelbo"
    assert names[-2:] == ["versus/composition", "versus/uniform"]
    assert [name for name in names if not name.startswith(EVALUATED)] == others
    assert "given_relatives/perplexity_below_90_hmm" in names


def test_parameters_leave_out_the_launcher_which_is_in_the_file(tmp_path: Path) -> None:
    class Kept:
        def log_params(self, params: dict[str, Any]) -> None:
            self.params = params

        def log_file(self, file: Path, folder: str) -> None:
            self.file = file.read_text()

    kept: Any = Kept()
    log_settings(kept, compose("train", [f"work_dir={tmp_path}"]), parameters=7)
    assert kept.params["optimizer.learning_rate"] > 0 and kept.params["parameters"] == 7
    assert not [name for name in kept.params if name.startswith("launcher")]
    assert "launcher:" in kept.file and "shared_memory" in kept.file
