"""`d2plm <command> [key=value …]`: finds the command, composes its configuration, runs it.

Nothing heavy is imported before a command is known, so that help is instant. A command of another
package (the pipelines) is found through the entry-point group `d2plm.commands`.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from d2plm import terminal
from d2plm.cores import limit_threads
from d2plm.errors import ConfigError, D2PLMError, did_you_mean
from d2plm.signals import unwound_by_sigterm

ENTRY_POINTS = "d2plm.commands"
HELP = ("-h", "--help")
GLOBAL_OPTIONS = (*HELP, "--version", *terminal.OPTIONS)


@dataclass(frozen=True)
class Command:
    """A command of the house: `d2plm.commands.<name>.run(config)`, configured by `<name>.yaml`.

    One with actions, `d2plm <name> <action>`, has instead for each of them a function
    `run_<action>` and a `<name>_<action>.yaml`.
    """

    summary: str
    example: str
    actions: Mapping[str, "Command"] = field(default_factory=dict)
    sweep_example: str | None = None  # of a command that takes --multirun
    first_key: str | None = None  # that a first word without one is the value of
    takes_words: bool = False  # whether it is given its overrides, too, as they were written


COMMANDS = {
    "ingest": Command(
        "any protein collection (FASTA, LMDB, Parquet, CSV, Hugging Face) → raw LMDB store",
        "d2plm ingest input=proteins.fasta.gz output=raw_lmdb",
    ),
    "prepare": Command(
        "cluster, split and drop leaking sequences → train, validation and test stores",
        "d2plm prepare data.input=proteins.fasta.gz data.prepared_dir=prepared",
    ),
    "data": Command(
        "look inside sequence stores: stats, verify, head, export",
        "d2plm data stats store=prepared",
        {
            "stats": Command(
                "lengths, composition, clusters, size and origin of a store, or of prepared data",
                "d2plm data stats store=prepared output=stats.png",
            ),
            "verify": Command(
                "read everything and compare it with its digests",
                "d2plm data verify store=prepared",
            ),
            "head": Command(
                "the first sequences as FASTA on standard output",
                "d2plm data head store=prepared/train_lmdb number=5",
            ),
            "export": Command(
                "all sequences as FASTA, plain or .gz",
                "d2plm data export store=prepared/train_lmdb output=train.fasta.gz",
            ),
        },
    ),
    "train": Command(
        "train a model on a prepared store",
        "d2plm train paradigm=diffusion model=nano data.prepared_dir=prepared",
        sweep_example="d2plm train --multirun optimizer.learning_rate=1e-3,4e-4 model=nano,8m "
        "data.prepared_dir=prepared",
    ),
    "evaluate": Command(
        "likelihood bound of an exported model beside the baselines",
        "d2plm evaluate model_dir=runs/default/diffusion/model data.prepared_dir=prepared",
    ),
    "report": Command(
        "a run, its evaluation and its proteins as one HTML page",
        "d2plm report output_dir=runs/demo/diffusion",
        first_key="output_dir",
    ),
    "export": Command(
        "a checkpoint's averaged weights → self-describing model folder",
        "d2plm export output_dir=runs/default/diffusion model_dir=exported",
    ),
    "register": Command(
        "an evaluated model → the MLflow registry",
        "d2plm register model_dir=runs/default/diffusion/model",
    ),
    "generate": Command(
        "sample proteins, or fill in templates, with an exported model",
        "d2plm generate model_dir=runs/demo/model generation.number=10",
    ),
    "score": Command(
        "likelihood of each protein in a FASTA file, or effects of mutations (--mutations FILE)",
        "d2plm score model_dir=runs/demo/model input=proteins.fasta output=scores.csv",
    ),
    "compare": Command(
        "several arms, trained with several seeds, on the same proteins",
        "d2plm compare experiment=compare_paradigms",
    ),
    "scaling": Command(
        "several sizes and budgets, and the scaling law that their bounds follow",
        "d2plm scaling experiment=scaling",
    ),
    "replay": Command(
        "repeat a step of a run, same batch, masks and weights, to look into a spike",
        "d2plm replay runs/demo/diffusion --step 450",
        first_key="run",
    ),
    "checkpoint": Command(
        "the checkpoints of a run: list, verify, convert",
        "d2plm checkpoint list runs/demo/diffusion",
        {
            "list": Command(
                "step, epoch, ranks, bound and size of each",
                "d2plm checkpoint list runs/demo/diffusion",
                first_key="root",
            ),
            "verify": Command(
                "read every file and compare it with its digest",
                "d2plm checkpoint verify runs/demo/diffusion",
                first_key="root",
            ),
            "convert": Command(
                "to a folder of safetensors, or back (to=checkpoint)",
                "d2plm checkpoint convert runs/demo/diffusion/checkpoints/step-00001500 "
                "output=step1500",
                first_key="checkpoint",
            ),
        },
    ),
    "doctor": Command(
        "check this machine and the cluster, and say how to mend what is missing",
        "d2plm doctor launcher=pytorchjob launcher.namespace=d2plm launcher.gpus=8 --json",
    ),
    "job": Command(
        "training as a job in a cluster, without the pipeline: show, run",
        "d2plm job show launcher=pytorchjob launcher.name=mine work_dir=/workspace/mine "
        "data.input=/workspace/mine.fasta",
        {
            "show": Command(
                "its manifest, for kubectl apply -f -",
                "d2plm job show launcher=pytorchjob launcher.name=mine launcher.gpus=8 "
                "trainer=multi_gpu model=150m work_dir=/workspace/mine launcher.prepare=false",
                takes_words=True,
            ),
            "run": Command(
                "create it, follow it, and end as it ends",
                "d2plm job run launcher=pytorchjob launcher.name=mine work_dir=/workspace/mine "
                "data.input=/workspace/mine.fasta",
                takes_words=True,
            ),
        },
    ),
    "bench": Command(
        "measure this machine: data, train, attention, generate, peers",
        "d2plm bench train output=bench.json",
        {
            "train": Command(
                "a training step with and without each of its parts, and what it leaves behind",
                "d2plm bench train model=8m token_budget=8192 output=bench_train.json",
            ),
            "attention": Command(
                "the attention operator against padding, and against a call for each sequence",
                "d2plm bench attention heads=5 head_size=64 token_budget=8192",
            ),
            "generate": Command(
                "the samplers against a plain loop over sequences",
                "d2plm bench generate model_dir=runs/demo/model",
            ),
            "peers": Command(
                "our training step against Hugging Face's Trainer and Lightning, padded",
                "d2plm bench peers output=bench_peers.json",
            ),
            "data": Command(
                "ingest, store, packing, loader and MMseqs2, with goals",
                "d2plm bench data output=bench.json",
            ),
        },
    ),
}
# Commands with a `main(words)` of their own: of another package, or without settings.
EXTERNAL = {
    "pipeline": Command(
        "run, compile or submit the whole pipeline",
        "d2plm pipeline run experiment=demo",
        {
            "run": Command("run every step on this machine", "d2plm pipeline run experiment=demo"),
            "compile": Command(
                "write the pipeline's YAML (output=pipeline.yaml)",
                "d2plm pipeline compile output=pipeline.yaml",
            ),
            "submit": Command(
                "submit it to the Kubeflow Pipelines server at KFP_HOST",
                "KFP_HOST=https://kubeflow.example/pipeline d2plm pipeline submit experiment=demo",
            ),
            "cancel": Command(
                "end a submitted run: d2plm pipeline cancel RUN", "d2plm pipeline cancel RUN"
            ),
        },
    ),
}
PLAIN = {
    "completion": Command(
        "what a shell needs to complete commands, keys, choices and paths: bash, zsh, fish",
        "source <(d2plm completion bash)",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code; errors of the user's are one line."""
    words, asked = terminal.take_options(sys.argv[1:] if arguments is None else arguments)
    limit_threads()
    with terminal.speaking(terminal.manner() | asked):
        return _run(words)


def _run(words: list[str]) -> int:
    try:
        with unwound_by_sigterm():  # so that child processes end
            return _dispatch(words)
    except D2PLMError as error:
        if terminal.DEBUG in terminal.manner():
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
        from d2plm import versions

        terminal.result(versions.table())
        _show(versions.versions())
        return 0
    if name in EXTERNAL:
        return _external(name)(rest)
    if name in PLAIN:
        return int(importlib.import_module(f"d2plm.commands.{name}").main(rest))
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
    if document is not None and terminal.JSON in terminal.manner():
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


def config_dir() -> Path:
    """Where the configurations are: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


if __name__ == "__main__":
    sys.exit(main())
