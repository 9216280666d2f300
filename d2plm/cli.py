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
from itertools import pairwise
from typing import Any

from d2plm.commands.table import COMMANDS, EXTERNAL, PLAIN, Command
from d2plm.core import terminal
from d2plm.core.errors import ConfigError, D2PLMError, DataError, OutputError, did_you_mean
from d2plm.core.machine import configure_home, configure_threads, use_utf8
from d2plm.core.processes import end_with_parent, unwound_by_sigterm
from d2plm.core.redaction import redacted
from d2plm.core.terminal import GLOBAL_OPTIONS, HELP

USAGE = """usage: d2plm <command> [key=value ...]

Train and use protein language models by discrete diffusion and flow matching.

{commands}

Every command accepts Hydra overrides (model=35m trainer.max_steps=1000 ...) and these options:
  --KEY VALUE           same as KEY=VALUE
  --help                show a description, an example and the usual keys; --help --all: all keys
  --module FILE         import a module that registers paradigms, callbacks, … of your own
  --cfg [job]           print the composed configuration and exit
  -m, --multirun        train only: one run for every combination of values (key=a,b ...)
{options}
  --dry-run             train, compare, scaling: check everything, print what would run, and exit
  --config-name NAME    use another root file
  --config-dir DIR      read configurations from this folder
  --config-file FILE    use a complete configuration, such as the config.yaml of a run

d2plm --version prints the versions of d2plm and the libraries that it uses.
Example: d2plm pipeline run experiment=demo"""
ALL = "--all"  # with --help: show every key


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code; user errors are reported in one line."""
    if arguments is None:
        use_utf8()
        terminal.open_streams()
    words = sys.argv[1:] if arguments is None else arguments
    modes = {terminal.OPTIONS[word][0] for word in words if word in terminal.OPTIONS}
    configure_home()
    configure_threads()
    end_with_parent()
    with terminal.output_in(terminal.output_modes() | modes):
        return _run([word for word in words if word not in terminal.OPTIONS])


def _run(words: list[str]) -> int:
    try:
        with unwound_by_sigterm():  # so that child processes are stopped
            return _output_of(words)
    except D2PLMError as error:
        if terminal.DEBUG in terminal.output_modes():
            traceback.print_exc()
        if isinstance(error, OutputError):  # the interpreter would write the rest at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), terminal.STANDARD_OUTPUT)
            if isinstance(error.__cause__, BrokenPipeError):  # such as `| head`
                return error.exit_code
        _report(redacted(f"d2plm: error: {error}"), error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        print("d2plm: interrupted", file=sys.stderr)
        return 130
    except Exception:  # a bug in d2plm; of several ranks, only one traceback is shown
        if "RANK" not in os.environ:
            raise
        _report(traceback.format_exc(), 1, is_bug=True)
        return 1


def _output_of(words: list[str]) -> int:
    """Run the command and write all of its output, even before an error."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise DataError("the working folder was deleted; change to another one") from None
    try:
        return _dispatch(words)
    except D2PLMError as error:
        _show(error.document)
        raise
    finally:
        sys.stdout.flush()


def _report(text: str, exit_code: int, is_bug: bool = False) -> None:
    """Print an error; a rank leaves this to the process that started it, which prints it once."""
    from d2plm.launch.elastic import leave_error

    if not leave_error(text, exit_code, is_bug):
        print(terminal.shown(text), file=sys.stderr)


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
        from d2plm.settings.registry import load_modules

        load_modules([after for word, after in pairwise(rest) if word == terminal.MODULE])
        print(_command_help(called, command, everything=ALL in rest))
        return 0
    _show(_run_command(called, command, rest))
    return 0


def _run_command(called: list[str], command: Command, words: list[str]) -> Any:
    from d2plm.config import as_yaml, check_paths, parse_arguments, plain

    root = "_".join(called)
    arguments = parse_arguments(root, words, command.first_key)
    if arguments.multirun:
        if command.sweep_example is None:
            raise ConfigError(f"--multirun: not supported by {' '.join(called)}; use d2plm train")
        from d2plm.commands.multirun import run as run_sweep

        return run_sweep(arguments)
    if command.takes_words and (arguments.name or arguments.folder or arguments.file):
        raise ConfigError(
            f"{' '.join(called)}: --config-name, --config-dir and --config-file are not passed to "
            "the job's pods; give settings as key=value"
        )
    config = arguments.compose()
    if arguments.show_only:
        terminal.result(as_yaml(config).rstrip())
        return plain(config)
    check_paths(root, config, command.reads)
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
    """Usage, example and the keys with their defaults: the usual ones, or all."""
    from d2plm.config import defaults_of
    from d2plm.settings.commands import SETTINGS
    from d2plm.settings.schema import keys

    known, defaults = keys(SETTINGS["_".join(called)]), defaults_of("_".join(called))
    which, shown = "every key", list(known)
    if command.usual_keys and not everything:
        which = f"the usual keys; every key: d2plm {' '.join(called)} --help {ALL}"
        shown = [key for usual in command.usual_keys for key in _matching(usual, known)]
    rows = dict(_key_row(key, known, defaults) for key in shown)
    width = min(max(map(len, rows)), 50)
    text = "\n".join(f"  {row:{width}}  {said}" for row, said in rows.items())
    sweep = f"A sweep: {command.sweep_example}\n" if command.sweep_example else ""
    return (
        f"usage: d2plm {' '.join(called)} [key=value ...]\n\n{_sentence(command.summary)}\n\n"
        f"Example: {command.example}\n{sweep}\n"
        f"Configuration ({which}):\n{text}"
    )


def _matching(usual: str, known: Mapping[str, Any]) -> list[str]:
    """Expand a usual key: a section, which ends with a dot, to its keys."""
    return [key for key in known if key.startswith(usual)] if usual[-1] == "." else [usual]


def _key_row(key: str, known: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[str, str]:
    """`key=default` and its description; of a group, its choice in configs/pipeline.yaml."""
    if key not in known:
        from d2plm.config import choices_of, default_choice

        return f"{key}={default_choice(key)}", f"one of {', '.join(choices_of(key))}"
    one = known[key]
    default = defaults.get(key, one.default)  # a type that is not chosen has its own
    text = default if isinstance(default, str) else json.dumps(default)
    return f"{key}={text}", one.described


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."
