"""`d2plm <command> [key=value …]`: finds the command, composes its configuration, runs it.

Heavy modules are imported only after the command is known, so that help is instant. Commands of
other packages (the pipelines) are found through the entry-point group `d2plm.commands`.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from d2plm.commands.table import COMMANDS, EXTERNAL, PLAIN, Command
from d2plm.core import terminal
from d2plm.core.errors import ConfigError, D2PLMError, did_you_mean
from d2plm.core.lifetime import end_with_parent
from d2plm.core.machine import configure_threads
from d2plm.core.redaction import redacted
from d2plm.core.signals import unwound_by_sigterm
from d2plm.core.terminal import GLOBAL_OPTIONS, HELP

USAGE = """usage: d2plm <command> [key=value ...]

Train and use protein language models by discrete diffusion and flow matching.

{commands}

Every command accepts Hydra overrides (model=35m trainer.max_steps=1000 ...) and these options:
  --KEY VALUE           same as KEY=VALUE
  --help                show a description, an example and the usual keys; --help --all: all keys
  --cfg [job]           print the composed configuration and exit
  -m, --multirun        train only: one run for every combination of values (key=a,b ...)
{options}
  --dry-run             train and scaling only: check everything, print what would run, and exit
  --config-name NAME    use another root file
  --config-dir DIR      read configurations from this folder
  --config-file FILE    use a complete configuration, such as the config.yaml of a run

d2plm --version prints the versions of d2plm and the libraries that it uses.
Example: d2plm pipeline run experiment=demo"""


ALL = "--all"  # with --help: show every key


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code; user errors are reported in one line."""
    words = sys.argv[1:] if arguments is None else arguments
    modes = {terminal.OPTIONS[word][0] for word in words if word in terminal.OPTIONS}
    configure_threads()
    end_with_parent()
    with terminal.output_in(terminal.output_modes() | modes):
        return _run([word for word in words if word not in terminal.OPTIONS])


def _run(words: list[str]) -> int:
    try:
        with unwound_by_sigterm():  # so that child processes are stopped
            return _dispatch(words)
    except D2PLMError as error:
        if terminal.DEBUG in terminal.output_modes():
            traceback.print_exc()
        _show(error.document)
        _report(redacted(f"d2plm: error: {error}"), error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        print("d2plm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception:  # a bug in d2plm; of several ranks, only one traceback is shown
        if "RANK" not in os.environ:
            raise
        _report(traceback.format_exc(), 1, is_bug=True)
        return 1


def _report(text: str, exit_code: int, is_bug: bool = False) -> None:
    """Print an error; a rank leaves this to the process that started it, which prints it once."""
    from d2plm.launch.elastic import leave_error

    if not leave_error(text, exit_code, is_bug):
        print(text, file=sys.stderr)


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:], "--help"]
    if not words or words[0] in (*HELP, "help"):
        options = "\n".join(f"  {name:22}{text}" for name, (_, text) in terminal.OPTIONS.items())
        print(USAGE.format(commands=_listed({**COMMANDS, **EXTERNAL, **PLAIN}), options=options))
        return 0
    name, *rest = words
    if name == "--version":
        from d2plm.core import versions

        found = versions.versions()
        terminal.result(terminal.aligned(found))
        _show(found)
        return 0
    if name in EXTERNAL:
        return _run_external(name, rest)
    if name in PLAIN:
        return int(importlib.import_module(f"d2plm.{name}").main(rest))
    command = _chosen(name, COMMANDS, "command", "d2plm", [*EXTERNAL, *PLAIN, *GLOBAL_OPTIONS])
    called = [name]
    if command.actions:
        if not rest or rest[0] in HELP:
            print(_actions_help(name, command))
            return 0
        command = _chosen(rest[0], command.actions, "action", f"d2plm {name}")
        called.append(rest.pop(0))
    if any(word in (*HELP, ALL) for word in rest):
        print(_command_help(called, command, everything=ALL in rest))
        return 0
    _show(_run_command(called, command, rest))
    return 0


