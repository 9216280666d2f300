"""A configuration → stores, model, paradigm, plan and trainer.

The library takes arguments; the names of the configuration's keys are known here.
"""

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2plm.config import Config
from d2plm.core.errors import ModelError, as_keys, require, require_choice
from d2plm.core.files import nearest_path
from d2plm.core.precision import DTYPES
from d2plm.data.loader import Collection
from d2plm.data.manifest import is_prepared, open_prepared, require_no_homologs_of
from d2plm.data.relatives import RelativesIndex
from d2plm.data.store import SequenceStore
from d2plm.data.synthetic import ShuffledSequences, SyntheticSequences, plausible_lengths
from d2plm.export.exported_model import weights_digest
from d2plm.model import lora
from d2plm.model.dit import DiT, load_dit
from d2plm.model.esm import is_esm, load_esm
from d2plm.paradigms.paradigm import Paradigm
from d2plm.targets import build, build_function, build_with
from d2plm.tracking.locations import REGISTRY, model_folder, pinned
from d2plm.training import checkpoint
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.metric_logger import MetricRun
from d2plm.training.plan import Plan, plan_of_accelerate, precision_of_accelerate
from d2plm.training.trainer import Trainer

log = logging.getLogger(__name__)

# Sections that make a run what it is: resuming under others is refused.
IDENTITY = ("model", "paradigm", "optimizer", "schedule")
TRAINER_IDENTITY = (
    "precision",
    "max_steps",
    "max_epochs",
    "flops_budget",
    "loss_aggregation",
    "overfit_batches",
    "max_grad_norm",
    "ema_decay",
    "lora_rank",
    "seed",
)
OF_DATA = (  # arguments of the trainer that are keys of the section `data`
    *("token_budget", "max_length", "max_relatives"),
    *("num_workers", "prefetch_factor", "async_prefetch"),
)
# Arguments of the trainer that come from other sections, or under another name.
KEYS = {
    **{argument: f"data.{argument}" for argument in OF_DATA},
    **{argument: f"distributed.{argument}" for argument in ("replicate", "shard", "cpu_offload")},
    "bins_per_micro_batch": "data.token_budget",
    "micro_batches": "trainer.gradient_accumulation_steps",
    "repeat_batches": "trainer.overfit_batches",
    "monitor": "callbacks.early_stopping.monitor",
    "optimizer": "optimizer._target_",
}
# Random proteins that stand in where nothing was prepared.
RANDOM = {"train": 20_000, "validation": 500}

Stores = Mapping[str, SequenceStore | SyntheticSequences]


@contextmanager
def trainer_keys() -> Iterator[None]:
    """Have errors that name the trainer's arguments name the configuration's keys."""
    with as_keys("trainer", KEYS):
        yield


def open_stores(config: Config) -> dict[str, SequenceStore]:
    """The prepared stores: training, validation and, if there is one, test."""
    return open_prepared(Path(config["data"]["prepared_dir"])).splits


def training_stores(config: Config) -> Stores:
    """The same; with `data.residues=random`, random proteins where nothing was prepared."""
    data = config["data"]
    if data["residues"] != "random" or Path(data["prepared_dir"]).exists():
        return open_stores(config)
    return {
        split: SyntheticSequences(plausible_lengths(number, seed), seed=seed)
        for seed, (split, number) in enumerate(RANDOM.items())
    }


def training_collections(config: Config, stores: Stores) -> list[Collection]:
    """The prepared training store, a mixture of several, or their shuffled or random stand-ins."""
    data = config["data"]
    require_choice("data.sampling", data["sampling"], ("sequence", "cluster"))
    by_cluster = data["sampling"] == "cluster"
    if not data["mixture"]:
        sequences = _with_residues(stores["train"], data["residues"])
        relatives = _relatives(data, Path(data["prepared_dir"]))
        return [Collection(sequences, None, by_cluster, relatives)]
    mixture, wanted = data["mixture"], "{prepared_dir: FOLDER, weight: NUMBER}"
    require(isinstance(mixture, dict), "data.mixture", mixture, f"{{NAME: {wanted}, …}}")
    collections = []
    for name, member in mixture.items():
        known = isinstance(member, dict) and {*member} == {"prepared_dir", "weight"}
        fits = known and isinstance(member["prepared_dir"], str)
        require(fits, f"data.mixture.{name}", member, wanted)
        folder = Path(member["prepared_dir"])
        for split, held_out in stores.items():
            if split != "train" and isinstance(held_out, SequenceStore):
                require_no_homologs_of(held_out, folder)
        store = _with_residues(SequenceStore(folder / "train_lmdb"), data["residues"])
        relatives = _relatives(data, folder)
        collections.append(Collection(store, member["weight"], by_cluster, relatives))
    return collections


def _relatives(data: dict[str, Any], folder: Path) -> RelativesIndex | None:
    """The relatives of the training proteins in a prepared folder, where they are wanted."""
    if data["max_relatives"] is None or data["residues"] != "real":
        return None
    return open_prepared(folder).relatives


def _with_residues(
    store: SequenceStore | SyntheticSequences, residues: str
) -> SequenceStore | ShuffledSequences | SyntheticSequences:
    require_choice("data.residues", residues, ("real", "shuffled", "random"))
    if isinstance(store, SyntheticSequences) or residues == "real":
        return store
    if residues == "shuffled":
        return ShuffledSequences(store)
    return SyntheticSequences(store.lengths, store.clusters)


