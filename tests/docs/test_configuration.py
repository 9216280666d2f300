"""docs/configuration.md and configs/schema.json are what docs/configuration.py writes."""

import json
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from d2plm.config import groups
from d2plm.core.files import config_dir
from d2plm.settings.commands import PipelineSettings
from d2plm.settings.schema import keys
from tests.docs.markdown import ROOT

SCHEMA = json.loads((ROOT / "configs" / "schema.json").read_text())
FILES = sorted(config_dir().glob("*.yaml")) + [
    file for group in sorted(groups()) for file in sorted((config_dir() / group).glob("*.yaml"))
]


def test_the_generated_files_are_current() -> None:
    written = run_path(str(ROOT / "docs" / "configuration.py"))["generated"]()
    assert {file for file, text in written.items() if file.read_text() != text} == set(), (
        "run: make docs"
    )


def test_the_page_has_every_key_of_the_pipeline() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert "trainer.max_steps" in keys(PipelineSettings)
    assert not {name for name in keys(PipelineSettings) if f"| `{name}` |" not in page}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_file_follows_the_schema(file: Path) -> None:
    group = file.parent.name if file.parent != config_dir() else "experiment"
    schema = SCHEMA if group == "experiment" else SCHEMA["properties"][group]
    Draft7Validator.check_schema(schema)
    Draft7Validator(schema).validate(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize(
    "values",
    [
        {"trainer": {"max_step": 1}},
        {"trainer": {"max_steps": 0}},
        {"trainer": {"max_steps": "many"}},
        {"optimizer": {"betas": [0.9, 2]}},
        {"callbacks": {"checkpoint": {"every": None}}},
        {"data": {"cluster": {"method": "linclus"}}},
    ],
)
def test_the_schema_rejects_what_composition_rejects(values: dict[str, Any]) -> None:
    assert not Draft7Validator(SCHEMA).is_valid(values)


def test_the_schema_accepts_references_null_and_names_of_your_own() -> None:
    values = {
        "trainer": {"max_steps": "${data.token_budget}"},
        "callbacks": {"mine": {"anything": 1}, "profiler": None},
        "arms": {"small": {"model": {"hidden_size": 64}}},
    }
    Draft7Validator(SCHEMA).validate(values)
