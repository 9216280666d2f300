"""The settings of each command: the root of its configuration."""

from dataclasses import dataclass
from typing import Any, Literal

from d2plm.core.shards import Shard
from d2plm.settings.callbacks import CallbackSettings
from d2plm.settings.data import DataSettings, IngestedSequences, Resources, RetrievalSettings
from d2plm.settings.evaluation import EvaluationSettings, GenerationSettings
from d2plm.settings.launcher import LauncherSettings
from d2plm.settings.model import ModelSettings
from d2plm.settings.paradigm import DiffusionSettings, ParadigmSettings
from d2plm.settings.schema import MAX_SEED, Form, Settings, key, section
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
PRETRAINED = "examples/pretrained"  # the model that is part of the package
InferencePrecision = Literal["auto", "bf16", "fp32", "fp64"]
_NUMBERS = r"\d{1,6}(-\d{1,6})?"
SHARD = Form(rf"{_NUMBERS}(,{_NUMBERS})*/\d{{1,6}}", "I/N with I from 0 to N - 1, such as 3/64")


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(Settings):
    """Everything from a FASTA file to a registered model; the steps of the pipeline share it."""

    init_from: str | None = key(None, path="model")
    """model to start from, which replaces the model section: an export, models:/NAME@ALIAS, or
    ESM-2 (folder or name on the Hub); null: random weights"""
    name: str = key("default")
    """name of the run"""
    work_dir: str = key("runs/${name}", path="folder")
    """folder of all files of the run"""
    output_dir: str = key("${work_dir}/${paradigm.name}", path="folder")
    """folder of checkpoints, metrics, evaluation, generated sequences"""
    model_dir: str = key("${output_dir}/model", path="model")
    """the exported model"""
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
class SweepSettings(PipelineSettings):
    """A list of training runs, and where they execute."""

    parallel: int = key(1, low=1)
    """runs of a sweep at a time; each takes its share of the cores"""
    dry_run: bool = key(False)
    """or --dry-run: check everything and print what would run"""


@dataclass(frozen=True, kw_only=True)
class TrainSettings(SweepSettings):
    """d2plm train."""

    multirun_dir: str = key("${work_dir}/multirun", path="folder")
    """with --multirun: folder of the sweeps"""


@dataclass(frozen=True, kw_only=True)
class AdaptSettings(PipelineSettings):
    """d2plm adapt."""

    init_from: str | None = key(PRETRAINED, path="model")
    """model to adapt: an export, models:/NAME@ALIAS, or ESM-2 (folder or name on the Hub)"""
    input: str = key(path="any")
    """the family: any input of d2plm ingest"""
    identity: float | Literal["auto"] = key("auto", above=0, high=1)
    """members at least this identical stay together; auto: the lowest that suits the family"""
    general: str = key("examples/data/uniprot_500.fasta.gz", path="any")
    """general proteins for max_general_loss: FASTA, a store, or prepared data (validation set)"""
    max_general_loss: float = key(0.01, above=0)
    """largest increase of the bound on general proteins, nats per residue"""


@dataclass(frozen=True, kw_only=True)
class CompareSettings(SweepSettings):
    """d2plm compare."""

    arms: dict[str, dict[str, Any]] = key({})
    """name: {section: {key: value}} that differ; the others are compared with the first"""
    seeds: list[int] = key([0, 1, 2], low=0, high=MAX_SEED)
    """seeds of the training"""


@dataclass(frozen=True, kw_only=True)
class ScalingSettings(SweepSettings):
    """d2plm scaling."""

    sizes: dict[str, dict[str, Any]] = key({})
    """name: {section: {key: value}} that differ; three or more"""
    steps: list[int] | None = key(None, low=1)
    """budgets in optimizer steps, equal for all sizes; three or more"""
    flops: list[float] | None = key(None, low=1)
    """or budgets in training FLOPs"""


@dataclass(frozen=True, kw_only=True)
class JobSettings(PipelineSettings):
    """d2plm job."""

    command: Literal["train", "embed", "score", "generate"] = key("train")
    """the pods' command, to which other keys belong"""
    shards: int = key(1, low=1)
    """pods of embed, score, generate"""
    parallel: int | None = key(None, low=1)
    """shards at a time; null: all"""


JOB_KEYS = ("launcher", "command", "shards", "parallel")  # not handed on to the command


@dataclass(frozen=True, kw_only=True)
class DoctorSettings(PipelineSettings):
    """d2plm doctor."""

    cluster: bool | Literal["auto"] = key("auto")
    """check a cluster; auto: if kubectl or the pod has one and launcher.kind is not local"""
    kfp_host: str | None = key("${oc.env:KFP_HOST,null}")
    """address of a Kubeflow Pipelines server to check"""
    timeout_seconds: float = key(5, above=0)
    """timeout of each request to a server"""


