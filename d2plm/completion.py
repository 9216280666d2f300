"""d2plm completion: commands, actions, options, keys, choices and paths for the shell's TAB.

It runs at every press of TAB, so it does not import Hydra, which takes a second: it reads the YAML
files and applies the rules of composition that they use.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from d2plm.commands.table import COMMANDS, EXTERNAL, PLAIN
from d2plm.core.errors import ConfigError, did_you_mean
from d2plm.core.files import config_dir
from d2plm.core.terminal import GLOBAL_OPTIONS, HELP, OPTIONS, result

# Of a command with settings; those that take a value have it in the next word.
SETTINGS_OPTIONS = ("--cfg", "--multirun", "--dry-run", "--help", *OPTIONS)
FILE_OPTIONS = ("--config-file", "--config-dir", "--config-name")
# Keys, by their last part, whose values are places on disk, as are those that end in _dir.
PATHS = {
    *("input", "output", "store", "root", "run", "checkpoint", "mutations", "templates"),
    *("init_from", "proteins", "validation_ids", "test_ids", "checkpoints"),
}
# `a | b | c` at the end of a key's comment, with a word or two on each: its choices.
_CHOICES = re.compile(r"(?:^|[(:;] ?)((?:[\w.-]+(?: \([^)|]*\))?(?: \| )?){2,})\)?$")
_WORD = re.compile(r"[\w.-]+")

USAGE = """usage: d2plm completion bash|zsh|fish

Set up a shell to complete commands, actions, options, keys, groups' choices and paths.

  bash  echo 'source <(d2plm completion bash)' >> ~/.bashrc
  zsh   echo 'source <(d2plm completion zsh)' >> ~/.zshrc     (after compinit)
  fish  d2plm completion fish > ~/.config/fish/completions/d2plm.fish"""
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


def main(words: list[str]) -> int:
    """Print the script of a shell; or, as the scripts ask, the candidates for a line."""
    if not words or words[0] in HELP:
        result(USAGE)
    elif words[0] == "candidates" and len(words) == 2:
        print("".join(f"{candidate}\n" for candidate in candidates(words[1])), end="")
    elif words[0] in SCRIPTS and len(words) == 1:
        print(SCRIPTS[words[0]], end="")
    else:
        given = " ".join(words)
        raise ConfigError(
            f"d2plm completion {given!r}: give a shell, one of {', '.join(SCRIPTS)}"
            f"{did_you_mean(given, SCRIPTS)}"
        )
    return 0


def candidates(line: str) -> list[str]:
    """The completions of the last word of a command line.

    Args:
        line: from the program's name up to the cursor.

    Returns:
        Whole words, sorted. One after which the next word may begin ends in a blank.
    """
    *before, word = _split(line)
    given = [known for known in before[1:] if known not in OPTIONS]
    commands = {**COMMANDS, **EXTERNAL, **PLAIN}
    if not given:
        return _matching(word, [*commands, *GLOBAL_OPTIONS[1:]])
    name = root = given.pop(0)
    if name in PLAIN:
        return [] if given else _matching(word, SCRIPTS)
    command = commands.get(name)
    if command is not None and command.actions:
        if not given:
            return _matching(word, [*command.actions, "--help"])
        action = given.pop(0)
        command = command.actions.get(action)
        root = name if name in EXTERNAL else f"{name}_{action}"
    if command is None:
        return []
    found = _settings(root, given, word)
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


def _settings(root: str, given: Sequence[str], word: str) -> list[str]:
    """Completions of a setting, of an option, or of the value of the option before."""
    option = given[-1] if given else ""
    if option == "--config-name":
        return _matching(word, [file.stem for file in config_dir().glob("*.yaml")])
    if option in FILE_OPTIONS:
        return _paths(word, "")
    if option.startswith("--") and "=" not in option and option not in SETTINGS_OPTIONS:
        return _values(root, given, option.removeprefix("--"), word)  # --key value
    dashes = "--" if word.startswith("--") else ""
    key, equals, value = word.removeprefix("--").partition("=")
    if equals:
        return _values(root, given, key, value, f"{dashes}{key}=")
    if not word.startswith("-"):
        return _keys(root, given, word)
    options = _matching(word, (*SETTINGS_OPTIONS, *FILE_OPTIONS))
    return sorted([*options, *(dashes + known for known in _keys(root, given, key) if dashes)])


def _keys(root: str, given: Sequence[str], word: str) -> list[str]:
    """Keys one level on: `trainer.` before its keys, `trainer.max_steps=` at the end."""
    found = set()
    for key in {*known_keys(root, given), *_groups(config_dir() / f"{root}.yaml")}:
        if key.startswith(word):
            inner, dot, _ = key[len(word) :].partition(".")
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
    """The values of a key, each after `prefix`: a group's choices, words, or paths."""
    folder, name = config_dir() / key, key.rpartition(".")[2]
    if folder.is_dir() and re.fullmatch(r"\w+", key):
        return _matching(value, [file.stem for file in folder.glob("*.yaml")], prefix)
    if name in PATHS or name.endswith("_dir"):
        return _paths(value, prefix)
    if isinstance(known_keys(root, given).get(key), bool):
        return _matching(value, ["false", "true"], prefix)
    comments = {
        (f"{package}." if package else "") + inner: comment
        for package, file in _files(root, given)
        for inner, comment in _comments(_read(file)[0])
    }
    return _matching(value, _listed(comments.get(key, "")), prefix)


