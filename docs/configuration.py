"""Write the lists of docs/configuration.md, and configs/schema.json.

Keys, defaults and descriptions are those of `d2plm.settings`; a choice of a group is described by
the first comment of its YAML file.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from d2plm.commands.table import COMMANDS, EXTERNAL, PLAIN
from d2plm.config import default_choice, defaults_of, groups
from d2plm.core.files import config_dir
from d2plm.settings.commands import SETTINGS, PipelineSettings
from d2plm.settings.registry import registered
from d2plm.settings.schema import Key, json_schema, keys

ROOT = Path(__file__).resolve().parents[1]
MARK = "<!-- Generated below by docs/configuration.py; `make docs` updates it. -->\n"


def main() -> None:
    """Write both files."""
    for file, text in generated().items():
        file.write_text(text)
        print(f"wrote {file.relative_to(ROOT)}")


def generated() -> dict[Path, str]:
    """The generated files and their texts."""
    roots = [kind for kind in SETTINGS.values() if issubclass(kind, PipelineSettings)]
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **json_schema(*roots)}
    page = ROOT / "docs" / "configuration.md"
    introduction = page.read_text().partition(MARK)[0] + MARK
    parts = [introduction, *commands(), *sections()]
    return {
        page: "\n".join(part.rstrip("\n") + "\n" for part in parts),
        ROOT / "configs" / "schema.json": json.dumps(schema, separators=(",", ":")) + "\n",
    }


def commands() -> Iterator[str]:
    """The list of commands, and the keys of each that the pipeline does not have."""
    rows, own = ["| command | description | settings |", "|---|---|---|"], []
    known = {name: keys(kind) for name, kind in SETTINGS.items()}
    for name, command in {**COMMANDS, **EXTERNAL, **PLAIN}.items():
        for action, one in command.actions.items() or [("", command)]:
            words = f"{name} {action}".strip()
            root = "pipeline" if name in EXTERNAL else words.replace(" ", "_")
            mine = known.get(root, {})
            if known["pipeline"].keys() <= mine.keys():
                titles = {"pipeline"}
                mine = {k: v for k, v in mine.items() if k not in known["pipeline"]}
            else:
                titles = {key.split(".")[0] for key in mine if "." in key}
                mine = {k: v for k, v in mine.items() if "." not in k}
            links = [f"[{title}](#{title})" for title in titles]
            if mine:
                links.append(f"[its own](#{f'd2plm {words}'.replace(' ', '-')})")
                own += [f"### d2plm {words}\n", f"Example: `{one.example}`\n"]
                own.append(table(mine, defaults_of(root)))
            settings = " and ".join(links) or "none"
            rows.append(f"| `d2plm {words}` | {cell(one.summary)} | {settings} |")
    yield from ["## Commands\n", "\n".join(rows), *own]


def sections() -> Iterator[str]:
    """The keys of the pipeline, section by section, with the choices of the groups."""
    defaults = defaults_of("pipeline")
    known = keys(PipelineSettings)
    yield "## pipeline\n"
    yield f"{PipelineSettings.__doc__}\n"
    yield table({name: one for name, one in known.items() if "." not in name}, defaults)
    for field in fields(PipelineSettings):
        name, group = field.name, field.metadata.get("registry")
        if name in known:
            continue
        yield f"## {name}\n"
        if name in groups():
            yield choices(name, default_choice(name))
        if group is None:
            yield table({k: v for k, v in known.items() if k.startswith(f"{name}.")}, defaults)
            continue
        for type_name, entry in registered(group).items():
            prefix = f"{name}.{type_name}." if name == "callbacks" else f"{name}."
            is_default = defaults.get(f"{name}.type", type_name) == type_name
            yield f"### {type_name}\n"
            yield f"{entry.settings.__doc__}\n"
            yield table(keys(entry.settings, prefix), defaults if is_default else {})
    yield "## experiment\n"
    yield choices("experiment", "null")


def choices(group: str, default: str) -> str:
    """The YAML files of a group with their first comments."""
    rows = ["| choice | description |", "|---|---|"]
    for file in sorted((config_dir() / group).glob("*.yaml")):
        head = takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
        said = " ".join(line.strip("# ") for line in head if "@package" not in line)
        rows.append(f"| `{file.stem}`{' (default)' * (file.stem == default)} | {cell(said)} |")
    return "\n".join(rows)


def table(known: Mapping[str, Key], defaults: Mapping[str, Any]) -> str:
    """Rows of keys; a default that refers to another key is shown as such."""
    rows = ["| key | default | description |", "|---|---|---|"] if known else []
    for name, one in known.items():
        is_reference = isinstance(one.default, str) and "$" in one.default
        value = one.default if is_reference else defaults.get(name, one.default)
        text = value if isinstance(value, str) else json.dumps(value)
        rows.append(f"| `{name}` | `{text}` | {cell(one.described)} |")
    return "\n".join(rows)


def cell(text: str) -> str:
    """Escape text for a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    main()