def build_paradigm(config: Config) -> Paradigm:
    """The paradigm that the configuration describes."""
    section = {key: value for key, value in config["paradigm"].items() if key != "name"}
    return build(section, "paradigm")


@dataclass(frozen=True)
class Start:
    """A model that training starts from.

    Attributes:
        model: the weights; training changes them.
        digest: SHA-256 of the files they were read from.
        location: the folder of these files, or their version in the registry.
    """

    model: DiT
    digest: str
    location: str


def load_start(config: Config) -> tuple[Config, Start | None]:
    """The configuration with the architecture of `init_from` as its `model`, and that model.

    Two settings of the section are kept: the dropout, and the width of the time embedding where the
    start has none.

    Raises:
        ConfigError: if `init_from` can be no model.
        ModelError: if the model is not whole, or of another kind.
        TrackingError: if the registry does not have it.
    """
    location, uri = config["init_from"], config["tracking"]["uri"]
    if location is None:
        return config, None
    location = pinned(location, uri, key="init_from")
    folder = model_folder(location, uri, key="init_from")
    if not folder.is_dir():
        raise ModelError(
            f"init_from={location}: no such model folder{nearest_path(folder)}; give one that "
            "training exported, or an ESM-2 folder"
        )
    wanted = config.build("model")
    refuse_adapter(folder, location)
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


def refuse_adapter(folder: Path, location: object) -> None:
    """Raise `ModelError` for a start that holds changes of low rank alone."""
    if (folder / lora.CONFIG).is_file():
        raise ModelError(
            f"init_from={location}: an adapter holds changes alone; give the merged model, which "
            "was written beside it"
        )


def with_start_pinned(config: Config) -> Config:
    """The configuration with the version that an alias in `init_from` points to by now."""
    location = config["init_from"]
    if location is None:
        return config
    location = pinned(location, config["tracking"]["uri"], key="init_from")
    return Config({**config.values, "init_from": location})


def build_optimizer(config: Config) -> Callable[..., Any]:
    """(model, parameters by name) → the configured optimizer."""
    return build_function(config["optimizer"], "optimizer")


def build_schedule(config: Config) -> Callable[..., Any]:
    """Number of steps → the configured factor of the learning rate by step."""
    return build_function(config["schedule"], "schedule", {"max_steps": "trainer.max_steps"})


def build_trainer(
    config: Config,
    stores: Stores,
    tracked: MetricRun | None = None,
    start: Start | None = None,
) -> Trainer:
    """The `trainer._target_` and its callbacks; without `start`, `init_from` is loaded."""
    if start is None:
        config, start = load_start(config)
    model, paradigm = config.build("model"), build_paradigm(config)
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
                # Stores that were made in another way have no provenance.
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
            **{argument: data[argument] for argument in OF_DATA},
            callbacks=callbacks,
            identity=_identity(config, collections, start),
        )
    wanted, target = "a class derived from d2plm.training.trainer.Trainer", section["_target_"]
    require(isinstance(trainer, Trainer), "trainer._target_", target, wanted)
    return trainer  # type: ignore[no-any-return]  # `require` has checked it


def on_one_process(config: Config) -> Config:
    """The same run on one process, with an unchanged global batch."""
    values = copy.deepcopy(config.values)
    values["distributed"] |= {"processes": 1, "replicate": 1, "shard": "auto", "cpu_offload": False}
    values["trainer"]["gradient_accumulation_steps"] = "auto"
    if values["trainer"]["global_batch_tokens"] is None:
        where = values["trainer"]["checkpoints"] or Path(config["output_dir"], "checkpoints")
        root = checkpoint.Root(str(where))
        for name in root.names()[-1:]:
            known = checkpoint.manifest(root, name)["run_state"]["identity"]
            values["trainer"]["global_batch_tokens"] = known["global_batch_tokens"]
    return Config(values)


def precision_of(config: Config) -> str:
    """The configured precision; where that is `auto`, the one given to `accelerate launch`."""
    precision: str = config["trainer"]["precision"]
    require_choice("trainer.precision", precision, ("auto", *DTYPES))
    return precision_of_accelerate() if precision == "auto" else precision


def build_plan(config: Config) -> Plan:
    """How training is spread; settings of `accelerate launch` win over the configuration."""
    settings = {k: v for k, v in config["distributed"].items() if k != "processes"}
    launched = plan_of_accelerate()
    for key, value in launched.items():
        if settings.get(key) != value:
            log.info("distributed.%s=%s, from accelerate launch", key, value)
    with as_keys("distributed"):
        return Plan(**{**settings, **launched})


def build_callbacks(section: dict[str, Any], **offered: Any) -> list[Callback]:
    """The callbacks of the `callbacks` section, in its order.

    Args:
        section: {name: settings with a `_target_`, or None for none}.
        offered: values for the arguments of these names, where a callback has them.
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

    def clusters_digest(collection: Collection) -> str | None:
        clusters = collection.sequences.clusters if collection.by_cluster else None
        return None if clusters is None else hashlib.sha256(clusters.tobytes()).hexdigest()

    return {
        **{section: config[section] for section in IDENTITY},
        "init_from": None if start is None else start.digest,
        "trainer": {
            **{key: trainer.get(key) for key in TRAINER_IDENTITY},  # older ones lack some
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
        },
    }
