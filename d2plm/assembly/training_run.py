"""Building stores, model, paradigm, plan and trainer from a configuration.

The library takes plain arguments; the names of configuration keys are known only here.
"""

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from d2plm.assembly.preparation import build_vocabulary, require_fitting_window
from d2plm.config import Config
from d2plm.core.errors import ConfigError, ModelError, as_keys, require, require_choice
from d2plm.core.files import nearest_path
from d2plm.core.precision import DTYPES
from d2plm.core.vocabulary import PROTEIN, Codons, Vocabulary, open_vocabulary
from d2plm.data.loader import Collection
from d2plm.data.manifest import is_prepared, open_prepared, require_no_homologs_of
from d2plm.data.megatron import DATA, INDEX, MegatronSequences
from d2plm.data.store import SequenceStore
from d2plm.data.synthetic import ShuffledSequences, SyntheticSequences, plausible_lengths
from d2plm.export.exported_model import weights_digest
from d2plm.model import lora
from d2plm.model.dit import DiT, load_dit
from d2plm.model.dit_config import DiTConfig
from d2plm.model.esm import is_esm, load_esm
from d2plm.paradigms.paradigm import Paradigm
from d2plm.targets import build, build_function, build_with
from d2plm.tracking.locations import REGISTRY, model_folder, pinned
from d2plm.training import checkpoint
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.metric_logger import MetricRun
from d2plm.training.plan import DIMENSIONS, Plan, plan_of_accelerate, precision_of_accelerate
from d2plm.training.trainer import Trainer

log = logging.getLogger(__name__)

# Sections and keys that identify a run; resuming with different values is rejected.
IDENTITY = ("model", "paradigm", "optimizer", "schedule")
# Settings of the model that earlier runs lack, and the values that they had.
LATER = {"norm": "layer", "rope_fraction": 1.0, "parallel_residual": False}
TRAINER_IDENTITY = (
    *("precision", "max_steps", "max_epochs", "flops_budget", "loss_aggregation"),
    *("overfit_batches", "max_grad_norm", "ema_decay", "lora_rank", "seed"),
)
DATA_ARGUMENTS = (  # trainer arguments that are keys of the section `data`
    *("token_budget", "max_length", "max_relatives"),
    *("num_workers", "prefetch_factor", "async_prefetch"),
)
# Trainer arguments that come from other sections or have another name there.
KEYS = {
    **{argument: f"data.{argument}" for argument in DATA_ARGUMENTS},
    **{field.name: f"distributed.{field.name}" for field in fields(Plan)},
    "bins_per_micro_batch": "data.token_budget",
    "micro_batches": "trainer.gradient_accumulation_steps",
    "repeat_batches": "trainer.overfit_batches",
    "monitor": "callbacks.early_stopping.monitor",
    "optimizer": "optimizer._target_",
}
# Numbers of random proteins that replace missing prepared data.
RANDOM = {"train": 20_000, "validation": 500}

Stores = Mapping[str, SequenceStore | SyntheticSequences]


@contextmanager
def trainer_keys() -> Iterator[None]:
    """Make errors name configuration keys instead of trainer arguments."""
    with as_keys("trainer", KEYS):
        yield


def open_stores(config: Config) -> dict[str, SequenceStore]:
    """Open the prepared stores, or Megatron corpora: training, validation and, if present, test.

    Raises:
        ConfigError: if they were prepared with another vocabulary than the configured one.
        DataError: if a store is missing or damaged.
    """
    data, folder = config["data"], Path(config["data"]["prepared_dir"])
    if _has_corpora(folder):
        tested = ("test",) if _has_corpora(folder, "test") else ()
        return {split: _corpus(data, folder, split) for split in ("train", "validation", *tested)}
    stores = open_prepared(folder).splits
    prepared, alphabet = stores["train"].vocabulary, data.get("alphabet", "protein")
    # Prepared data contain their tokenizer, so that only another one need be given.
    the_same = alphabet == prepared.name and alphabet == "tokenizer" and data["tokenizer"] is None
    if not the_same and build_vocabulary(data, "data") != prepared:
        raise ConfigError(
            f"data.alphabet={alphabet}: {folder} was prepared with {_settings_of(prepared)}; set "
            "the same, or prepare the data again"
        )
    return stores


def _has_corpora(folder: Path, split: str = "train") -> bool:
    return any((folder / f"{split}{ending}").is_file() for ending in (INDEX, DATA))