@dataclass(frozen=True, kw_only=True)
class IngestSettings(IngestedSequences):
    """d2plm ingest."""

    input: str | list[str] = key(path="any")
    """FASTA (.gz .xz .zst .bz2), LMDB, Parquet, CSV, JSON lines, text, Hugging Face dataset; a
    glob; [a,b]; -"""
    output: str = key(path="folder")
    """folder of the store"""


@dataclass(frozen=True, kw_only=True)
class StoreSettings(Settings):
    """d2plm data verify."""

    store: str = key(path="folder")
    """folder of a store, or of prepared data (all stores in it)"""


@dataclass(frozen=True, kw_only=True)
class StatsSettings(StoreSettings):
    """d2plm data stats."""

    output: str | None = key(None, path="any")
    """picture of lengths and composition: .png, .svg or .pdf"""


@dataclass(frozen=True, kw_only=True)
class HeadSettings(StoreSettings):
    """d2plm data head."""

    store: str = key(path="folder")
    """folder of a store"""
    number: int = key(5, low=1)
    """number of sequences"""


@dataclass(frozen=True, kw_only=True)
class ExportDataSettings(StoreSettings):
    """d2plm data export."""

    store: str = key(path="folder")
    """folder of a store"""
    output: str = key(path="any")
    """proteins.fasta, texts.jsonl (also .gz), or - for standard output"""


@dataclass(frozen=True, kw_only=True)
class InferenceSettings(Settings):
    """An exported model and what it computes on."""

    model_dir: str = key(PRETRAINED, path="model")
    """an exported model, or models:/NAME@ALIAS in the registry"""
    device: Device = key("auto")
    """device; auto: CUDA if there is a GPU"""
    precision: InferencePrecision = key("auto")
    """dtype of the matrix products"""
    tracking_uri: str | None = key(None)
    """address of the registry; MLFLOW_TRACKING_URI takes precedence"""


@dataclass(frozen=True, kw_only=True)
class BulkSettings(InferenceSettings):
    """Work that several processes or machines can share."""

    shard: str | None = key(None, form=SHARD)
    """I/N, from 0/N: every N-th record; the last shard joins all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        Shard.of(self.shard)


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(BulkSettings):
    """d2plm generate."""

    output: str | None = key(None, path="any")
    """FASTA file, or .jsonl or .txt for text; null: generated.fasta or generated.jsonl"""
    generation: GenerationSettings = section(GenerationSettings)


@dataclass(frozen=True, kw_only=True)
class BoundSettings(Settings):
    """The bound of scored sequences, as in d2plm evaluate."""

    masks_per_sequence: int = key(16, low=1)
    """draws of masks; their spread gives the interval"""
    seed: int = key(0, low=0, high=MAX_SEED)
    """seed of the masks"""
    token_budget: int = key(16384, low=1)
    """tokens of a forward pass"""


@dataclass(frozen=True, kw_only=True)
class ScoreSettings(BulkSettings):
    """d2plm score."""

    input: str = key(path="any")
    """any input of d2plm ingest; with mutations: the wild types"""
    window: int | None = key(None, low=1)
    """tokens of the pieces into which longer sequences are cut; null: no cuts"""
    max_residues: int | None = key(None, low=1)
    """longer sequences are left out; null: none"""
    output: str | None = key(None, path="any")
    """CSV file; null or -: standard output"""
    pseudo_log_likelihood: bool | None = key(None)
    """also compute the pseudo-log-likelihood; null: except for text"""
    relatives: str | None = key(None, path="any")
    """relatives of all proteins (any input of d2plm ingest), or a table of d2plm relatives"""
    max_relatives: int = key(8, low=1)
    """relatives of each protein, redrawn with each mask"""
    mutations: str | None = key(None, path="file")
    """CSV or TSV of variants (A24G:L30P, p.Ala24Gly, whole sequences): score these instead"""
    mutation_offset: int | Literal["auto"] = key("auto")
    """24 if the input's first residue is number 25 in mutations; auto: what fits each protein"""
    variant: str | None = key(None)
    """column of the variants in mutations; null: recognised by name and content"""
    measured: str | None = key(None)
    """column of measured effects in mutations; null: recognised by name"""
    name: str | None = key(None)
    """column in mutations that names the protein of each row; null: recognised"""
    strict: bool = key(False)
    """an unscorable variant is an error; false: left out and counted"""
    evaluation: BoundSettings = section(BoundSettings)


