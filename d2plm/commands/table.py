"""The list of commands, each with a summary, an example and its actions.

Help and completion read it, so it has no heavy imports.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial


@dataclass(frozen=True)
class Command:
    """A command: `d2plm.commands.<name>.run(config)`, configured by `<name>.yaml`.

    A command with actions, `d2plm <name> <action>`, has a function `run_<action>`, a file
    `<name>_<action>.yaml` and an example for each action.
    """

    summary: str
    example: str = ""
    actions: Mapping[str, "Command"] = field(default_factory=dict)
    sweep_example: str | None = None  # only for commands that support --multirun
    first_key: str | None = None  # key that a first argument without a key sets
    reads: tuple[str, ...] = ()  # keys whose paths must exist
    # The groups and keys that --help shows; "generation." stands for a whole section. Empty: all.
    usual_keys: tuple[str, ...] = ()
    takes_words: bool = False  # whether `run` also receives the overrides as written


# Usual keys of commands that train.
RUN_KEYS = ("name", "work_dir", "data.input", "data.prepared_dir", "trainer", "trainer.max_steps")
JOB_KEYS = (
    *("command", "shards", "parallel", "experiment", "model", "paradigm", *RUN_KEYS),
    *("launcher", "launcher."),
)
# Actions on a store, and on the checkpoints of a run.
_of_store = partial(Command, first_key="store", reads=("store",))
_of_checkpoints = partial(Command, first_key="root", reads=("root",))

COMMANDS = {
    "ingest": Command(
        "read proteins or other sequences (FASTA, Parquet, JSON lines, …) into an LMDB store",
        "d2plm ingest input=proteins.fasta.gz output=raw_lmdb",
        first_key="input",
        reads=("input",),
    ),
    "prepare": Command(
        "split sequences by cluster into train, validation and test sets without shared homologs",
        "d2plm prepare data.input=proteins.fasta.gz data.prepared_dir=prepared",
        first_key="data.input",
        reads=("data.input", "data.validation_ids", "data.test_ids", "data.exclude_homologs_of"),
        usual_keys=(
            *("work_dir", "data.input", "data.prepared_dir", "data.license", "data.on_illegal"),
            *("data.alphabet", "data.tokenizer", "data.window"),
            *("data.min_residues", "data.max_residues", "data.validation_fraction"),
            *("data.test_fraction", "data.exclude_homologs_of", "data.cluster.method"),
            *("data.cluster.min_seq_id", "data.search.min_seq_id", "data.search.sensitivity"),
            *("data.relatives_sensitivity", "data.threads", "data.memory_limit"),
        ),
    ),
    "data": Command(
        "inspect sequence stores: stats, verify, head, export",
        actions={
            "stats": _of_store(
                "show lengths, composition, clusters, size and origin of a store or prepared data",
                "d2plm data stats store=prepared output=stats.png",
            ),
            "verify": _of_store(
                "read all sequences and compare them with the recorded digests",
                "d2plm data verify store=prepared",
            ),
            "head": _of_store(
                "print the first sequences as FASTA, or texts as JSON lines",
                "d2plm data head store=prepared/train_lmdb number=5",
            ),
            "export": _of_store(
                "write all sequences as FASTA, or texts as JSON lines",
                "d2plm data export store=prepared/train_lmdb output=train.fasta.gz",
            ),
        },
    ),
    "train": Command(
        "train a model on prepared data",
        "d2plm train paradigm=diffusion model=nano data.prepared_dir=prepared",
        sweep_example="d2plm train --multirun optimizer.learning_rate=1e-3,4e-4 model=nano,8m "
        "data.prepared_dir=prepared",
        first_key="data.prepared_dir",
        reads=("data.prepared_dir", "init_from"),
        usual_keys=(
            *("experiment", "name", "work_dir", "init_from", "model", "paradigm"),
            *("data.prepared_dir", "data.max_length", "data.token_budget", "data.sampling"),
            *("trainer", "trainer.max_steps", "trainer.max_epochs", "trainer.global_batch_tokens"),
            *("trainer.device", "trainer.precision", "trainer.threads", "trainer.seed"),
            *("trainer.resume", "trainer.fast_dev_run", "optimizer", "optimizer.learning_rate"),
            *("schedule", "schedule.warmup_ratio", "distributed.processes"),
            *("callbacks.checkpoint.every", "callbacks.evaluation.every"),
            *("callbacks.early_stopping.patience", "tracking", "tracking.uri", "dry_run"),
        ),
    ),
    "evaluate": Command(
        "compute the likelihood bounds of an exported model and of the baselines",
        "d2plm evaluate model_dir=runs/default/diffusion/model data.prepared_dir=prepared",
        first_key="model_dir",
        reads=("model_dir", "data.prepared_dir"),
        usual_keys=("model_dir", "data.prepared_dir", "evaluation.", "tracking", "tracking.uri"),
    ),
    "report": Command(
        "write an HTML page about a run, its evaluation and its generated sequences",
        "d2plm report output_dir=runs/demo/diffusion",
        first_key="output_dir",
        reads=("output_dir",),
    ),
    "export": Command(
        "export the averaged weights of a checkpoint as a model folder",
        "d2plm export output_dir=runs/default/diffusion model_dir=exported",
        first_key="output_dir",
        usual_keys=("output_dir", "model_dir", "trainer.resume", "trainer.checkpoints"),
    ),
    "register": Command(
        "register an evaluated model in the MLflow registry",
        "d2plm register model_dir=runs/default/diffusion/model",
        first_key="model_dir",
        reads=("model_dir",),
        usual_keys=("model_dir", "tracking.uri", "tracking.registered_model"),
    ),
    "generate": Command(
        "draw new members of a family; or generate or fill in sequences with an exported model",
        "d2plm generate relatives=family.fasta number=10",
        first_key="model_dir",
        reads=("model_dir", "generation.relatives", "generation.templates"),
        usual_keys=("model_dir", "output", "device", "precision", "tracking_uri", "generation."),
    ),
    "adapt": Command(
        "fine-tune a model on a protein family and compare it with every baseline",
        "d2plm adapt family.fasta",
        first_key="input",
        reads=("init_from", "input", "general"),
        usual_keys=(
            *("input", "init_from", "name", "work_dir", "identity", "general", "max_general_loss"),
            *("trainer.max_steps", "trainer.lora_rank", "trainer.threads", "trainer.seed"),
            *("optimizer.learning_rate", "callbacks.early_stopping.patience", "data.max_relatives"),
            *("evaluation.masks_per_sequence", "generation.number", "generation.temperature"),
        ),
    ),
    "score": Command(
        "score the likelihood of sequences, or the effects of mutations (--mutations FILE)",
        "d2plm score proteins.fasta output=scores.csv",
        first_key="input",
        reads=("model_dir", "input", "relatives", "mutations"),
    ),
    "embed": Command(
        "compute embeddings of sequences or tokens from any layer, as Parquet or safetensors",
        "d2plm embed proteins.fasta output=embeddings",
        first_key="input",
        reads=("model_dir", "input"),
    ),
    "serve": Command(
        "serve a model over HTTP: score, generate and fill in proteins on request",
        "d2plm serve model_dir=models:/d2plm-diffusion@champion port=8080",
        first_key="model_dir",
        reads=("model_dir",),
    ),
    "relatives": Command(
        "find relatives of proteins in a reference collection, for d2plm score relatives=FILE",
        "d2plm relatives input=proteins.fasta reference=reference.fasta.gz output=relatives.tsv",
        first_key="input",
        reads=("input", "reference"),
    ),
    "compare": Command(
        "train several configurations with several seeds and compare their bounds",
        "d2plm compare experiment=compare_paradigms",
        usual_keys=("experiment", "arms", "seeds", "parallel", *RUN_KEYS),
    ),
    "scaling": Command(
        "train several model sizes with several budgets and fit a scaling law",
        "d2plm scaling experiment=scaling",
        usual_keys=("experiment", "sizes", "steps", "flops", "parallel", *RUN_KEYS),
    ),
    "replay": Command(
        "repeat one training step of a run exactly, to investigate a loss spike",
        "d2plm replay runs/demo/diffusion --step 350",
        first_key="run",
        reads=("run",),
    ),
    "checkpoint": Command(
        "manage the checkpoints of a run: list, verify, convert",
        actions={
            "list": _of_checkpoints(
                "list the checkpoints with epoch, ranks, validation bound and size",
                "d2plm checkpoint list runs/demo/diffusion",
            ),
            "verify": _of_checkpoints(
                "read every file and compare it with the recorded digest",
                "d2plm checkpoint verify runs/demo/diffusion",
            ),
            "convert": Command(
                "convert a checkpoint to a folder of safetensors",
                "d2plm checkpoint convert runs/demo/diffusion/checkpoints/step-00000400 "
                "output=step400",
                first_key="checkpoint",
                reads=("checkpoint",),
            ),
        },
    ),
    "doctor": Command(
        "check this machine and the cluster, and explain how to fix problems",
        "d2plm doctor launcher=pytorchjob launcher.namespace=d2plm launcher.gpus=8 --json",
        usual_keys=(
            *("cluster", "kfp_host", "timeout_seconds", "work_dir", "trainer"),
            *("trainer.device", "tracking", "tracking.uri", "launcher", "launcher."),
        ),
    ),
    "job": Command(
        "run training, or other commands in shards, as a cluster job: show, run",
        actions={
            "show": Command(
                "print the job's manifest, for kubectl apply -f -",
                "d2plm job show launcher=pytorchjob launcher.name=mine launcher.gpus=8 "
                "trainer=multi_gpu model=150m work_dir=/workspace/mine launcher.prepare=false",
                usual_keys=JOB_KEYS,
                takes_words=True,
            ),
            "run": Command(
                "create the job, follow it, and exit with its exit code",
                "d2plm job run launcher=pytorchjob launcher.name=mine work_dir=/workspace/mine "
                "data.input=/workspace/mine.fasta",
                usual_keys=JOB_KEYS,
                takes_words=True,
            ),
        },
    ),
}
# Commands with their own `main(words)`: defined in another package, or without settings.
EXTERNAL = {
    "demo": Command("run the whole pipeline on 8,000 bundled proteins", "d2plm demo"),
    "pipeline": Command(
        "run, compile, submit or cancel the whole pipeline",
        actions={
            "run": Command("run every step on this machine", "d2plm pipeline run experiment=demo"),
            "compile": Command(
                "compile the pipeline to YAML (output=pipeline.yaml)",
                "d2plm pipeline compile output=pipeline.yaml",
            ),
            "submit": Command(
                "submit the pipeline to the Kubeflow Pipelines server at KFP_HOST",
                "KFP_HOST=https://kubeflow.example/pipeline d2plm pipeline submit experiment=demo",
            ),
            "cancel": Command(
                "cancel a submitted run: d2plm pipeline cancel RUN", "d2plm pipeline cancel RUN"
            ),
        },
    ),
}
PLAIN = {
    "completion": Command(
        "set up completion of commands, keys, choices and paths in bash, zsh or fish",
        "source <(d2plm completion bash)",
    ),
}
