"""Building stores, model, paradigm, plan and trainer from a configuration.

Only this module knows the sections; the library takes the settings of one section.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from d2plm.assembly.preparation import build_vocabulary, require_fitting_window
from d2plm.core.errors import ConfigError, ModelError, require, within
from d2plm.core.files import nearest_path
from d2plm.core.vocabulary import PROTEIN, Vocabulary, open_vocabulary
from d2plm.data.loader import Collection
from d2plm.data.manifest import is_prepared, open_prepared, require_no_homologs_of
from d2plm.data.store import SequenceStore
from d2plm.data.synthetic import ShuffledSequences, SyntheticSequences, plausible_lengths
from d2plm.export.exported_model import is_whole_export, read_provenance, weights_digest
from d2plm.model import lora
from d2plm.model.dit import DiT, load_dit
from d2plm.model.dit_config import DiTConfig
from d2plm.model.esm import is_esm, load_esm
from d2plm.paradigms.paradigm import Paradigm
from d2plm.settings.commands import PipelineSettings
from d2plm.settings.data import LoaderSettings
from d2plm.settings.model import ModelSettings
from d2plm.settings.registry import find
from d2plm.settings.schema import part
from d2plm.settings.training import DistributedSettings, Parallelism, Precision
from d2plm.tracking.locations import REGISTRY, model_folder, pinned
from d2plm.training import checkpoint
from d2plm.training.callbacks.callback import Callback, MetricRun, RunContext
from d2plm.training.callbacks.trainjob_status import TrainJobStatus
from d2plm.training.plan import Plan, plan_of_accelerate, precision_of_accelerate
from d2plm.training.trainer import Trainer
from d2plm.training.trainer_settings import difference

log = logging.getLogger(__name__)

# Sections and keys that identify a run; resuming with different values is rejected.
IDENTITY = ("model", "paradigm", "optimizer", "schedule")
TRAINER_IDENTITY = (
    *("precision", "max_steps", "max_epochs", "flops_budget", "loss_aggregation", "freeze"),
    *("overfit_batches", "max_grad_norm", "ema_decay", "lora_rank", "seed"),
)
# Arguments of the trainer that are keys of other sections than `trainer`.
KEYS = {
    **{one.name: f"data.{one.name}" for one in fields(LoaderSettings)},
    **{one.name: f"distributed.{one.name}" for one in fields(Parallelism)},
    "monitor": "callbacks.early_stopping.monitor",
    "more": "callbacks.metrics.more",
    "weight": "data.mixture",
    "decay_steps": "schedule.decay_steps",
    "warmup_steps": "schedule.warmup_steps",
}
# Numbers of random proteins that replace missing prepared data.
RANDOM = {"train": 20_000, "validation": 500}

Kind = TypeVar("Kind", bound=PipelineSettings)
Stores = Mapping[str, SequenceStore | SyntheticSequences]


# Makes errors name configuration keys instead of trainer arguments.
trainer_keys = partial(within, "trainer", KEYS)


@within("data")
def open_stores(config: PipelineSettings) -> dict[str, SequenceStore]:
    """Open the prepared stores: training, validation and, if present, test.

    Raises:
        ConfigError: if they were prepared with another vocabulary than the configured one.
        DataError: if a store is missing or damaged.
    """
    data, folder = config.data, Path(config.data.prepared_dir)
    stores = open_prepared(folder).splits
    prepared, alphabet = stores["train"].vocabulary, data.alphabet
    # Prepared data contain their tokenizer, so it need not be configured.
    the_same = alphabet == prepared.name and alphabet == "tokenizer" and data.tokenizer is None
    if not the_same and build_vocabulary(data) != prepared:
        raise ConfigError(
            f"{folder} was prepared with {_settings_of(prepared)}; set the same, or prepare the "
            "data again",
            {"data.alphabet": alphabet},
        )
    return stores


def _settings_of(vocabulary: Vocabulary) -> str:
    more = " and another tokenizer" if vocabulary.name == "tokenizer" else ""
    return f"data.alphabet={vocabulary.name}{more}"


@within("data")
def training_stores(config: PipelineSettings) -> Stores:
    """Like `open_stores`, but with `data.residues=random` missing data become random tokens."""
    data = config.data
    require_fitting_window(config)
    if data.residues != "random" or Path(data.prepared_dir).exists():
        return open_stores(config)
    vocabulary = build_vocabulary(data)
    return {
        split: SyntheticSequences(plausible_lengths(number, seed), seed=seed, vocabulary=vocabulary)
        for seed, (split, number) in enumerate(RANDOM.items())
    }


def training_collections(config: PipelineSettings, stores: Stores) -> list[Collection]:
    """Open the training sequences: one store or a mixture; real, shuffled or random."""
    data = config.data
    by_cluster = data.sampling == "cluster"
    takes_relatives = data.max_relatives is not None and data.residues == "real"

    def collection(
        store: SequenceStore | SyntheticSequences, folder: Path, weight: float | None = None
    ) -> Collection:
        sequences = _with_residues(store, data.residues)
        relatives = open_prepared(folder).relatives if takes_relatives else None
        return Collection(sequences, weight, by_cluster, relatives)

    if not data.mixture:
        return [collection(stores["train"], Path(data.prepared_dir))]
    wanted, collections = "{prepared_dir: FOLDER, weight: NUMBER}", []
    for name, member in data.mixture.items():
        known = isinstance(member, dict) and {*member} == {"prepared_dir", "weight"}
        fits = known and isinstance(member["prepared_dir"], str)
        require(fits, f"data.mixture.{name}", member, wanted)
        folder = Path(member["prepared_dir"])
        for split, held_out in stores.items():
            if split != "train" and isinstance(held_out, SequenceStore):
                require_no_homologs_of(held_out, folder)
        store = SequenceStore(folder / "train_lmdb")
        alphabet = stores["train"].vocabulary
        if store.vocabulary != alphabet:
            raise ConfigError(
                f"data.mixture.{name}: {folder} has another vocabulary ({store.vocabulary.name}) "
                f"than {data.prepared_dir} ({alphabet.name}); prepare both with the same one"
            )
        collections.append(collection(store, folder, member["weight"]))
    return collections


def _with_residues(
    store: SequenceStore | SyntheticSequences, residues: str
) -> SequenceStore | ShuffledSequences | SyntheticSequences:
    if isinstance(store, SyntheticSequences) or residues == "real":
        return store
    if residues == "shuffled":
        return ShuffledSequences(store)
    return SyntheticSequences(store.lengths, store.clusters, vocabulary=store.vocabulary)


def build_paradigm(config: PipelineSettings, vocabulary: Vocabulary = PROTEIN) -> Paradigm:
    with within("paradigm"):
        paradigm: Paradigm = find("paradigm", config.paradigm.type).factory(config.paradigm)
    paradigm.vocabulary = vocabulary
    return paradigm


def model_config(config: PipelineSettings) -> DiTConfig:
    with within("model"):
        return DiTConfig(**asdict(config.model))


@dataclass(frozen=True)
class Start:
    """A model from which training starts.

    Attributes:
        model: the model; training updates its weights.
        digest: SHA-256 of the weights' files.
        location: folder of these files, or their version in the registry.
    """

    model: DiT
    digest: str
    location: str


def load_start(
    config: PipelineSettings, vocabulary: Vocabulary = PROTEIN
) -> tuple[PipelineSettings, Start | None]:
    """Load the model `init_from`, and put its architecture into the configuration.

    Two settings of the `model` section are kept: the dropout and, if the loaded model has no time
    embedding, its width. Without `init_from`, only the size of the vocabulary is added.

    Raises:
        ConfigError: if `init_from` is not a valid location.
        ModelError: if the model is incomplete or of another kind.
        TrackingError: if the registry does not have the model.
    """
    location, uri = config.init_from, config.tracking.uri
    if location is None:
        return with_vocab_size(config, vocabulary), None
    location = pinned(location, uri, key="init_from")
    folder = model_folder(location, uri, key="init_from")
    if not folder.is_dir():
        raise ModelError(
            f"init_from={location}: no such model folder{nearest_path(folder)}; give an exported "
            "model or an ESM-2 folder"
        )
    wanted = config.model
    refuse_adapter(folder, location)
    own = open_vocabulary(folder)
    if own != vocabulary:
        raise ModelError(
            f"init_from={location}: is a model of another vocabulary ({own.name}) than the data's "
            f"({vocabulary.name}); give a model of the same vocabulary, or init_from=null"
        )
    if is_esm(folder):
        width, seed = wanted.time_embedding_dim, config.trainer.seed
        model = load_esm(folder, time_embedding_dim=width, seed=seed)
    else:
        model = load_dit(folder)
    model.set_dropout(wanted.hidden_dropout_prob)
    home = location if location.startswith(REGISTRY) else str(folder.absolute())
    start = Start(model, weights_digest(folder), home)
    log.info(
        "starting from %s: %s parameters, sha256 %s",
        location,
        f"{model.num_parameters():,}",
        start.digest[:16],
    )
    return replace(config, model=ModelSettings(**model.config.settings())), start


def with_vocab_size(config: Kind, vocabulary: Vocabulary) -> Kind:
    """Set the model's vocabulary size; that of proteins is the default."""
    if vocabulary == PROTEIN:
        return config
    relatives = config.model.relatives_dim
    require(relatives is None, "model.relatives_dim", relatives, "null except for proteins")
    with within("model"):
        return replace(config, model=replace(config.model, vocab_size=vocabulary.size))