@dataclass(frozen=True, kw_only=True)
class EmbedSettings(BulkSettings):
    """d2plm embed."""

    input: str = key(path="any")
    """any input of d2plm ingest, including duplicates"""
    window: int | None = key(None, low=1)
    """tokens of the pieces into which longer sequences are cut; null: no cuts"""
    max_residues: int | None = key(None, low=1)
    """longer sequences are left out; null: none"""
    output: str = key("embeddings", path="folder")
    """folder of files of about 256 MB; repeating the command continues"""
    layer: int = key(-1)
    """0: input of the first block; n: output of the n-th; -1: normalised output of the last"""
    pooled: bool = key(True)
    """mean over the tokens (residues) of a sequence; false: a vector for each token"""
    format: Literal["parquet", "safetensors"] = key("parquet")
    """format of the files"""
    token_budget: int = key(16384, low=1)
    """tokens of a forward pass"""


@dataclass(frozen=True, kw_only=True)
class RelativesSettings(RetrievalSettings, Resources):
    """d2plm relatives."""

    input: str = key(path="any")
    """the proteins: any input of d2plm ingest"""
    reference: str = key(path="any")
    """collection to search: FASTA, a store, or prepared data (its training set)"""
    output: str = key("relatives.tsv", path="any")
    """table for d2plm score relatives=: protein, relative, identity, coverage, sequence"""
    cache_dir: str = key("runs/retrieval", path="folder")
    """cache of results and of the reference"""


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Settings):
    """d2plm serve."""

    model_dir: str = key(path="model")
    """an exported model, or models:/NAME@ALIAS in the registry, which is resolved once"""
    host: str = key("127.0.0.1")
    """address to listen on; 0.0.0.0: all of this machine's"""
    port: int = key(8080, low=0, high=65535)
    """port; 0: any free port"""
    timeout: float = key(60, above=0)
    """seconds for one request, including the wait for others"""
    max_residues: int = key(65536, low=1)
    """residues in or requested by one request, and of its relatives"""
    device: Device = key("auto")
    """device; auto: CUDA if there is a GPU"""
    tracking_uri: str | None = key(None)
    """address of the registry; MLFLOW_TRACKING_URI takes precedence"""


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """d2plm replay."""

    run: str = key(path="folder")
    """output folder of the run, with its config.yaml and checkpoints"""
    step: int = key(low=1)
    """step number, as in metrics.jsonl"""
    checkpoint: str | None = key(None, path="any")
    """checkpoint to start from; null: the newest complete one before the step"""
    prepared_dir: str | None = key(None, path="folder")
    """the run's prepared data on this machine; null: the original location"""
    device: Literal["cpu", "cuda"] | None = key(None)
    """device; null: the run's"""
    output: str | None = key(None, path="any")
    """JSON file with all results; null: only the table"""
    show: int = key(10, low=0)
    """number of sequences and parameters in the table"""


@dataclass(frozen=True, kw_only=True)
class ReportSettings(Resources):
    """d2plm report."""

    output_dir: str = key(path="folder")
    """folder of the run, with evaluation.json, metrics.jsonl and generated.fasta"""
    model_dir: str | None = key(None, path="model")
    """the evaluated model; null: model in output_dir, otherwise as in its config.yaml"""
    prepared_dir: str | None = key(None, path="folder")
    """the prepared data; null: as in config.yaml, otherwise data beside output_dir"""
    device: Device = key("auto")
    """device for scoring generated proteins"""


@dataclass(frozen=True, kw_only=True)
class CheckpointsSettings(Settings):
    """d2plm checkpoint list and verify."""

    root: str = key(path="any")
    """output_dir of a run, its checkpoints folder, or an fsspec URL of one"""


@dataclass(frozen=True, kw_only=True)
class ConvertSettings(Settings):
    """d2plm checkpoint convert."""

    checkpoint: str = key(path="any")
    """checkpoint to convert"""
    output: str = key(path="any")
    """new folder"""
    max_shard_bytes: int = key(5_000_000_000, low=1)
    """maximum size of a safetensors file"""


# Command, or command_action → settings. Without its own file in configs/, a command configured like
# the pipeline composes pipeline.yaml.
SETTINGS: dict[str, type[Settings]] = {
    "adapt": AdaptSettings,
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
    "job_run": JobSettings,
    "job_show": JobSettings,
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

# Command → short form of a key → the key: explicit, so that new keys cause no ambiguity.
SHORT_KEYS: dict[str, dict[str, str]] = {
    "generate": {
        name: f"generation.{name}"
        for name in (
            *("number", "length", "prompt", "templates", "sampler", "steps", "temperature", "seed"),
            *("relatives", "identity", "keep", "avoid", "near", "filter"),
        )
    },
    "train": {"max_steps": "trainer.max_steps"},
}