def _corpus(data: Mapping[str, Any], folder: Path, split: str) -> MegatronSequences:
    """A corpus that is read in place, in the configured vocabulary."""
    _warn_of_leakage(folder)
    settings = {key: data.get(key) for key in ("window", "end_of_document")}
    with as_keys("data"):
        return MegatronSequences(folder / split, build_vocabulary(data, "data"), **settings)


@cache
def _warn_of_leakage(folder: Path) -> None:
    log.warning(
        "%s: whether its training texts resemble held-out ones is not checked; d2plm prepare "
        "data.input=… splits a corpus so that they do not",
        folder,
    )


def _settings_of(vocabulary: Vocabulary) -> str:
    more = {"tokenizer": " and another tokenizer"}.get(vocabulary.name, "")
    if isinstance(vocabulary, Codons):
        stops = ",".join(vocabulary.stop_codons)
        more = f" data.reading_frame={vocabulary.reading_frame} data.stop_codons=[{stops}]"
    return f"data.alphabet={vocabulary.name}{more}"


def training_stores(config: Config) -> Stores:
    """Like `open_stores`, but with `data.residues=random` missing data become random tokens."""
    data = config["data"]
    require_fitting_window(config)
    if data["residues"] != "random" or Path(data["prepared_dir"]).exists():
        return open_stores(config)
    vocabulary = build_vocabulary(data, "data")
    return {
        split: SyntheticSequences(plausible_lengths(number, seed), seed=seed, vocabulary=vocabulary)
        for seed, (split, number) in enumerate(RANDOM.items())
    }


def training_collections(config: Config, stores: Stores) -> list[Collection]:
    """The prepared training store or a mixture of several, real, shuffled or random."""
    data = config["data"]
    require_choice("data.sampling", data["sampling"], ("sequence", "cluster"))
    by_cluster = data["sampling"] == "cluster"
    takes_relatives = data["max_relatives"] is not None and data["residues"] == "real"

    def collection(
        store: SequenceStore | SyntheticSequences, folder: Path, weight: float | None = None
    ) -> Collection:
        sequences = _with_residues(store, data["residues"])
        relatives = open_prepared(folder).relatives if takes_relatives else None
        return Collection(sequences, weight, by_cluster, relatives)

    if not data["mixture"]:
        return [collection(stores["train"], Path(data["prepared_dir"]))]
    mixture, wanted = data["mixture"], "{prepared_dir: FOLDER, weight: NUMBER}"
    require(isinstance(mixture, dict), "data.mixture", mixture, f"{{NAME: {wanted}, …}}")
    collections = []
    for name, member in mixture.items():
        known = isinstance(member, dict) and {*member} == {"prepared_dir", "weight"}
        fits = known and isinstance(member["prepared_dir"], str)
        require(fits, f"data.mixture.{name}", member, wanted)
        folder = Path(member["prepared_dir"])
        store: SequenceStore
        if _has_corpora(folder):
            store = _corpus(data, folder, "train")
        else:
            for split, held_out in stores.items():
                if split != "train" and type(held_out) is SequenceStore:
                    require_no_homologs_of(held_out, folder)
            store = SequenceStore(folder / "train_lmdb")
        alphabet = stores["train"].vocabulary
        if store.vocabulary != alphabet:
            raise ConfigError(
                f"data.mixture.{name}: {folder} has another vocabulary ({store.vocabulary.name}) "
                f"than {data['prepared_dir']} ({alphabet.name}); prepare both with the same one"
            )
        collections.append(collection(store, folder, member["weight"]))
    return collections


def _with_residues(
    store: SequenceStore | SyntheticSequences, residues: str
) -> SequenceStore | ShuffledSequences | SyntheticSequences:
    require_choice("data.residues", residues, ("real", "shuffled", "random"))
    if isinstance(store, SyntheticSequences) or residues == "real":
        return store
    if residues == "shuffled":
        return ShuffledSequences(store)
    return SyntheticSequences(store.lengths, store.clusters, vocabulary=store.vocabulary)


def build_paradigm(config: Config, vocabulary: Vocabulary = PROTEIN) -> Paradigm:
    section = {key: value for key, value in config["paradigm"].items() if key != "name"}
    paradigm: Paradigm = build(section, "paradigm")
    paradigm.vocabulary = vocabulary
    return paradigm


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


