"""Writes docs/configuration.md: every command, group, choice and key of configs/.

A key is described once, by the comment beside it in the YAML; a choice that builds on another one
(`defaults: [nano]`) shares its descriptions. A key without a comment is an error.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from d2plm.commands.table import COMMANDS, EXTERNAL, PLAIN
from d2plm.core.files import config_dir

OUTPUT = Path(__file__).with_suffix(".md")
INTRODUCTION = """\
# Configuration

<!-- Written by docs/configuration.py from configs/; `make docs` writes it. -->

Settings are composed by [Hydra](https://hydra.cc): each command has a root file, which selects one
choice of each group and adds its own keys. On the command line

| | |
|---|---|
| `model=35m` | selects another choice of a group |
| `trainer.max_steps=500`, `--trainer.max_steps 500` | sets a key |
| `experiment=demo` | applies an experiment, which sets keys of any group; your own keys win |
| `+callbacks.mine._target_=my_package.Mine` | adds your own name, where a section allows it |
| `--cfg job` | shows the composed configuration and runs nothing |
| `--config-file run/config.yaml` | uses a whole configuration, as a run wrote it |
| `--config-dir DIR`, `--config-name NAME` | uses your own configurations |

Unknown keys, groups and choices are rejected before anything starts, with a suggestion. Names of
your own are allowed in `callbacks`, `data.mixture`, `tracking.tags`, `arms` and `sizes` only. Your
own experiment is a file `configs/experiment/NAME.yaml`; [tutorial.md](tutorial.md) writes one.
`null` is no value, `???` is a required key, and `${…}` refers to another key.
"""
# accelerate's own file, whose keys are accelerate's
FOREIGN_GROUPS = ("accelerate",)
WHOLE_PIPELINE = "pipeline"


@dataclass(frozen=True)
class Key:
    """A key as a file has it; the description is None where no comment stands beside it."""

    name: str
    value: str
    description: str | None


@dataclass(frozen=True)
class Choice:
    """A file of configs/: what it says of itself, what it begins with, and its keys."""

    name: str
    description: str
    bases: tuple[str, ...]
    target: str | None
    keys: tuple[Key, ...]


class MissingDescriptionError(ValueError):
    """A key has no comment beside it."""


def main() -> int:
    """Write the reference."""
    OUTPUT.write_text(reference(config_dir()))
    print(f"wrote {OUTPUT}")
    return 0


def reference(root: Path) -> str:
    """The whole page.

    Raises:
        MissingDescriptionError: naming the file and the key that no comment describes.
    """
    groups = {
        folder.name: described(folder)
        for folder in sorted(root.iterdir())
        if folder.is_dir() and folder.name not in FOREIGN_GROUPS
    }
    experiments = groups.pop("experiment")
    roots = {file.stem: read(file) for file in sorted(root.glob("*.yaml"))}
    pipeline = roots[WHOLE_PIPELINE]
    parts = [INTRODUCTION, "## Commands\n", *_commands(roots), f"## {WHOLE_PIPELINE}.yaml\n"]
    parts.append(
        f"{pipeline.description}\n\nIt takes a choice of each group below, and has these keys:\n"
    )
    parts.append(_table(pipeline.keys, "", pipeline.name))
    for name, choices in groups.items():
        parts += _group(name, choices, _default_of(name, pipeline))
    parts += ["## experiment\n", *_experiments(experiments)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def described(folder: Path) -> dict[str, Choice]:
    """The choices of a group by name, each key with the description that its bases have of it."""
    choices = {file.stem: read(file) for file in sorted(folder.glob("*.yaml"))}

    def of(name: str, key: str) -> str | None:
        for base in choices[name].bases:
            if base in choices:
                for inherited in choices[base].keys:
                    if inherited.name == key and inherited.description:
                        return inherited.description
                if found := of(base, key):
                    return found
        return None

    return {
        name: replace(
            choice,
            keys=tuple(
                replace(key, description=key.description or of(name, key.name))
                for key in choice.keys
            ),
        )
        for name, choice in choices.items()
    }


def read(file: Path) -> Choice:
    """A file, taken apart."""
    text = file.read_text()
    lines = text.splitlines()
    head = [line.removeprefix("#").strip() for line in _leading_comment(lines)]
    node = yaml.compose(text)
    plain = yaml.safe_load(text) or {}
    keys = tuple(_keys(node, lines, "")) if isinstance(node, yaml.MappingNode) else ()
    return Choice(
        name=file.stem,
        description="\n".join(line for line in head if not line.startswith("@package")),
        bases=tuple(_bases(plain.get("defaults", []))),
        target=plain.get("_target_"),
        keys=keys,
    )


def _leading_comment(lines: list[str]) -> list[str]:
    number = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return lines[:number]


def _bases(defaults: list[object]) -> Iterator[str]:
    """What a defaults list names, groups as group=choice."""
    for entry in defaults:
        if isinstance(entry, Mapping):
            for group, choice in entry.items():
                yield f"{str(group).removeprefix('override ').lstrip('/')}={choice}"
        elif entry != "_self_":
            yield str(entry)


def _keys(node: yaml.MappingNode, lines: list[str], prefix: str) -> Iterator[Key]:
    for name, value in node.value:
        key = f"{prefix}{name.value}"
        if name.value in ("defaults", "_partial_") and not prefix:
            continue
        comment = _comment(lines, name.start_mark.line, value)
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _keys(value, lines, f"{key}.")
            continue
        if name.value == "_target_":
            continue
        line = lines[value.start_mark.line]
        yield Key(key, line[value.start_mark.column : value.end_mark.column].strip(), comment)


def _comment(lines: list[str], number: int, value: yaml.Node) -> str | None:
    """What stands behind a key, after what stands in lines of its own above it."""
    line = lines[number]
    is_block = isinstance(value, yaml.MappingNode) and not value.flow_style
    rest = line if is_block else line[value.end_mark.column :]
    _, mark, behind = rest.partition("#")
    above: list[str] = []
    head = len(_leading_comment(lines))
    at = number - 1
    while at >= head and lines[at].lstrip().startswith("#"):
        above.insert(0, lines[at].strip().removeprefix("#").strip())
        at -= 1
    words = [*above, *([behind.strip()] if mark else [])]
    return " ".join(words) or None


def _default_of(group: str, pipeline: Choice) -> str | None:
    for base in pipeline.bases:
        name, _, choice = base.partition("=")
        if name == group:
            return choice
    return None


def _commands(roots: Mapping[str, Choice]) -> Iterator[str]:
    rows, own = ["| command | what it does | settings |", "|---|---|---|"], []
    for name, command in {**COMMANDS, **EXTERNAL, **PLAIN}.items():
        called = {f"{name} {action}": c for action, c in command.actions.items()} or {name: command}
        for words, action in called.items():
            root = roots.get(words.replace(" ", "_"))
            if name in EXTERNAL or (root is not None and WHOLE_PIPELINE in root.bases):
                settings = f"[{WHOLE_PIPELINE}.yaml](#{WHOLE_PIPELINE}yaml)"
            elif root is None:
                settings = "none"
            else:
                settings = " and ".join(
                    f"[{base.partition('=')[0]}](#{base.partition('=')[0]})" for base in root.bases
                )
            if root is not None and root.keys and root.name != WHOLE_PIPELINE:
                title = f"d2plm {words}"
                link = f"[its own](#{title.replace(' ', '-')})"
                settings = f"{settings} and {link}" if settings else link
                own += [f"### {title}\n", f"Example: `{action.example}`\n"]
                own += [_table(root.keys, "", root.name)]
            rows.append(f"| `d2plm {words}` | {_cell(action.summary)} | {settings} |")
    yield "\n".join(rows)
    yield from own


def _group(name: str, choices: Mapping[str, Choice], default: str | None) -> Iterator[str]:
    yield f"## {name}\n"
    rows = ["| choice | what it is | differs by |", "|---|---|---|"]
    for choice in choices.values():
        label = f"`{choice.name}`" + (" (default)" if choice.name == default else "")
        base = [b for b in choice.bases if b in choices] if choice.keys else []
        changed = ", ".join(f"`{key.name}={key.value}`" for key in choice.keys) if base else ""
        said = f"from `{base[0]}`: {changed}" if base else ""
        rows.append(f"| {label} | {_cell(choice.description)} | {said} |")
    yield "\n".join(rows)
    for choice in choices.values():
        undescribed = [key.name for key in choice.keys if not key.description]
        if undescribed:
            raise MissingDescriptionError(
                f"configs/{name}/{choice.name}.yaml: {undescribed[0]}: has no comment that says "
                "what it is"
            )
        if choice.keys and not any(base in choices for base in choice.bases):
            yield f"### {name}={choice.name}\n" if name != "callbacks" else f"### {choice.name}\n"
            if choice.target:
                yield f"`{choice.target}`\n"
            yield _table(choice.keys, f"{name}.", f"{name}/{choice.name}")


def _table(keys: tuple[Key, ...], prefix: str, file: str) -> str:
    rows = ["| key | default | what it is |", "|---|---|---|"]
    for key in keys:
        if not key.description:
            raise MissingDescriptionError(
                f"configs/{file}.yaml: {key.name}: has no comment that says what it is"
            )
        value = key.value.replace("|", "\\|")
        rows.append(f"| `{prefix}{key.name}` | `{value}` | {_cell(key.description)} |")
    return "\n".join(rows)


def _experiments(experiments: Mapping[str, Choice]) -> Iterator[str]:
    yield "Each sets what differs from the defaults; its keys are described above.\n"
    for choice in experiments.values():
        yield f"### experiment={choice.name}\n"
        yield _cell(choice.description) + "\n"
        bases = ", ".join(f"`{base}`" for base in choice.bases)
        sets = ", ".join(f"`{key.name}={key.value}`" for key in choice.keys)
        yield (f"Begins with {bases}. " if bases else "") + f"Sets {sets}.\n"


def _cell(text: str) -> str:
    """Text that Markdown takes as it is, in one line."""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