def _paths(value: str, prefix: str) -> list[str]:
    """Files and folders that begin with `value`; a folder's name continues after its `/`."""
    folder, slash, start = value.rpartition("/")
    try:
        entries = sorted(Path(os.path.expanduser(folder + slash or ".")).iterdir())
    except OSError:
        return []
    return [
        f"{prefix}{folder}{slash}{entry.name}{'/' if entry.is_dir() else ' '}"
        for entry in entries
        if entry.name.startswith(start) and (start.startswith(".") or entry.name[0] != ".")
    ]


def _matching(word: str, choices: Iterable[str], prefix: str = "") -> list[str]:
    return sorted(f"{prefix}{choice} " for choice in choices if choice.startswith(word))


def _listed(comment: str) -> list[str]:
    """`a`, `b` of a comment such as `of the model: a | b`."""
    end = _CHOICES.search(comment.strip()) if "|" in comment else None
    parts = re.sub(r"\([^)]*\)?", "", end[1]).split("|") if end else []
    return [part.strip() for part in parts if _WORD.fullmatch(part.strip())]


def known_keys(root: str, given: Sequence[str] = ()) -> dict[str, Any]:
    """{"trainer.max_steps": 1000, …}: the keys of a root file with the choices among `given`."""
    values: dict[str, Any] = {}
    for package, file in _files(root, given):
        content = {key: value for key, value in _read(file)[1].items() if key != "defaults"}
        _merge(values, {package: content} if package else content)
    return _flat(values)


def _files(root: str, given: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """(section or nothing, file) of each file that is composed, in the order of precedence."""
    pairs = (word.removeprefix("--").partition("=") for word in given)
    chosen = {key: value for key, equals, value in pairs if equals}
    experiment = config_dir() / "experiment" / f"{chosen.get('experiment')}.yaml"
    overridden = {key.removeprefix("override /"): to for key, to in _defaults(experiment) if to}
    yield from _included(config_dir() / f"{root}.yaml", "", {**overridden, **chosen})
    yield "", experiment


def _included(file: Path, section: str, chosen: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    for key, choice in _defaults(file):
        if choice is None and key != "_self_":  # another file of this folder
            yield from _included(file.with_name(f"{key}.yaml"), section, chosen)
        elif choice is not None and not section and key != "experiment":
            group = config_dir() / key / f"{chosen.get(key, choice)}.yaml"
            yield from _included(group, key, chosen)
    yield section, file


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
    """(the text of a YAML file, its content), both empty where there is none."""
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
    """{"trainer.max_steps": 1000, …}, without the keys that Hydra alone reads."""
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
        found = re.match(r"( *)([\w.]+):.*?(?:  # (.*))?$", line)
        if found is not None:
            inside = [(depth, name) for depth, name in inside if depth < len(found[1])]
            inside.append((len(found[1]), found[2]))
            if found[3]:
                yield ".".join(name for _, name in inside), found[3]