def load_start(config: Config, vocabulary: Vocabulary = PROTEIN) -> tuple[Config, Start | None]:
    """Load the model `init_from`, and put its architecture into the configuration.

    Two settings of the `model` section are kept: the dropout and, if the loaded model has no time
    embedding, its width. Without `init_from`, only the size of the vocabulary is added.

    Raises:
        ConfigError: if `init_from` is not a valid location.
        ModelError: if the model is incomplete or of another kind.
        TrackingError: if the registry does not have the model.
    """
    location, uri = config["init_from"], config["tracking"]["uri"]
    if location is None:
        return with_vocab_size(config, vocabulary), None
    location = pinned(location, uri, key="init_from")
    folder = model_folder(location, uri, key="init_from")
    if not folder.is_dir():
        raise ModelError(
            f"init_from={location}: no such model folder{nearest_path(folder)}; give an exported "
            "model or an ESM-2 folder"
        )
    wanted = config.build("model")
    refuse_adapter(folder, location)
    own = open_vocabulary(folder)
    if own != vocabulary:
        raise ModelError(
            f"init_from={location}: is a model of another vocabulary ({own.name}) than the data's "
            f"({vocabulary.name}); give a model of the same vocabulary, or init_from=null"
        )
    if is_esm(folder):
        width, seed = wanted.time_embedding_dim, config["trainer"]["seed"]
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
    section = {"_target_": config["model"]["_target_"], **model.config.settings()}
    return Config({**config.values, "model": section}), start


def with_vocab_size(config: Config, vocabulary: Vocabulary) -> Config:
    """The configuration whose model has a vocabulary's size; the proteins' is its default."""
    if vocabulary == PROTEIN:
        return config
    relatives = config["model"].get("relatives_dim")
    require(relatives is None, "model.relatives_dim", relatives, "null except for proteins")
    model = {**config["model"], "vocab_size": vocabulary.size}
    return Config({**config.values, "model": model})


def refuse_adapter(folder: Path, location: object) -> None:
    """Raise `ModelError` if the folder contains only a low-rank adapter."""
    if (folder / lora.CONFIG).is_file():
        raise ModelError(
            f"init_from={location}: is an adapter, not a complete model; give the merged model, "
            "which was exported beside it"
        )


def with_start_pinned(config: Config) -> Config:
    """Replace an alias in `init_from` by the version that it currently points to."""
    location = config["init_from"]
    if location is None:
        return config
    location = pinned(location, config["tracking"]["uri"], key="init_from")
    return Config({**config.values, "init_from": location})


def build_optimizer(config: Config) -> Callable[..., Any]:
    """Function that builds the configured optimizer from (model, parameters by name)."""
    return build_function(config["optimizer"], "optimizer")


def build_schedule(config: Config) -> Callable[..., Any]:
    """Function that builds the configured learning-rate schedule from the number of steps."""
    return build_function(config["schedule"], "schedule", {"max_steps": "trainer.max_steps"})


def build_trainer(
    config: Config, stores: Stores, tracked: MetricRun | None = None, start: Start | None = None
) -> Trainer:
    """Build the `trainer._target_` with its callbacks; without `start`, load `init_from`."""
    vocabulary = stores["train"].vocabulary
    if start is None:
        config, start = load_start(config, vocabulary)
    model, paradigm = config.build("model"), build_paradigm(config, vocabulary)
    data = config["data"]
    section = {key: value for key, value in config["trainer"].items() if key != "fast_dev_run"}
    make = build({**section, "precision": precision_of(config), "_partial_": True}, "trainer")
    collections = training_collections(config, stores)
    digests = {split: store.digest for split, store in stores.items()}
    if data["mixture"]:
        digests["train"] = "+".join(collection.sequences.digest for collection in collections)
    callbacks = build_callbacks(
        config["callbacks"],
        run=tracked,
        validation_store=stores["validation"],
        max_length=model.max_position_embeddings,
        folder=Path(config["model_dir"]),
        provenance={
            "digests": digests,
            "name": config["name"],
            "data": [
                open_prepared(folder).provenance
                for member in (data["mixture"] or {"": data}).values()
                # Only prepared data have a provenance.
                if is_prepared(folder := Path(member["prepared_dir"]))
            ],
            "residues": data["residues"],
            "data_license": data["license"],
            **(
                {}
                if start is None
                else {"init_from": start.location, "init_from_digest": start.digest}
            ),
        },
    )
    plan = build_plan(config)
    with trainer_keys():
        trainer = make(
            model=model if start is None else start.model,
            paradigm=paradigm,
            collections=collections,
            output_dir=Path(config["output_dir"]),
            optimizer=build_optimizer(config),
            schedule=build_schedule(config),
            plan=plan,
            **{argument: data[argument] for argument in DATA_ARGUMENTS},
            callbacks=callbacks,
            identity=_identity(config, collections, start),
        )
    wanted, target = "a class derived from d2plm.training.trainer.Trainer", section["_target_"]
    require(isinstance(trainer, Trainer), "trainer._target_", target, wanted)
    return trainer  # type: ignore[no-any-return]  # `require` has checked it


