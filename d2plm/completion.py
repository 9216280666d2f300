"""d2plm completion: commands, actions, options, keys, choices and paths for the shell's TAB.

It runs at every press of TAB, so it reads the YAML files itself: importing Hydra takes a second. It
offers the keys of every choice of a group; Hydra rejects those that the chosen one lacks.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from d2plm.commands.table import COMMANDS, EXTERNAL, PLAIN
from d2plm.core import terminal
from d2plm.core.errors import require_choice
from d2plm.core.files import config_dir

# Of commands with settings, without a value.
OPTIONS = ("--cfg", *terminal.MULTIRUN, *terminal.SWITCHES, *terminal.HELP, *terminal.OPTIONS)
# Keys, by their last part, whose values are places on disk, as are those that end in _dir.
PATHS = {
    *("input", "output", "store", "root", "run", "checkpoint", "mutations", "templates"),
    *("init_from", "proteins", "validation_ids", "test_ids", "checkpoints"),
    *("reference", "relatives"),
}

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
    if not words or words[0] in terminal.HELP:
        terminal.result(USAGE)
    elif words[0] == "candidates" and len(words) == 2:
        print("".join(f"{candidate}\n" for candidate in candidates(words[1])), end="")
    elif words[0] in SCRIPTS and len(words) == 1:
        print(SCRIPTS[words[0]], end="")
    else:
        require_choice("d2plm completion", " ".join(words), SCRIPTS)
    return 0


def candidates(line: str) -> list[str]:
    """The completions of the last word of a command line, which ends at the cursor.

    Whole words, sorted. One after which the next word may begin ends in a blank.
    """
    *before, word = _split(line)
    given = [known for known in before[1:] if known not in terminal.OPTIONS]
    commands = {**COMMANDS, **EXTERNAL}
    if not given:
        return _matching(word, [*commands, *PLAIN, *terminal.GLOBAL_OPTIONS[1:]])
    name = root = given.pop(0)
    if name in EXTERNAL:
        root = "pipeline"
    if name in PLAIN:
        return [] if given else _matching(word, SCRIPTS)
    command = commands.get(name)
    if command is not None and command.actions:
        if not given:
            return _matching(word, [*command.actions, "--help"])
        action = given.pop(0)
        command = command.actions.get(action)
        root = root if name in EXTERNAL else f"{name}_{action}"
    if command is None:
        return []
    found = _settings(root, given, word)
    if command.first_key and not word.startswith("-") and "=" not in word:
        found += _paths(word, "")
    return sorted(set(found))


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
    if option in terminal.CONFIG_OPTIONS:
        return _paths(word, "")
    if option.startswith("--") and "=" not in option and option not in OPTIONS:
        return _values(root, option.removeprefix("--"), word)  # --key value
    dashes = "--" if word.startswith("--") else ""
    key, equals, value = word.removeprefix("--").partition("=")
    if equals:
        return _values(root, key, value, f"{dashes}{key}=")
    if not word.startswith("-"):
        return _keys(root, word)
    options = _matching(word, (*OPTIONS, *terminal.CONFIG_OPTIONS))
    return sorted([*options, *(dashes + known for known in _keys(root, key) if dashes)])


def _keys(root: str, word: str) -> list[str]:
    """Keys one level on: `trainer.` before its keys, `trainer.max_steps=` at the end."""
    groups = {section for section, _ in _files(config_dir() / f"{root}.yaml") if section}
    found = set()
    for key in {*known_keys(root), *groups}:
        if key.startswith(word):
            inner, dot, _ = key[len(word) :].partition(".")
            found.add(word + inner + (dot or "="))
    return sorted(found)


def _values(root: str, key: str, value: str, prefix: str = "") -> list[str]:
    """The values of a key, each after `prefix`: a group's choices, words, or paths."""
    folder, name = config_dir() / key, key.rpartition(".")[2]
    if folder.is_dir() and re.fullmatch(r"\w+", key):
        return _matching(value, [file.stem for file in folder.glob("*.yaml")], prefix)
    if name in PATHS or name.endswith("_dir"):
        return _paths(value, prefix)
    default, comment = known_keys(root).get(key, ("", ""))
    choices = ["false", "true"] if default in ("false", "true") else _listed(comment)
    return _matching(value, choices, prefix)


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
    """The choices at the end of a key's comment, such as `of the model: a | b (on CUDA)`."""
    last = re.split("[:;(] ?", re.sub(r" \([^()|]*\)", "", comment))[-1].removesuffix(")")
    choices = last.split(" | ") if "|" in last else []
    return choices if all(re.fullmatch(r"[\w.-]+", choice) for choice in choices) else []


def known_keys(root: str) -> dict[str, tuple[str, str]]:
    """Key → (value, comment): the keys of a root file and of every choice of its groups."""
    known: dict[str, tuple[str, str]] = {}
    for section, file in _files(config_dir() / f"{root}.yaml"):
        for key, value, comment in _lines(file) if section != "experiment" else ():
            known[f"{section}.{key}" if section else key] = value, comment
    return known


def _files(file: Path) -> Iterator[tuple[str, Path]]:
    """(section or nothing, file) of all files that a root file can be composed of."""
    for entry, choice in re.findall(r"^  - ([\w/]+)(: .*)?$", file.read_text(), re.MULTILINE):
        if choice:
            yield from ((entry, option) for option in (config_dir() / entry).glob("*.yaml"))
        elif entry != "_self_":
            yield from _files(file.with_name(f"{entry}.yaml"))
    yield "", file


def _lines(file: Path) -> Iterator[tuple[str, str, str]]:
    """(dotted key, value, comment) of the lines `key: value  # comment`."""
    inside: list[tuple[int, str]] = []
    for line in file.read_text().splitlines():
        found = re.match(r"( *)([\w.]+):(.*?)(?:  # (.*))?$", line)
        if found is None:
            continue
        indent, name, value, comment = found.groups("")
        inside = [(depth, outer) for depth, outer in inside if depth < len(indent)]
        inside.append((len(indent), name))
        if value.strip() and name not in ("_target_", "defaults"):
            yield ".".join(outer for _, outer in inside), value.strip(), comment
