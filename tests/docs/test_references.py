"""Commands, links and anchors that the documents name exist, and commands take their settings.

No command is run: its words are parsed and its configuration is composed, as `--cfg job` does.
"""

import atexit
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import cache
from itertools import dropwhile, groupby, takewhile
from pathlib import Path
from tempfile import mkdtemp

import pytest

from d2plm.commands.multirun import expand
from d2plm.commands.table import COMMANDS, EXTERNAL, PLAIN
from d2plm.config import MULTIRUN, compose, parse_arguments, words_of_job
from d2plm.core.errors import ConfigError, D2PLMError
from d2plm.core.files import config_dir
from d2plm.core.terminal import HELP
from pipelines.command import ACTIONS, parse
from tests.docs import markdown
from tests.docs.conftest import OWN
from tests.docs.markdown import DOCUMENTS, ROOT, anchors, blocks, links, of

OPERATORS = {"|", "||", "&&", ";", "&", "(", ")"}
LEFT_OUT = ("…", "...")  # what a document leaves to the reader, as a word or as a value
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {
    target
    for names in re.findall(r"^([a-z][a-z0-9 -]*):(?!=)", MAKEFILE, re.M)
    for target in names.split()
}
COMMAND = re.compile(r"(\S+=\S+ )*(d2plm|make|torchrun|accelerate|python -m d2plm(?!\.))\b")
MANNERS = ("--quiet", "--json")  # of any command, before or after its name
GENERAL = ("<command>", "COMMAND")  # what may stand for a command's name in a sentence
WRITTEN = re.compile(r"^cat > configs/(\S+) <<'(\w+)'\n(.*?\n)\2$", re.M | re.S)


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell line, each in words, without assignments before and redirections."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    for is_operator, words in groupby(lexer, OPERATORS.__contains__):
        given = takewhile(lambda word: not re.match(r"\d?[<>]", word), words)
        kept = [*dropwhile(lambda word: re.fullmatch(r"[A-Z_0-9]+=.*", word), given)]
        if kept and not is_operator:
            yield kept


def named(document: Path) -> Iterator[tuple[str, list[str]]]:
    """(where, words) of everything that the document would have one run."""
    for block in blocks(document):
        if block.language in ("", "bash", "sh"):
            for line in markdown.command_lines(block.text):
                if re.search(r"\b(d2plm|make)\b", line):
                    try:
                        yield from ((block.place, words) for words in commands(line))
                    except ValueError:  # a line of output with a lone quote
                        assert not re.match(r"(\$ )?(d2plm|make) ", line), (block.place, line)
    for code in markdown.inline_code(document):
        part_of_a_message = code.count("'") % 2 == 1
        if COMMAND.match(code) and not part_of_a_message:
            yield from ((f"{of(document)}: {code}", words) for words in commands(code))


def d2plm_words(words: list[str]) -> list[str]:
    """What follows `d2plm`, however it is started; nothing for another program."""
    place = words.index("d2plm") if "d2plm" in words else -1
    return words[place + 1 :] if place == 0 or (place > 0 and words[place - 1] == "-m") else []


@cache
def configurations() -> Path:
    """The configurations, and beside them those that documents have their reader write."""
    folder = Path(mkdtemp(prefix="d2plm-configs-"))
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(config_dir(), folder, dirs_exist_ok=True)
    for document in DOCUMENTS:
        for block in blocks(document):
            for name, _, text in WRITTEN.findall(block.text):
                (folder / name).write_text(text)
            if "\nregister(" in block.text:
                (folder / OWN).write_text(block.text)
    return folder


