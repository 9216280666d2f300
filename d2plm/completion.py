"""What may follow what has been typed: commands, actions, options, keys, choices, paths.

It is asked at every press of TAB, so it imports no Hydra, which would take a second: it reads the
YAML files themselves, with as much of Hydra's rules as they use.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from d2plm.commands.table import COMMANDS, EXTERNAL, PLAIN
from d2plm.core.files import config_dir
from d2plm.core.terminal import GLOBAL_OPTIONS, OPTIONS

SHELLS = ("bash", "zsh", "fish")
# Of a command with settings; those that take a value have it in the next word.
SETTINGS_OPTIONS = ("--cfg", "--multirun", "--dry-run", "--help", *OPTIONS)
FILE_OPTIONS = {"--config-file": "file", "--config-dir": "folder", "--config-name": "root"}
# Keys, by their last part, whose values are places on disk; those that end in _dir are, too.
PATHS = {
    *("input", "output", "store", "root", "run", "checkpoint", "mutations", "templates"),
    *("init_from", "proteins", "validation_ids", "test_ids", "checkpoints"),
}
# `a | b | c` at the end of a key's comment, with a word or two on each: what it may be.
_CHOICES = re.compile(r"(?:^|[(:;] ?)((?:[\w.-]+(?: \([^)|]*\))?(?: \| )?){2,})\)?$")
_WORD = re.compile(r"[\w.-]+")

SCRIPTS = {
    "bash": """_d2plm() {
    local line=${COMP_LINE:0:COMP_POINT} word prefix= candidate
    word=${line##*[[:space:]]}
    # Bash has taken the word apart at = and :, and replaces what comes after the last of them.
    [[ $COMP_WORDBREAKS == *=* && $word == *=* ]] && prefix=${word%=*}=
    [[ $COMP_WORDBREAKS == *:* && $word == *:* ]] && prefix=${word%:*}:
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate#"$prefix"}")
    done < <("${COMP_WORDS[0]}" completion candidates "$line" 2>/dev/null)
}
complete -o nospace -F _d2plm d2plm
""",
    "zsh": """#compdef d2plm
_d2plm() {
    local -a found
    local line="${words[1,CURRENT-1]} $PREFIX"
    found=("${(@f)$(${words[1]} completion candidates "$line" 2>/dev/null)}")
    compadd -Q -S '' -- ${found:#}
}
compdef _d2plm d2plm
""",
    "fish": """complete -c d2plm -f -a \
'(d2plm completion candidates (commandline -cp | string collect) 2>/dev/null | string trim -r)'
""",
}


def candidates(line: str) -> list[str]:
    """What the last word of a command line may be completed to.

    Args:
        line: from the program's name up to the cursor.

    Returns:
        Whole words, sorted. One after which the next word may begin ends in a blank.
    """
    words = _split(line)
    before, word = words[1:-1], words[-1]
    before = [known for known in before if known not in OPTIONS]
    commands = {**COMMANDS, **EXTERNAL, **PLAIN}
    if not before:
        return _matching(word, [*commands, *GLOBAL_OPTIONS[1:]])
    name, given = before[0], before[1:]
    if name in PLAIN:
        return _matching(word, SHELLS) if not given else []
    if name not in commands:
        return []
    root, actions = name, commands[name].actions
    if actions:
        if not given:
            return _matching(word, [*actions, "--help"])
        if given[0] not in actions:
            return []
        root, given = (name if name in EXTERNAL else f"{name}_{given[0]}"), given[1:]
    found = _of_settings(root, given, word)
    command = commands[name].actions[before[1]] if actions else commands[name]
    if command.first_key and not word.startswith("-") and "=" not in word:
        found += _paths(word, "")
    return found


def _split(line: str) -> list[str]:
    """The words of a line, of which the last may be empty, or in quotes that are still open."""
    for ending in ("", "'", '"'):
        try:
            words = shlex.split(line + ending)
        except ValueError:
            continue
        return words if words and not line[-1:].isspace() else [*words, ""]
    return [""]


def _of_settings(root: str, given: Sequence[str], word: str) -> list[str]:
    """Completions where settings and their options stand."""
    option = given[-1] if given else ""
    if option in FILE_OPTIONS:
        return _values_of_option(option, word)
    if option.startswith("--") and "=" not in option and option not in SETTINGS_OPTIONS:
        key = option.removeprefix("--")  # --key value
        return [value.removeprefix(f"{key}=") for value in _values(root, given, key, word)]
    dashes = "--" if word.startswith("--") else ""
    key, equals, value = word.removeprefix("--").partition("=")
    if equals:
        return [dashes + found for found in _values(root, given, key, value, f"{key}=")]
    if word.startswith("-"):
        options = [f"{name} " for name in (*SETTINGS_OPTIONS, *FILE_OPTIONS)]
        keys = [dashes + key for key in _keys(root, given, key)] if dashes else []
        return sorted(name for name in [*options, *keys] if name.startswith(word))
    return _keys(root, given, word)


def _values_of_option(option: str, word: str) -> list[str]:
    if FILE_OPTIONS[option] == "root":
        return _matching(word, [file.stem for file in config_dir().glob("*.yaml")])
    return _paths(word, "")


def _keys(root: str, given: Sequence[str], word: str) -> list[str]:
    """Keys one level on: `trainer.` before what is in it, `trainer.max_steps=` at the end."""
    found = set()
    for key in {*known_keys(root, given), *_groups(config_dir() / f"{root}.yaml")}:
        if key.startswith(word):
            rest = key[len(word) :]
            inner, dot, _ = rest.partition(".")
            found.add(word + inner + (dot or "="))
    return sorted(found)


def _groups(file: Path) -> Iterator[str]:
    """The groups that a root file, or one that it builds on, chooses from."""
    for key, choice in _defaults(file):
        if choice is not None:
            yield key
        elif key != "_self_":
            yield from _groups(file.with_name(f"{key}.yaml"))


def _values(root: str, given: Sequence[str], key: str, value: str, prefix: str = "") -> list[str]:
    """What a key may be set to, each after `prefix`: a group's choices, words, or paths."""
    folder = config_dir() / key
    if folder.is_dir() and re.fullmatch(r"\w+", key):
        choices = sorted(file.stem for file in folder.glob("*.yaml"))
        return [f"{prefix}{choice}" for choice in _matching(value, choices)]
    values, comments = _composed(root, given)
    name = key.rpartition(".")[2]
    if name in PATHS or name.endswith("_dir"):
        return _paths(value, prefix)
    known = _flat(values)
    words = _listed(comments.get(key, ""))
    if isinstance(known.get(key), bool):
        words = ["false", "true"]
    return [f"{prefix}{choice}" for choice in _matching(value, words)]


def _paths(value: str, prefix: str) -> list[str]:
    """Files and folders that begin so; a folder's name goes on after its `/`."""
    folder, _, start = value.rpartition("/")
    where = Path(os.path.expanduser(f"{folder}/" if "/" in value else "."))
    shown = f"{folder}/" if "/" in value else ""
    try:
        entries = sorted(where.iterdir())
    except OSError:
        return []
    return [
        f"{prefix}{shown}{entry.name}{'/' if entry.is_dir() else ' '}"
        for entry in entries
        if entry.name.startswith(start) and (start.startswith(".") or entry.name[0] != ".")
    ]


def _matching(word: str, choices: Sequence[str]) -> list[str]:
    return sorted(f"{choice} " for choice in choices if choice.startswith(word))


def _listed(comment: str) -> list[str]:
    """`a`, `b` of a comment such as `of the model: a | b`."""
    if "|" not in comment:
        return []
    end = _CHOICES.search(comment.strip())
    if end is None:
        return []
    parts = re.sub(r"\([^)]*\)?", "", end[1]).split("|")
    return [part.strip() for part in parts if _WORD.fullmatch(part.strip())]


def _choices(given: Sequence[str]) -> dict[str, str]:
    """The groups' choices among the words that stand before."""
    pairs = (word.removeprefix("--").partition("=") for word in given)
    return {key: value for key, equals, value in pairs if equals and re.fullmatch(r"\w+", key)}


def known_keys(root: str, given: Sequence[str] = ()) -> dict[str, Any]:
    """{"trainer.max_steps": 1000, …}: what a root file has with the choices among `given`."""
    return _flat(_composed(root, given)[0])


def _composed(root: str, given: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the values of a root file, the comments of its keys by dotted name)."""
    chosen = _choices(given)
    values: dict[str, Any] = {}
    comments: dict[str, str] = {}
    experiment = config_dir() / "experiment" / f"{chosen.get('experiment')}.yaml"
    overridden = {key.removeprefix("override /"): to for key, to in _defaults(experiment) if to}
    _add(config_dir() / f"{root}.yaml", "", {**overridden, **chosen}, values, comments)
    _merge(values, {key: to for key, to in _read(experiment)[1].items() if key != "defaults"})
    return values, comments


def _add(
    file: Path,
    package: str,
    chosen: Mapping[str, str],
    values: dict[str, Any],
    comments: dict[str, str],
) -> None:
    """Put what a file, and those that it names, say into `values` and `comments`, at `package`."""
    if not file.is_file():
        return
    group = file.parent.relative_to(config_dir()).as_posix().removeprefix(".")
    for key, choice in _defaults(file):
        if key.startswith("override ") or key == "_self_":
            continue
        if choice is None:  # another file of this folder
            _add(file.parent / f"{key}.yaml", package, chosen, values, comments)
        elif not group:
            name = chosen.get(key, choice)
            if name != "null" and key != "experiment":
                _add(config_dir() / key / f"{name}.yaml", key, chosen, values, comments)
    text, content = _read(file)
    target = values
    for part in filter(None, package.split(".")):
        target = target.setdefault(part, {})
    _merge(target, {key: value for key, value in content.items() if key != "defaults"})
    dotted = f"{package}." if package else ""
    comments.update({dotted + key: said for key, said in _comments(text)})


def _defaults(file: Path) -> list[tuple[str, str | None]]:
    """(group, choice) of a file's defaults; a choice of None is of a file beside it."""
    listed: list[tuple[str, str | None]] = []
    for entry in _read(file)[1].get("defaults") or ():
        if isinstance(entry, Mapping):
            listed += [(str(key), str(value or "null")) for key, value in entry.items()]
        else:
            listed.append((str(entry), None))
    return listed


@cache
def _read(file: Path) -> tuple[str, dict[str, Any]]:
    """(a YAML file's text, what it holds), both empty where there is none."""
    try:
        text = file.read_text()
        content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  # safe
    except (OSError, yaml.YAMLError):
        return "", {}
    return text, content if isinstance(content, dict) else {}


def _merge(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, change in changes.items():
        if isinstance(change, dict) and isinstance(values.get(key), dict):
            _merge(values[key], change)
        else:
            values[key] = dict(change) if isinstance(change, dict) else change


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"trainer.max_steps": 1000, …}, without what Hydra alone reads."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        elif key != "_target_":
            flat[f"{prefix}{key}"] = value
    return flat


def _comments(text: str) -> Iterator[tuple[str, str]]:
    """(dotted key, its comment) of the lines `key: value  # comment`."""
    inside: list[tuple[int, str]] = []
    for line in text.splitlines():
        found = re.match(r"( *)([\w.]+):(.*)$", line)
        if found is None:
            continue
        depth, key, rest = len(found[1]), found[2], found[3]
        inside = [(known, name) for known, name in inside if known < depth]
        inside.append((depth, key))
        _, mark, comment = rest.partition("  # ")
        if mark:
            yield ".".join(name for _, name in inside), comment