def refuse_adapter(folder: Path, location: object) -> None:
    """Raise `ModelError` if the folder contains only a low-rank adapter."""
    if (folder / lora.CONFIG).is_file():
        raise ModelError(
            f"init_from={location}: is an adapter, not a complete model; give the merged model, "
            "which was exported beside it"
        )


def with_start_pinned(config: Kind) -> Kind:
    """Replace an alias in `init_from` by the version that it currently points to."""
    if config.init_from is None:
        return config
    location = pinned(config.init_from, config.tracking.uri, key="init_from")
    return replace(config, init_from=location)


def build_optimizer(config: PipelineSettings) -> Callable[..., Any]:
    """Return a function that builds the optimizer from (model, parameters by name)."""
    factory = find("optimizer", config.optimizer.type).factory
    return partial(factory, settings=config.optimizer)


def build_schedule(config: PipelineSettings) -> Callable[..., Any]:
    """Return a function that builds the learning-rate schedule from the number of steps."""
    return partial(find("schedule", config.schedule.type).factory, settings=config.schedule)


def build_trainer(
    config: PipelineSettings,
    stores: Stores,
    tracked: MetricRun | None = None,
    start: Start | None = None,
) -> Trainer:
    """Build the registered trainer with its callbacks; without `start`, load `init_from`."""
    vocabulary = stores["train"].vocabulary
    if start is None:
        config, start = load_start(config, vocabulary)
    model, paradigm = model_config(config), build_paradigm(config, vocabulary)
    data = config.data
    make = trainer_class(config)
    collections = training_collections(config, stores)
    digests = {split: store.digest for split, store in stores.items()}
    if data.mixture:
        digests["train"] = "+".join(collection.sequences.digest for collection in collections)
    folders = [Path(one["prepared_dir"]) for one in (data.mixture or {}).values()]
    of_start = {}
    if start is not None:
        of_start = {"init_from": start.location, "init_from_digest": start.digest}
    context = RunContext(
        stores["validation"],
        model.max_position_embeddings,
        Path(config.model_dir),
        run=tracked,
        provenance={
            "digests": digests,
            "name": config.name,
            "data": [
                open_prepared(folder).provenance
                for folder in folders or [Path(data.prepared_dir)]
                if is_prepared(folder)  # only prepared data have a provenance
            ],
            "residues": data.residues,
            "data_license": data.license,
            **of_start,
        },
    )
    plan, callbacks = build_plan(config), build_callbacks(config, context)
    with trainer_keys():
        trainer: Trainer = make(
            replace(config.trainer, precision=precision_of(config)),
            model if start is None else start.model,
            paradigm,
            collections,
            Path(config.output_dir),
            loading=part(LoaderSettings, data),
            plan=plan,
            optimizer=build_optimizer(config),
            schedule=build_schedule(config),
            callbacks=callbacks,
            identity=_identity(config, collections, start),
        )
    return trainer


