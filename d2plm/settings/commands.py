"""The settings of each command: the root of its configuration."""

from dataclasses import dataclass
from typing import Any, Literal

from d2plm.settings.callbacks import CallbackSettings
from d2plm.settings.data import DataSettings, IngestedSequences, Resources, RetrievalSettings
from d2plm.settings.evaluation import EvaluationSettings, GenerationSettings
from d2plm.settings.launcher import LauncherSettings
from d2plm.settings.model import ModelSettings
from d2plm.settings.paradigm import DiffusionSettings, ParadigmSettings
from d2plm.settings.schema import Settings, key, section
from d2plm.settings.tracking import TrackingSettings
from d2plm.settings.training import (
    AdamWSettings,
    CosineSettings,
    Device,
    DistributedSettings,
    OptimizerSettings,
    ScheduleSettings,
    TrainerSettings,
)

CALLBACKS = (  # in the order in which they are called, except that those that save are last
    *("gradient_health", "garbage_collection", "profiler", "metrics", "progress", "evaluation"),
    *("early_stopping", "checkpoint", "export"),
)
MODEL = "an exported model, or models:/NAME@ALIAS in the registry"
WINDOW = "tokens of the pieces into which longer sequences are cut; null: they are not cut"
REGISTRY = "address of the registry; MLFLOW_TRACKING_URI takes precedence"
READABLE = "one file, glob, dataset or store, in any form that d2plm ingest recognises"
STORE = "folder of a store; d2plm ingest creates one from a file"
ROOT = "output_dir of a run, its checkpoints folder, or an fsspec URL of one"
InferencePrecision = Literal["auto", "bf16", "fp32", "fp64"]


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(Settings):
    """Everything from a FASTA file to a registered model; the steps of the pipeline share it."""

    init_from: str | None = key(
        None,
        "model to start from, whose architecture replaces the model section: an exported folder, "
        "models:/NAME@ALIAS, or ESM-2 (a Hugging Face folder with safetensors, or its name on the "
        "Hub); null: random weights",
        path="model",
    )
    name: str = key("default", "name of the run")
    work_dir: str = key("runs/${name}", "folder of all files of the run", path="folder")
    output_dir: str = key(
        "${work_dir}/${paradigm.name}",
        "folder of the trained model: checkpoints, metrics, evaluation, generated sequences",
        path="folder",
    )
    model_dir: str = key("${output_dir}/model", "the exported model", path="model")
    data: DataSettings = section(DataSettings)
    model: ModelSettings = section(ModelSettings)
    paradigm: ParadigmSettings = key(DiffusionSettings(), registry="paradigm")
    trainer: TrainerSettings = key(TrainerSettings(), registry="trainer")
    optimizer: OptimizerSettings = key(AdamWSettings(), registry="optimizer")
    schedule: ScheduleSettings = key(CosineSettings(), registry="schedule")
    distributed: DistributedSettings = section(DistributedSettings)
    callbacks: dict[str, CallbackSettings | None] = key(
        dict.fromkeys(CALLBACKS, CallbackSettings()), registry="callback"
    )
    tracking: TrackingSettings = section(TrackingSettings)
    evaluation: EvaluationSettings = section(EvaluationSettings)
    generation: GenerationSettings = section(GenerationSettings)
    launcher: LauncherSettings = section(LauncherSettings)


@dataclass(frozen=True, kw_only=True)
class TrainSettings(PipelineSettings):
    """d2plm train."""

    dry_run: bool = key(False, "or --dry-run: check everything, print what would run, and exit")
    multirun_dir: str = key(
        "${work_dir}/multirun",
        "with --multirun: folder that has one for each sweep, with a folder for each run",
        path="folder",
    )
    parallel: int = key(
        1, "with --multirun: runs at a time; each takes its share of the cores", low=1
    )