def _run_command(called: list[str], command: Command, words: list[str]) -> Any:
    from d2plm.config import parse_arguments
    from d2plm.keys import check_paths

    root = "_".join(called)
    arguments = parse_arguments(root, words, command.first_key)
    if arguments.multirun:
        if command.sweep_example is None:
            raise ConfigError(f"--multirun: not supported by {' '.join(called)}; use d2plm train")
        from d2plm.commands.multirun import run as run_sweep

        return run_sweep(arguments)
    if command.takes_words and (arguments.name != root or arguments.folder or arguments.file):
        raise ConfigError(
            f"{' '.join(called)}: --config-name, --config-dir and --config-file are not passed to "
            "the job's pods; give settings as key=value"
        )
    config = arguments.compose()
    if arguments.show_only:
        terminal.result(config.as_yaml().rstrip())
        return config.values
    check_paths(root, config.flat(), command.reads)
    module = importlib.import_module(f"d2plm.commands.{called[0]}")
    run = getattr(module, "_".join(["run", *called[1:]]))
    return run(config, *([arguments.overrides] if command.takes_words else []))


def _show(document: object) -> None:
    """With `--json`, write the result of a command as a document."""
    if document is not None and terminal.JSON in terminal.output_modes():
        terminal.write_document(document)


def _chosen(
    word: str, choices: Mapping[str, Command], what: str, where: str, more: Sequence[str] = ()
) -> Command:
    if word not in choices:
        near = did_you_mean(word, [*choices, *more])
        near = f": the {what} comes before settings" if "=" in word else near
        raise ConfigError(f"unknown {what} {word!r}{near}; see {where} --help")
    return choices[word]


def _run_external(name: str, words: list[str]) -> int:
    from importlib.metadata import entry_points

    for entry_point in entry_points(group="d2plm.commands", name=name):
        return int(entry_point.load()(words))
    raise ConfigError(f"'{name}' is not installed: pip install 'd2plm[pipelines]'")


def _listed(commands: Mapping[str, Command], examples: bool = False) -> str:
    width = max(map(len, commands)) + 2
    lines = []
    for name, command in commands.items():
        lines.append(f"  {name:{width}}{command.summary}")
        lines += [f"  {'':{width}}{command.example}"] * examples
    return "\n".join(lines)


def _actions_help(name: str, command: Command) -> str:
    return (
        f"usage: d2plm {name} <action> [key=value ...]\n\n{_sentence(command.summary)}\n\n"
        f"{_listed(command.actions, examples=True)}\n\n"
        f"d2plm {name} <action> --help shows an action's configuration."
    )


def _command_help(called: list[str], command: Command, everything: bool) -> str:
    from d2plm.config import compose
    from d2plm.core.files import config_dir

    root = "_".join(called)
    written = (config_dir() / f"{root}.yaml").read_text()
    which, text = "override any key", written.partition("\n")[2]  # keeps the comments on the keys
    if "defaults:" in written:
        config = compose(root, [], complete=False)
        which, text = "groups: configs/*/; override any key", config.as_yaml()
        if command.usual_keys and not everything:
            which = f"the usual keys; every key: d2plm {' '.join(called)} --help {ALL}"
            text = _usual_keys(root, command.usual_keys, config.flat())
    sweep = f"A sweep: {command.sweep_example}\n" if command.sweep_example else ""
    return (
        f"usage: d2plm {' '.join(called)} [key=value ...]\n\n{_sentence(command.summary)}\n\n"
        f"Example: {command.example}\n{sweep}\n"
        f"Configuration ({which}):\n{text}"
    )


def _usual_keys(root: str, keys: Sequence[str], values: Mapping[str, Any]) -> str:
    """Table of keys with their defaults and their comments in configs/."""
    from d2plm.core.files import config_dir
    from d2plm.keys import groups, known_keys

    chosen, known, rows = groups(root), known_keys(root), dict[str, str]()
    for usual in keys:
        for key in [one for one in known if one.startswith(usual)] if usual[-1] == "." else [usual]:
            if key in chosen:
                choices = sorted(file.stem for file in (config_dir() / key).glob("*.yaml"))
                rows[f"{key}={chosen[key]}"] = f"one of {', '.join(choices)}"
            else:
                text, comment = known[key]
                if text != "???" and key in values:  # mappings are not: they are shown as written
                    text = json.dumps(values[key]).strip('"')
                rows[f"{key}={text}"] = comment
    width = max(map(len, rows))
    return "\n".join(f"  {row:{width}}  {said}" for row, said in rows.items())


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."