def is_trained(config: PipelineSettings) -> bool:
    """Whether `model_dir` already contains the model of this configuration after its last step.

    False with `init_from` or without `max_steps`, because only training can tell then.
    """
    trainer, folder = config.trainer, Path(config.model_dir)
    if trainer.resume != "auto" or trainer.max_steps is None or config.init_from is not None:
        return False
    if not is_whole_export(folder):
        return False
    provenance, stores = read_provenance(folder) or {}, training_stores(config)
    config = with_vocab_size(config, stores["train"].vocabulary)
    known = provenance["settings"]
    own = _identity(config, training_collections(config, stores), None)
    own["global_batch_tokens"] = trainer.global_batch_tokens or known["global_batch_tokens"]
    return provenance["step"] >= trainer.max_steps and difference(known, own) is None


def trainer_class(config: PipelineSettings) -> Callable[..., Trainer]:
    """The registered class of the trainer; `ConfigError` if it is unknown or not a `Trainer`."""
    found = find("trainer", config.trainer.type, "trainer.type").factory
    wanted = "the name of a class derived from d2plm.training.trainer.Trainer"
    derived = isinstance(found, type) and issubclass(found, Trainer)
    require(derived, "trainer.type", config.trainer.type, wanted)
    return found


def on_one_process(config: PipelineSettings) -> PipelineSettings:
    """Configure the same run on one process, with the same global batch."""
    trainer = replace(config.trainer, gradient_accumulation_steps="auto")
    if trainer.global_batch_tokens is None:
        where = trainer.checkpoints or Path(config.output_dir, "checkpoints")
        root = checkpoint.Root(str(where))
        for name in root.names()[-1:]:
            known = checkpoint.manifest(root, name)["run_state"]["identity"]
            trainer = replace(trainer, global_batch_tokens=known["global_batch_tokens"])
    kept = ("activation_checkpointing", "timeout_seconds")
    alone = DistributedSettings(**{key: getattr(config.distributed, key) for key in kept})
    return replace(config, trainer=trainer, distributed=alone)