@dataclass(frozen=True, kw_only=True)
class AdaptSettings(PipelineSettings):
    """d2plm adapt."""

    input: str = key(
        help="sequences of the family: FASTA, plain or compressed, or any input of d2plm ingest",
        path="any",
    )
    identity: float | Literal["auto"] = key(
        "auto",
        "members with at least this identity stay on the same side of the split; auto: the lowest "
        "that suits the family",
        above=0,
        high=1,
    )
    general: str = key(
        "examples/data/uniprot_500.fasta.gz",
        "general proteins for the guard: FASTA, a store, or prepared data (its validation set)",
        path="any",
    )
    max_general_loss: float = key(
        0.01, "limit on the increase of the bound on general proteins, nats per residue", above=0
    )


@dataclass(frozen=True, kw_only=True)
class CompareSettings(PipelineSettings):
    """d2plm compare."""

    arms: dict[str, Any] = key(
        {},
        "name: settings that differ, as {section: {key: value}}; the others are compared with the "
        "first",
    )
    seeds: list[int] = key([0, 1, 2], "seeds of the training", low=0)
    parallel: int = key(1, "runs at a time; each takes its share of the cores", low=1)


@dataclass(frozen=True, kw_only=True)
class ScalingSettings(PipelineSettings):
    """d2plm scaling."""

    sizes: dict[str, Any] = key(
        {}, "name: settings that differ, as {section: {key: value}}; three or more"
    )
    steps: list[int] | None = key(
        None, "budgets in optimizer steps, equal for all sizes; three or more", low=1
    )
    flops: list[float] | None = key(
        None, "or budgets in training FLOPs, from which the steps of each size are computed", low=1
    )
    parallel: int = key(1, "runs at a time; each takes its share of the cores", low=1)
    dry_run: bool = key(
        False, "or --dry-run: check everything, print what every run would do and need, and exit"
    )


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(PipelineSettings):
    """d2plm doctor."""

    cluster: bool | Literal["auto"] = key(
        "auto",
        "whether to check a cluster; auto: if kubectl or a pod's account has one and launcher.kind "
        "is not local",
    )
    kfp_host: str | None = key(
        "${oc.env:KFP_HOST,null}", "address of a Kubeflow Pipelines server to check"
    )
    pull: bool = key(False, "start a pod with the image to test whether the nodes can pull it")
    timeout_seconds: float = key(5, "timeout of each request to a server", above=0)


@dataclass(frozen=True, kw_only=True)
class IngestSettings(IngestedSequences):
    """d2plm ingest."""

    input: Any = key(
        help="FASTA (.gz .xz .zst .bz2), LMDB, Parquet, CSV, JSON lines, text, Hugging Face "
        "dataset; "
        "a glob; [a,b]; -; hf://datasets/OWNER/NAME@REVISION/CONFIG:SPLIT",
        path="any",
    )
    output: str = key(help="folder of the store", path="folder")


@dataclass(frozen=True, kw_only=True)
class StoreSettings(Settings):
    """d2plm data verify."""

    store: str = key(
        help="folder of a store, or of prepared data (all stores in it); d2plm ingest creates a "
        "store from a file",
        path="folder",
    )


@dataclass(frozen=True, kw_only=True)
class StatsSettings(StoreSettings):
    """d2plm data stats."""

    output: str | None = key(
        None, "picture of lengths and composition: .png, .svg or .pdf", path="any"
    )


@dataclass(frozen=True, kw_only=True)
class HeadSettings(StoreSettings):
    """d2plm data head."""

    store: str = key(help=STORE, path="folder")
    number: int = key(5, "number of sequences", low=1)


@dataclass(frozen=True, kw_only=True)
class ExportDataSettings(StoreSettings):
    """d2plm data export."""

    store: str = key(help=STORE, path="folder")
    output: str = key(
        help="proteins.fasta, texts.jsonl, both also with .gz, - for standard output, or "
        "PREFIX.idx "
        "for PREFIX.bin and PREFIX.idx",
        path="any",
    )
    format: Literal["auto", "megatron"] = key(
        "auto", "format; auto: FASTA or JSON lines; a Megatron corpus if output is PREFIX.idx"
    )
    end_of_document: int | None = key(
        None, "id to write after each document of a Megatron corpus; null: none", low=0
    )