def on_one_process(config: Config) -> Config:
    """The same run on one process, with the same global batch."""
    values = copy.deepcopy(config.values)
    values["distributed"] |= {"processes": 1, "shard": "auto", "cpu_offload": False}
    values["distributed"] |= dict.fromkeys(DIMENSIONS, 1)
    values["trainer"]["gradient_accumulation_steps"] = "auto"
    if values["trainer"]["global_batch_tokens"] is None:
        where = values["trainer"]["checkpoints"] or Path(config["output_dir"], "checkpoints")
        root = checkpoint.Root(str(where))
        for name in root.names()[-1:]:
            known = checkpoint.manifest(root, name)["run_state"]["identity"]
            values["trainer"]["global_batch_tokens"] = known["global_batch_tokens"]
    return Config(values)


def precision_of(config: Config) -> str:
    """The configured precision, or for `auto` that of `accelerate launch`."""
    precision: str = config["trainer"]["precision"]
    require_choice("trainer.precision", precision, ("auto", *DTYPES))
    launched = precision_of_accelerate()  # one that training does not have is an error in any case
    return launched if precision == "auto" else precision


def build_plan(config: Config) -> Plan:
    """Build the parallelism plan; settings of `accelerate launch` override the configuration."""
    settings = {k: v for k, v in config["distributed"].items() if k != "processes"}
    launched = plan_of_accelerate()
    for key, value in launched.items():
        if settings.get(key) != value:
            log.info("distributed.%s=%s, from accelerate launch", key, value)
    with as_keys("distributed"):
        return Plan(**{**settings, **launched})


def fitting_plan(config: Config, model: DiTConfig, processes: int) -> Plan:
    """Build the plan for this number of processes.

    Raises:
        ConfigError: if they, the model or its adapters cannot be divided so.
    """
    plan = build_plan(config)
    with trainer_keys():
        plan = plan.resolved(processes)
        plan.require_fits(model)
        plan.require_adapters(config["trainer"]["lora_rank"])
    return plan


def build_callbacks(section: dict[str, Any], **offered: Any) -> list[Callback]:
    """Build the callbacks of the `callbacks` section, in order.

    Args:
        section: {name: settings with a `_target_`, or None to disable}.
        offered: arguments that are passed to the callbacks that accept them.
    """
    callbacks: list[Callback] = []
    for name in section:
        if section[name] is None:
            continue
        callback = build_with(section[name], f"callbacks.{name}", **offered)
        wanted = "a class derived from d2plm.training.callbacks.callback.Callback"
        target = section[name]["_target_"]
        require(isinstance(callback, Callback), f"callbacks.{name}._target_", target, wanted)
        callbacks.append(callback)
    return callbacks


def _identity(
    config: Config, collections: Sequence[Collection], start: Start | None
) -> dict[str, Any]:
    data, trainer = config["data"], config["trainer"]
    vocabulary = collections[0].sequences.vocabulary

    def clusters_digest(collection: Collection) -> str | None:
        clusters = collection.sequences.clusters if collection.by_cluster else None
        return None if clusters is None else hashlib.sha256(clusters.tobytes()).hexdigest()

    return {
        **{section: config[section] for section in IDENTITY},
        "model": {
            key: value
            for key, value in config["model"].items()
            if key not in LATER or value != LATER[key]
        },
        "init_from": None if start is None else start.digest,
        "trainer": {
            **{key: trainer.get(key) for key in TRAINER_IDENTITY},  # older files lack some keys
            "freeze": list(trainer["freeze"]),
        },
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
            "token_budget": data["token_budget"],
            "max_length": data["max_length"],
            "max_relatives": data["max_relatives"],
            **({} if vocabulary == PROTEIN else {"vocabulary": vocabulary.describe()}),
        },
    }