def precision_of(config: PipelineSettings) -> Precision:
    """The configured precision, or for `auto` that of `accelerate launch`."""
    precision = config.trainer.precision
    launched = precision_of_accelerate()  # rejects a precision that training does not have
    return launched if precision == "auto" else precision


def build_plan(config: PipelineSettings) -> Plan:
    """Build the parallelism plan; settings of `accelerate launch` override the configuration."""
    settings = vars(part(Parallelism, config.distributed))
    launched = plan_of_accelerate()
    for key, value in launched.items():
        if settings.get(key) != value:
            log.info("distributed.%s=%s, from accelerate launch", key, value)
    with within("distributed"):
        return Plan(**{**settings, **launched})


def fitting_plan(config: PipelineSettings, model: DiTConfig, processes: int) -> Plan:
    """Build the plan for `processes`; `ConfigError` if the model cannot be divided among them."""
    plan = build_plan(config)
    with trainer_keys():
        plan = plan.resolved(processes)
        plan.require_fits(model)
        plan.require_adapters(config.trainer.lora_rank)
    return plan


def build_callbacks(config: PipelineSettings, context: RunContext) -> list[Callback]:
    """Build the configured callbacks in order, and one that reports the progress to a TrainJob."""
    callbacks: list[Callback] = []
    for name, settings in config.callbacks.items():
        if settings is None:
            continue
        make: Any = find("callback", name, "callbacks").factory
        wanted = "the name of a class derived from d2plm.training.callbacks.callback.Callback"
        require(isinstance(make, type) and issubclass(make, Callback), "callbacks", name, wanted)
        with within(f"callbacks.{name}"):
            callbacks.append(make.create(settings, context))
    status = TrainJobStatus.of(os.environ)
    return callbacks if status is None else [*callbacks, status]


def _identity(
    config: PipelineSettings, collections: Sequence[Collection], start: Start | None
) -> dict[str, Any]:
    sections, data = asdict(config), config.data
    vocabulary = collections[0].sequences.vocabulary

    def clusters_digest(collection: Collection) -> str | None:
        clusters = collection.sequences.clusters if collection.by_cluster else None
        return None if clusters is None else hashlib.sha256(clusters.tobytes()).hexdigest()

    return {
        **{section: sections[section] for section in IDENTITY},
        "init_from": None if start is None else start.digest,
        "trainer": {key: sections["trainer"][key] for key in TRAINER_IDENTITY},
        "data": {
            "collections": [
                {
                    "digest": collection.sequences.digest,
                    "weight": collection.weight,
                    "clusters": clusters_digest(collection),
                    "relatives": None
                    if collection.relatives is None
                    else collection.relatives.digest,
                }
                for collection in collections
            ],
            "token_budget": data.token_budget,
            "max_length": data.max_length,
            "max_relatives": data.max_relatives,
            **({} if vocabulary == PROTEIN else {"vocabulary": vocabulary.describe()}),
        },
    }