@dataclass(frozen=True, kw_only=True)
class InferenceSettings(Settings):
    """An exported model and what it computes on."""

    model_dir: str = key(help=MODEL, path="model")
    device: Device = key("auto", "device; auto: CUDA if there is a GPU")
    precision: InferencePrecision = key("auto", "dtype of the matrix products")
    tracking_uri: str | None = key(None, REGISTRY)


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(InferenceSettings):
    """d2plm generate."""

    output: str | None = key(
        None,
        "FASTA file, or .jsonl or .txt for text; null: generated.fasta or generated.jsonl",
        path="any",
    )
    generation: GenerationSettings = section(GenerationSettings)


@dataclass(frozen=True, kw_only=True)
class BoundSettings(Settings):
    """The bound of scored sequences, as in d2plm evaluate."""

    masks_per_sequence: int = key(16, "draws of masks; their spread gives the interval", low=1)
    seed: int = key(0, "seed of the masks", low=0)
    token_budget: int = key(16384, "tokens of a forward pass", low=1)


@dataclass(frozen=True, kw_only=True)
class ScoreSettings(InferenceSettings):
    """d2plm score."""

    input: str = key(help=f"{READABLE}; with mutations, a FASTA file of the wild types", path="any")
    window: int | None = key(None, WINDOW, low=1)
    output: str | None = key(None, "CSV file; null: standard output", path="any")
    pseudo_log_likelihood: bool | None = key(
        None,
        "also compute the pseudo-log-likelihood, with one forward row per token; null: except for "
        "text",
    )
    relatives: str | None = key(
        None, "FASTA for all proteins, or a table of d2plm relatives", path="file"
    )
    max_relatives: int = key(8, "relatives of each protein, drawn anew with each mask", low=1)
    mutations: str | None = key(
        None,
        "CSV or TSV with a column mutant (A24G:L30P): score these variants instead",
        path="file",
    )
    mutation_offset: int = key(
        0, "position offset: 24 if the first residue of the input is number 25 in the mutations"
    )
    evaluation: BoundSettings = section(BoundSettings)


@dataclass(frozen=True, kw_only=True)
class EmbedSettings(InferenceSettings):
    """d2plm embed."""

    input: str = key(help=f"{READABLE} (every record, including duplicates)", path="any")
    window: int | None = key(None, WINDOW, low=1)
    output: str = key(
        "embeddings",
        "folder of files of about 256 MB; the same command continues an interrupted run",
        path="folder",
    )
    layer: int = key(
        -1,
        "0: input of the first block, n: output of the n-th; -1: normalised output of the last "
        "block",
    )
    pooled: bool = key(
        True, "mean over the tokens (residues) of a sequence; false: a vector for each token"
    )
    format: Literal["parquet", "safetensors"] = key("parquet", "format of the files")
    token_budget: int = key(16384, "tokens of a forward pass", low=1)


@dataclass(frozen=True, kw_only=True)
class RelativesSettings(RetrievalSettings, Resources):
    """d2plm relatives."""

    input: str = key(help="FASTA, plain or compressed: the proteins", path="any")
    reference: str = key(
        help="collection to search: FASTA, a store, or prepared data (its training set)", path="any"
    )
    output: str = key(
        "relatives.tsv",
        "table for d2plm score relatives=: protein, relative, identity, coverage, sequence",
        path="any",
    )
    cache_dir: str = key(
        "runs/retrieval",
        "cache of results, by digest, and of the reference as a store",
        path="folder",
    )


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Settings):
    """d2plm serve."""

    model_dir: str = key(help=f"{MODEL}, which is resolved once", path="model")
    host: str = key("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's")
    port: int = key(8080, "port; 0: any free port", low=0, high=65535)
    timeout: float = key(60, "seconds for one request, including the wait for others", above=0)
    max_residues: int = key(
        65536, "residues contained in or requested by one request, and of its relatives", low=1
    )
    device: Device = key("auto", "device; auto: CUDA if there is a GPU")
    tracking_uri: str | None = key(None, REGISTRY)


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """d2plm replay."""

    run: str = key(
        help="output folder of the run, with its config.yaml and checkpoints", path="folder"
    )
    step: int = key(help="step number, as in metrics.jsonl", low=1)
    checkpoint: str | None = key(
        None, "checkpoint to start from; null: the newest complete one before the step", path="any"
    )
    prepared_dir: str | None = key(
        None, "the run's prepared data on this machine; null: the original location", path="folder"
    )
    device: Literal["cpu", "cuda"] | None = key(None, "device; null: the run's")
    output: str | None = key(None, "JSON file with all results; null: only the table", path="any")
    show: int = key(10, "number of sequences and parameters in the table", low=0)


