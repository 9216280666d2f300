"""`d2plm <command> [key=value …]`: finds the command, composes its configuration, runs it.

Nothing heavy is imported before a command is known, so that help is instant. A command of another
package (the pipelines) is found through the entry-point group `d2plm.commands`.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

from d2plm.commands.table import COMMANDS, EXTERNAL, PLAIN, Command
from d2plm.core import terminal
from d2plm.core.cores import limit_threads
from d2plm.core.errors import ConfigError, D2PLMError, did_you_mean
from d2plm.core.signals import unwound_by_sigterm
from d2plm.core.terminal import GLOBAL_OPTIONS, HELP

ENTRY_POINTS = "d2plm.commands"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code; errors of the user's are one line."""
    words, asked = terminal.take_options(sys.argv[1:] if arguments is None else arguments)
    limit_threads()
    with terminal.output_in(terminal.output_modes() | asked):
        return _run(words)


def _run(words: list[str]) -> int:
    try:
        with unwound_by_sigterm():  # so that child processes end
            return _dispatch(words)
    except D2PLMError as error:
        if terminal.DEBUG in terminal.output_modes():
            traceback.print_exc()
        if error.document is not None:
            _show(error.document)
        _tell(f"d2plm: error: {error}", error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        print("d2plm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception:  # a defect of ours: its traceback, of several ranks' told once
        if "RANK" not in os.environ:
            raise
        _tell(traceback.format_exc(), 1)
        return 1


def _tell(text: str, exit_code: int) -> None:
    """Print an error; one of several ranks leaves it to whoever started them, to be told once."""
    from d2plm.launch.elastic import leave_error

    if not leave_error(text, exit_code):
        print(text, file=sys.stderr)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in (*HELP, "help"):
        print(_help())
        return 0
    name, rest = words[0], words[1:]
    if name == "--version":
        from d2plm.core import versions

        terminal.result(versions.table())
        _show(versions.versions())
        return 0
    if name in EXTERNAL:
        return _external(name)(rest)
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
    root = "_".join(called)
    from d2plm.config import parse_arguments

    if any(word in HELP for word in rest):
        print(_command_help(" ".join(called), command, root))
        return 0
    arguments = parse_arguments(root, rest, command.first_key)
    if arguments.multirun:
        if command.sweep_example is None:
            raise ConfigError(f"--multirun: {' '.join(called)} takes no sweep; d2plm train does")
        from d2plm.commands.multirun import run as run_sweep

        _show(run_sweep(arguments))
        return 0
    if command.takes_words and (arguments.name != root or arguments.folder or arguments.file):
        raise ConfigError(
            f"{' '.join(called)}: the job's pods compose its settings anew, of key=value alone; "
            "--config-name, --config-dir and --config-file do not reach them"
        )
    config = arguments.compose()
    if arguments.show_only:
        terminal.result(config.as_yaml().rstrip())
        _show(config.values)
        return 0
    module = importlib.import_module(f"d2plm.commands.{name}")
    run = getattr(module, "_".join(["run", *called[1:]]))
    _show(run(config, *([arguments.overrides] if command.takes_words else [])))
    return 0


def _show(document: object) -> None:
    """With `--json`, what a command has found; what it printed for people was left out."""
    if document is not None and terminal.JSON in terminal.output_modes():
        terminal.write_document(document)


def _chosen(
    word: str, choices: Mapping[str, Command], what: str, where: str, more: Sequence[str] = ()
) -> Command:
    """The choice of this name; where there is none, those of `more` are suggested, too."""
    if word not in choices:
        near = did_you_mean(word, [*choices, *more])
        raise ConfigError(f"unknown {what} {word!r}{near}; see {where} --help")
    return choices[word]


def _external(name: str):  # type: ignore[no-untyped-def]  # whatever the entry point gives
    for entry_point in entry_points(group=ENTRY_POINTS, name=name):
        return entry_point.load()
    raise ConfigError(f"'{name}' is not installed: pip install 'd2plm[pipelines]'")


def _help() -> str:
    commands = {**COMMANDS, **EXTERNAL, **PLAIN}
    width = max(map(len, commands)) + 2
    rows = [f"  {name:{width}}{command.summary}" for name, command in commands.items()]
    return "\n".join(
        [
            "usage: d2plm <command> [key=value ...]",
            "",
            "Train and use protein language models by discrete diffusion and flow matching.",
            "",
            *rows,
            "",
            "Every command takes Hydra overrides (model=35m, trainer.max_steps=1000, ...) and",
            "  --KEY VALUE           the same as KEY=VALUE",
            "  --help                what the command does, an example, its configuration",
            "  --cfg job             print the composed configuration and exit; also --cfg",
            "  -m, --multirun        of train: a run for every combination of values (key=a,b ...)",
            *(f"  {option:22}{says}" for option, (_, says) in terminal.OPTIONS.items()),
            "  --dry-run             of train: check everything, say what would run, and exit",
            "  --config-name NAME    another root file;  --config-dir DIR  other configurations",
            "  --config-file FILE    a whole configuration, as a run wrote it (config.yaml)",
            "",
            "d2plm --version tells the versions that matter.",
            "Example: d2plm pipeline run experiment=demo",
        ]
    )


def _actions_help(name: str, command: Command) -> str:
    width = max(map(len, command.actions)) + 2
    rows = [
        line
        for action, described in command.actions.items()
        for line in (f"  {action:{width}}{described.summary}", f"  {'':{width}}{described.example}")
    ]
    return "\n".join(
        [
            f"usage: d2plm {name} <action> [key=value ...]",
            "",
            _sentence(command.summary),
            "",
            *rows,
            "",
            f"d2plm {name} <action> --help shows an action's configuration.",
        ]
    )


def _command_help(called: str, command: Command, root: str) -> str:
    from d2plm.config import compose
    from d2plm.core.files import config_dir

    # A file that stands alone is shown as it is, with what it says about its keys.
    written = (config_dir() / f"{root}.yaml").read_text()
    alone = "defaults:" not in written
    return "\n".join(
        [
            f"usage: d2plm {called} [key=value ...]",
            "",
            _sentence(command.summary),
            "",
            f"Example: {command.example}",
            *([f"A sweep: {command.sweep_example}"] if command.sweep_example else []),
            "",
            f"Configuration ({'' if alone else 'groups: configs/*/; '}override any key):",
            written.partition("\n")[2] if alone else compose(root, [], complete=False).as_yaml(),
        ]
    )


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


if __name__ == "__main__":
    sys.exit(main())
