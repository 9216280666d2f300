"""The list of commands, each with a summary, an example and its actions.

Nothing heavy is imported here: help and completion read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Command:
    """A command: `d2plm.commands.<name>.run(config)`, configured by `<name>.yaml`.

    A command with actions, `d2plm <name> <action>`, has a function `run_<action>` and a
    `<name>_<action>.yaml` for each of them, and the examples are theirs.
    """

    summary: str
    example: str = ""
    actions: Mapping[str, "Command"] = field(default_factory=dict)
    sweep_example: str | None = None  # of a command that takes --multirun
    first_key: str | None = None  # set by a first word without a key
    reads: tuple[str, ...] = ()  # keys of paths that must exist
    # Groups and keys that --help shows, of a command with many; "generation." are all of a section.
    usual_keys: tuple[str, ...] = ()
    takes_words: bool = False  # whether it also receives its overrides as written


COMMANDS = {
    "ingest": Command(
        "any protein collection (FASTA, LMDB, Parquet, CSV, Hugging Face) → raw LMDB store",
        "d2plm ingest input=proteins.fasta.gz output=raw_lmdb",
        first_key="input",
        reads=("input",),
    ),
    "prepare": Command(
        "cluster, split and drop leaking sequences → train, validation and test stores",
        "d2plm prepare data.input=proteins.fasta.gz data.prepared_dir=prepared",
        first_key="data.input",
        reads=("data.input", "data.validation_ids", "data.test_ids", "data.exclude_homologs_of"),
        usual_keys=(
            *("work_dir", "data.input", "data.prepared_dir", "data.license", "data.on_illegal"),
            *("data.min_residues", "data.max_residues", "data.validation_fraction"),
            *("data.test_fraction", "data.exclude_homologs_of", "data.cluster_method"),
            *("data.cluster_min_seq_id", "data.search_min_seq_id", "data.search_sensitivity"),
            *("data.relatives_sensitivity", "data.threads", "data.memory_limit"),
        ),
    ),
    "data": Command(
        "look inside sequence stores: stats, verify, head, export",
        actions={
            "stats": Command(
                "lengths, composition, clusters, size and origin of a store, or of prepared data",
                "d2plm data stats store=prepared output=stats.png",
                first_key="store",
                reads=("store",),
            ),
            "verify": Command(
                "read everything and compare it with its digests",
                "d2plm data verify store=prepared",
                first_key="store",
                reads=("store",),
            ),
            "head": Command(
                "the first sequences as FASTA on standard output",
                "d2plm data head store=prepared/train_lmdb number=5",
                first_key="store",
                reads=("store",),
            ),
            "export": Command(
                "all sequences as FASTA, plain or .gz",
                "d2plm data export store=prepared/train_lmdb output=train.fasta.gz",
                first_key="store",
                reads=("store",),
            ),
        },
    ),
    "train": Command(
        "train a model on a prepared store",
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
        "likelihood bound of an exported model beside the baselines",
        "d2plm evaluate model_dir=runs/default/diffusion/model data.prepared_dir=prepared",
        first_key="model_dir",
        reads=("model_dir", "data.prepared_dir"),
        usual_keys=("model_dir", "data.prepared_dir", "evaluation.", "tracking", "tracking.uri"),
    ),
    "report": Command(
        "a run, its evaluation and its proteins as one HTML page",
        "d2plm report output_dir=runs/demo/diffusion",
        first_key="output_dir",
        reads=("output_dir",),
    ),
    "export": Command(
        "a checkpoint's averaged weights → self-describing model folder",
        "d2plm export output_dir=runs/default/diffusion model_dir=exported",
        first_key="output_dir",
        usual_keys=("output_dir", "model_dir", "trainer.resume", "trainer.checkpoints"),
    ),
    "register": Command(
        "an evaluated model → the MLflow registry",
        "d2plm register model_dir=runs/default/diffusion/model",
        first_key="model_dir",
        reads=("model_dir",),
        usual_keys=("model_dir", "tracking.uri", "tracking.registered_model"),
    ),
    "generate": Command(
        "sample proteins, or fill in templates, with an exported model",
        "d2plm generate model_dir=runs/demo/model number=10",
        first_key="model_dir",
        reads=("model_dir", "generation.relatives", "generation.templates"),
        usual_keys=("model_dir", "output", "device", "precision", "tracking_uri", "generation."),
    ),
    "adapt": Command(
        "a model and a family of proteins → a model of the family, beside every baseline",
        "d2plm adapt family.fasta init_from=runs/demo/model",
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
        "likelihood of each protein in a FASTA file, or effects of mutations (--mutations FILE)",
        "d2plm score model_dir=runs/demo/model input=proteins.fasta output=scores.csv",
        first_key="input",
        reads=("model_dir", "input", "relatives", "mutations"),
    ),
    "embed": Command(
        "a vector for each protein or residue, from any layer, as Parquet or safetensors",
        "d2plm embed model_dir=runs/demo/model input=proteins.fasta output=embeddings",
        first_key="input",
        reads=("model_dir", "input"),
    ),
    "relatives": Command(
        "relatives of each protein in a reference collection, for d2plm score relatives=",
        "d2plm relatives input=proteins.fasta reference=reference.fasta.gz output=relatives.tsv",
        first_key="input",
        reads=("input", "reference"),
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
        reads=("run",),
    ),
    "checkpoint": Command(
        "the checkpoints of a run: list, verify, convert",
        actions={
            "list": Command(
                "step, epoch, ranks, bound and size of each",
                "d2plm checkpoint list runs/demo/diffusion",
                first_key="root",
                reads=("root",),
            ),
            "verify": Command(
                "read every file and compare it with its digest",
                "d2plm checkpoint verify runs/demo/diffusion",
                first_key="root",
                reads=("root",),
            ),
            "convert": Command(
                "to a folder of safetensors, or back (to=checkpoint)",
                "d2plm checkpoint convert runs/demo/diffusion/checkpoints/step-00000750 "
                "output=step750",
                first_key="checkpoint",
                reads=("checkpoint",),
            ),
        },
    ),
    "doctor": Command(
        "check this machine and the cluster, and say how to fix what is missing",
        "d2plm doctor launcher=pytorchjob launcher.namespace=d2plm launcher.gpus=8 --json",
    ),
    "job": Command(
        "training as a job in a cluster, without the pipeline: show, run",
        actions={
            "show": Command(
                "its manifest, for kubectl apply -f -",
                "d2plm job show launcher=pytorchjob launcher.name=mine launcher.gpus=8 "
                "trainer=multi_gpu model=150m work_dir=/workspace/mine launcher.prepare=false",
                takes_words=True,
            ),
            "run": Command(
                "create it, follow it, and exit with its exit code",
                "d2plm job run launcher=pytorchjob launcher.name=mine work_dir=/workspace/mine "
                "data.input=/workspace/mine.fasta",
                takes_words=True,
            ),
        },
    ),
    "bench": Command(
        "time and memory of a training step on this machine, and the time that a training takes",
        "d2plm bench model=8m token_budget=8192 tokens=1e9",
    ),
}
# Commands with a `main(words)` of their own: of another package, or without settings.
EXTERNAL = {
    "demo": Command(
        "the whole pipeline on 20,000 shipped proteins, in a quarter of an hour", "d2plm demo"
    ),
    "pipeline": Command(
        "run, compile or submit the whole pipeline",
        actions={
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
        "shell completion of commands, keys, choices and paths: bash, zsh, fish",
        "source <(d2plm completion bash)",
    ),
}