@dataclass(frozen=True, kw_only=True)
class ReportSettings(Resources):
    """d2plm report."""

    output_dir: str = key(
        help="folder of the run, with evaluation.json, metrics.jsonl and generated.fasta",
        path="folder",
    )
    model_dir: str | None = key(
        None,
        "the evaluated model; null: model in output_dir, otherwise as in its config.yaml",
        path="model",
    )
    prepared_dir: str | None = key(
        None,
        "the prepared data; null: as in config.yaml, otherwise data beside output_dir",
        path="folder",
    )
    device: Device = key("auto", "device for scoring generated proteins")


@dataclass(frozen=True, kw_only=True)
class CheckpointsSettings(Settings):
    """d2plm checkpoint list and verify."""

    root: str = key(help=ROOT, path="any")


@dataclass(frozen=True, kw_only=True)
class ConvertSettings(Settings):
    """d2plm checkpoint convert."""

    checkpoint: str = key(
        help="checkpoint, or with to=checkpoint the output folder of an earlier conversion",
        path="any",
    )
    output: str = key(
        help="new folder; with to=checkpoint it must be named step-NNNNNNNN", path="any"
    )
    to: Literal["safetensors", "checkpoint"] = key("safetensors", "format to convert to")
    max_shard_bytes: int = key(5_000_000_000, "maximum size of a safetensors file", low=1)


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """d2plm bench."""

    model: ModelSettings = section(ModelSettings)
    token_budget: int = key(8192, "tokens of a step", low=3)
    max_length: int | None = key(
        None,
        "maximum tokens of a sequence; longer ones are cropped; null: the model's limit",
        low=3,
    )
    mean_length: int = key(300, "mean length of a protein in residues", low=2)
    device: Device = key("auto", "device; auto: CUDA if there is a GPU")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key("auto", "dtype of the matrix products")
    compile: bool = key(True, "whether blocks are compiled, as in long trainings")
    steps: int = key(20, "number of measured steps, after 3 warm-up steps", low=2)
    tokens: float = key(1e9, "tokens of the training whose duration is estimated", low=1)


# Name of a command, or command_action → its settings. Commands without a file in configs/ of their
# own compose pipeline.yaml if they are configured like the whole pipeline.
SETTINGS: dict[str, type[Settings]] = {
    "adapt": AdaptSettings,
    "bench": BenchSettings,
    "checkpoint_convert": ConvertSettings,
    "checkpoint_list": CheckpointsSettings,
    "checkpoint_verify": CheckpointsSettings,
    "compare": CompareSettings,
    "data_export": ExportDataSettings,
    "data_head": HeadSettings,
    "data_stats": StatsSettings,
    "data_verify": StoreSettings,
    "doctor": DoctorSettings,
    "embed": EmbedSettings,
    "evaluate": PipelineSettings,
    "export": PipelineSettings,
    "generate": GenerateSettings,
    "ingest": IngestSettings,
    "job_run": PipelineSettings,
    "job_show": PipelineSettings,
    "pipeline": PipelineSettings,
    "prepare": PipelineSettings,
    "register": PipelineSettings,
    "relatives": RelativesSettings,
    "replay": ReplaySettings,
    "report": ReportSettings,
    "scaling": ScalingSettings,
    "score": ScoreSettings,
    "serve": ServeSettings,
    "train": TrainSettings,
}

# Command → short form of a key → the key. The list is explicit, so that a new key cannot make a
# user's command line ambiguous.
SHORT_KEYS: dict[str, dict[str, str]] = {
    "generate": {
        name: f"generation.{name}"
        for name in ("number", "length", "steps", "temperature", "seed", "relatives", "templates")
    },
    "train": {"max_steps": "trainer.max_steps"},
}