@cache
def refuse(*given: str) -> str | None:
    """Why the command line `d2plm GIVEN` would be rejected, or None."""
    words = [word.replace("…", "x") for word in given if word not in (*LEFT_OUT, *MANNERS)]
    words = [str(configurations() / OWN) if word == OWN else word for word in words]
    if not words or words[0] in (*HELP, "help", "--version", *GENERAL):
        return None
    name, rest = words[0], words[1:]
    if name not in {**COMMANDS, **EXTERNAL, **PLAIN}:
        return f"there is no command {name}"
    if name in PLAIN or {*rest} & {*HELP} or (name in EXTERNAL and not rest):
        return None
    try:
        return refuse_pipeline(rest) if name in EXTERNAL else refuse_command(name, rest)
    except D2PLMError as error:
        return str(error)


def refuse_pipeline(words: list[str]) -> str | None:
    action = words[0]
    if action not in ACTIONS:
        return f"there is no action {action}"
    if action == "cancel":
        return None
    request = parse(action, words[1:])
    root = request.options.get("sweep", "pipeline")
    compose(root, parse_arguments(root, request.overrides).overrides, folder=configurations())
    return None


def refuse_command(name: str, words: list[str]) -> str | None:
    command = COMMANDS[name]
    root = name
    if command.actions:
        if not words:
            return None
        if words[0] not in command.actions:
            return f"there is no action {words[0]}"
        root, command = f"{name}_{words[0]}", command.actions[words[0]]
        words = words[1:]
    in_pods = [word.partition("=")[2] for word in words if word.startswith("command=")]
    if name == "job" and in_pods:  # the others are settings of the command in the pods
        words, others = words_of_job(words)
        if reason := refuse_command(in_pods[0], others):
            return reason
    words = [word for word in words if not word.startswith("--config-file")]  # of a run
    if not [word for word in words if word not in MULTIRUN]:
        return None  # a command by itself is composed by tests/unit/test_config.py
    arguments = parse_arguments(root, words, command.first_key)
    expanded = expand(arguments).values() if arguments.multirun else []
    for overrides in [overrides for _, overrides in expanded] or [arguments.overrides]:
        try:
            compose(root, overrides, arguments.name, arguments.folder or configurations())
        except ConfigError as error:
            if "is required" not in str(error):  # documents may leave out what is not their topic
                raise
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_every_command_and_make_target_exists_and_takes_its_settings(document: Path) -> None:
    refused = []
    for where, words in named(document):
        if reason := refuse(*d2plm_words(words)):
            refused.append(f"{where}: {' '.join(words)}: {reason}")
        targets = words[1:] if words[0] == "make" else []
        wanted = {word for word in targets if re.fullmatch(r"[a-z][a-z0-9-]*", word)}
        assert not wanted - TARGETS, where
    assert not refused, "\n".join(refused)


def test_a_command_that_is_not_is_found() -> None:
    lines = {
        "d2plm trian model=8m": "no command trian",
        "d2plm train model=9m": "model=9m: no such choice",
        "X=1 d2plm pipeline run experiment=dem | head": "experiment=dem: no such choice",
        "torchrun --nproc-per-node=8 -m d2plm train no=1": "unknown key 'no'",
        "d2plm train --multirun optimizer.lr=1,2": "unknown key 'optimizer.lr'",
    }
    for line, reason in lines.items():
        assert reason in (refuse(*d2plm_words(next(commands(line)))) or ""), line


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md", "docs/python.md"])
def test_every_block_is_run_or_says_what_it_needs(name: str) -> None:
    run_by_tests = {"README.md": ("python",), "docs/tutorial.md": ("bash",)}
    silent = [
        block.place
        for block in blocks(ROOT / name)
        if block.language not in run_by_tests.get(name, ("python",)) and not block.needs
    ]
    assert not silent


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_every_relative_link_and_anchor_resolves(document: Path) -> None:
    broken = []
    for target in links(document):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_the_index_of_documents_names_each_of_them() -> None:
    index = ROOT / "docs" / "README.md"
    named = {target.partition("#")[0] for target in links(index)}
    assert named >= {file.name for file in (ROOT / "docs").glob("*.md")} - {"README.md"}
