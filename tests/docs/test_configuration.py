"""docs/configuration.md and configs/schema.json are what docs/configuration.py writes."""

import json
from pathlib import Path
from typing import get_args

import yaml
from jsonschema import Draft7Validator

from d2plm.commands.table import COMMANDS
from d2plm.config import groups
from d2plm.core.files import config_dir
from d2plm.data import sources
from d2plm.families import variants
from d2plm.settings.commands import SETTINGS
from d2plm.settings.data import Format
from d2plm.settings.schema import keys
from tests.commands import python_c
from tests.docs.markdown import ROOT

SCHEMA = json.loads((ROOT / "configs" / "schema.json").read_text())
FILES = sorted(config_dir().glob("*.yaml")) + [
    file for group in sorted(groups()) for file in sorted((config_dir() / group).glob("*.yaml"))
]


# In a process of its own, in which no test has registered anything.
GENERATE = """
import json, runpy
texts = runpy.run_path("docs/configuration.py")["generated"]()
print(json.dumps({str(file): text for file, text in texts.items()}))
"""


def test_the_generated_files_are_current_and_have_every_key() -> None:
    texts = json.loads(python_c(GENERATE).stdout)
    assert len(texts) == 4
    assert not [file for file in texts if Path(file).read_text() != texts[file]], "run: make docs"
    page, names = texts[str(ROOT / "docs" / "configuration.md")], keys(SETTINGS["pipeline"])
    assert "trainer.max_steps" in names
    assert not [name for name in names if f"- `{name}=" not in page]


def test_every_file_follows_the_schema() -> None:
    Draft7Validator.check_schema(SCHEMA)
    for file in FILES:
        group = file.parent.name if file.parent != config_dir() else "experiment"
        schema = SCHEMA if group == "experiment" else SCHEMA["properties"][group]
        errors = [*Draft7Validator(schema).iter_errors(yaml.safe_load(file.read_text()))]
        assert not errors, (file, errors)


def test_the_schema_rejects_what_composition_rejects() -> None:
    for values in (
        {"trainer": {"max_step": 1}},
        {"trainer": {"max_steps": "many"}},
        {"optimizer": {"betas": [0.9, 2]}},
        {"data": {"cluster": {"method": "linclus"}}},
    ):
        assert not Draft7Validator(SCHEMA).is_valid(values), values
    references_null_and_names_of_your_own = {
        "trainer": {"max_steps": "${data.token_budget}"},
        "callbacks": {"mine": {"anything": 1}, "profiler": None},
        "arms": {"small": {"model": {"hidden_size": 64}}},
    }
    Draft7Validator(SCHEMA).validate(references_null_and_names_of_your_own)


def test_the_usual_keys_of_every_command_exist() -> None:
    for name, command in COMMANDS.items():
        for action, one in command.actions.items() or [("", command)]:
            known = keys(SETTINGS[f"{name}_{action}".strip("_")])
            starts = {*known, *groups(), *(f"{key.split('.')[0]}." for key in known)}
            assert not {*one.usual_keys} - starts


def test_every_form_of_input_and_every_notation_in_the_tables_is_read() -> None:
    assert ("auto", *sources.FORMS) == get_args(Format)
    assert set(sources.FORMS) == set(sources._READERS)
    for text, _ in variants.NOTATIONS:
        label = variants.label_of([text])
        assert [*map(str, variants.parse_variant(text, label))] == ["A24G", "L30P"]
