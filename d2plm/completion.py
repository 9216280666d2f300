"""d2plm completion: shell completion of commands, actions, options, keys, choices and paths.

It runs at every press of TAB, so it reads the settings and never imports Hydra. It offers the keys
of every type of a section; composing rejects keys that the chosen type lacks.
"""

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from d2plm.commands.table import COMMANDS, EXTERNAL, PLAIN
from d2plm.core import terminal
from d2plm.core.errors import require_choice
from d2plm.core.files import config_dir

if TYPE_CHECKING:
    from d2plm.settings.schema import Key

# Options without a value, of commands with settings.
OPTIONS = ("--cfg", *terminal.MULTIRUN, *terminal.SWITCHES, *terminal.HELP, *terminal.OPTIONS)

USAGE = """usage: d2plm completion bash|zsh|fish

Set up shell completion of commands, actions, options, keys, choices and paths.

  bash  echo 'source <(d2plm completion bash)' >> ~/.bashrc
  zsh   echo 'source <(d2plm completion zsh)' >> ~/.zshrc     (after compinit)
  fish  d2plm completion fish > ~/.config/fish/completions/d2plm.fish"""
SCRIPTS = {
    "bash": """_d2plm() {
    local line=${COMP_LINE:0:COMP_POINT} word prefix= candidate
    word=${line##*[[:space:]]}
    # Bash splits words at = and :, and replaces only the part after the last one.
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
    """Print a shell's completion script or, called by that script, the candidates for a line."""
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
    """Sorted completions of a line's last word; a trailing blank marks a complete word."""
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
    """Split a line into words; the last may be empty or have an unclosed quote."""
    for ending in ("", "'", '"'):
        try:
            words = shlex.split(line + ending)
        except ValueError:
            continue
        return words if words and not line[-1:].isspace() else [*words, ""]
    return [""]


def _settings(root: str, given: Sequence[str], word: str) -> list[str]:
    """Completions of a setting, an option, or the value of the preceding option."""
    option = given[-1] if given else ""
    if option == "--config-name":
        return _matching(word, [file.stem for file in config_dir().glob("*.yaml")])
    if option in (*terminal.CONFIG_OPTIONS, terminal.MODULE):
        return _paths(word, "")
    if option.startswith("--") and "=" not in option and option not in OPTIONS:
        return _values(root, option.removeprefix("--"), word)  # --key value
    dashes = "--" if word.startswith("--") else ""
    key, equals, value = word.removeprefix("--").partition("=")
    if equals:
        return _values(root, key, value, f"{dashes}{key}=")
    if not word.startswith("-"):
        return _keys(root, word)
    options = _matching(word, (*OPTIONS, *terminal.CONFIG_OPTIONS, terminal.MODULE))
    return sorted([*options, *(dashes + known for known in _keys(root, key) if dashes)])


def _keys(root: str, word: str) -> list[str]:
    """Keys one level deeper: first `trainer.`, then `trainer.max_steps=`."""
    from d2plm.config import groups

    known = _known(root)
    selectable = groups() if "trainer.max_steps" in known else set()
    found = set()
    for key in {*known, *selectable}:
        if key.startswith(word):
            inner, dot, _ = key[len(word) :].partition(".")
            found.add(word + inner + (dot or "="))
    return sorted(found)


def _values(root: str, key: str, value: str, prefix: str = "") -> list[str]:
    """Completions of a key's value, each after `prefix`: choices of a group, words, or paths."""
    from d2plm.config import choices_of, groups

    one = _known(root).get(key)
    if one is None and key in groups():
        return _matching(value, choices_of(key), prefix)
    if one is None:
        return []
    return _paths(value, prefix) if one.path else _matching(value, one.choices, prefix)


def _known(root: str) -> "dict[str, Key]":
    from d2plm.settings.commands import SETTINGS
    from d2plm.settings.schema import keys

    return keys(SETTINGS[root]) if root in SETTINGS else {}


def _paths(value: str, prefix: str) -> list[str]:
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
