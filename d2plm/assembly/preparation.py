"""Preparing the configured data, and building settings objects that other commands share."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from d2plm.assembly.tracked_run import describe, log_data, tracked_run
from d2plm.config import Config
from d2plm.core.errors import ConfigError, as_keys, require
from d2plm.core.files import shipped
from d2plm.core.number_text import counted
from d2plm.core.progress import Progress
from d2plm.core.terminal import done
from d2plm.core.vocabulary import STOP_CODONS, Vocabulary, vocabulary
from d2plm.data.homology import ClusterSettings, Resources, SearchSettings
from d2plm.data.prepare import prepare
from d2plm.data.similarity import TextSettings
from d2plm.data.sources import Reading
from d2plm.data.split import SplitSettings

log = logging.getLogger(__name__)

Settings = TypeVar("Settings")

# Keys of the vocabulary with their defaults: configurations of older runs lack them.
ALPHABET: dict[str, Any] = {
    "alphabet": "protein",
    "tokenizer": None,
    "reading_frame": 1,
    "stop_codons": STOP_CODONS,
}


def prepare_data(config: Config) -> dict[str, Any]:
    """Prepare the data, log them to the tracking run, and return the manifest."""
    data = config["data"]
    require(bool(data["input"]), "data.input", data["input"], "proteins or a raw store")
    require_fitting_window(config)
    with Progress("ingesting", 100, unit="%") as progress, as_keys("data"):
        manifest = prepare(
            data["input"],
            Path(data["prepared_dir"]),
            vocabulary=build_vocabulary(data, "data"),
            window=data["window"],
            reading=settings(Reading, data, "data"),
            min_residues=data["min_residues"],
            max_residues=data["max_residues"],
            split=settings(SplitSettings, data, "data", seed="split_seed"),
            clustering=settings(ClusterSettings, data, "data", "cluster_"),
            search=settings(SearchSettings, data, "data", "search_"),
            text=settings(TextSettings, data, "data"),
            relatives_sensitivity=data["relatives_sensitivity"],
            resources=resources(config),
            keep=data["keep_prepared"],
            report=log.info,
            progress=progress.update_share,
        )
    with tracked_run(config, "prepare") as tracked:
        log_data(tracked, Path(data["prepared_dir"]), {})
        if not Path(config["model_dir"]).is_dir():  # keeps the description of an existing model
            describe(tracked, config)
    counts = manifest["counts"]
    amounts = (
        f"{split} {counted(counts[f'{split}_sequences'], 'sequence')} in "
        f"{counted(counts[f'{split}_clusters'], 'cluster')}"
        for split in manifest["digests"]
    )
    done(f"prepared {data['prepared_dir']}: {', '.join(amounts)}")
    return manifest


def build_vocabulary(values: Mapping[str, Any], section: str = "") -> Vocabulary:
    """The vocabulary of the keys `alphabet`, `tokenizer`, `reading_frame` and `stop_codons`.

    Args:
        section: name of the section that contains them, for errors; empty for the top level.

    Raises:
        ConfigError: if a value is invalid.
        DataError: if the tokenizer cannot be read.
    """
    chosen = {key: values.get(key, default) for key, default in ALPHABET.items()}
    name, tokenizer = chosen.pop("alphabet"), chosen.pop("tokenizer")
    keys = {key: f"{section}.{key}" if section else key for key in ALPHABET}
    with as_keys(section, keys):
        return vocabulary(name, tokenizer=tokenizer and shipped(tokenizer), **chosen)


def require_fitting_window(config: Config) -> None:
    """Check that the pieces into which sequences are cut are not cropped by the training.

    Raises:
        ConfigError: if they are longer than the training takes.
    """
    window, longest = config["data"].get("window"), config["data"]["max_length"]
    limit = "data.max_length"
    if longest is None and config["init_from"] is None:  # otherwise the weights decide
        limit = "model.max_position_embeddings"
        longest = config["model"]["max_position_embeddings"]
    if window is not None and longest is not None:
        wanted = f"at most {limit} - 2 = {longest - 2}, as <cls> and <eos> take two tokens"
        require(window <= longest - 2, "data.window", window, wanted)


def require_fitting_relatives(config: Config) -> None:
    """Check before a pipeline's first step whether later steps would reject the relatives.

    It must not need torch, which the image that prepares the data lacks.

    Raises:
        ConfigError: if relatives are requested from a model or paradigm that takes none.
    """
    if config["init_from"] is not None:  # the weights decide
        return
    width, paradigm = config["model"]["relatives_dim"], config["paradigm"]
    takes = paradigm.get("source") != "uniform" and not paradigm.get("shift")
    without = "data.max_relatives=null generation.relatives=null"
    if width is not None and not takes:
        raise ConfigError(
            f"model.relatives_dim={width}: {paradigm['name']} does not support relatives with the "
            f"uniform source or shift=true; set model.relatives_dim=null {without}"
        )
    if width is None and config["generation"]["relatives"] is not None:
        raise ConfigError(
            f"generation.relatives={config['generation']['relatives']}: not supported by a model "
            f"without relatives_dim; set {without}, or model.relatives_dim"
        )


def resources(config: Config) -> Resources:
    return settings(Resources, config["data"], "data")


def settings(
    kind: type[Settings],
    values: dict[str, Any],
    section: str | None = None,
    prefix: str = "",
    **renamed: str,
) -> Settings:
    """Build the dataclass `kind`, reading each field from the key `prefix` + its name.

    Keys that the configuration of an older run lacks keep the dataclass's default.

    Args:
        section: name of the section, for errors; None for the top level.
        **renamed: field → key, for fields whose key has another name.

    Raises:
        ConfigError: if a value is invalid, naming its key.
    """
    keys = {
        field.name: renamed.get(field.name, prefix + field.name)
        for field in fields(kind)  # type: ignore[arg-type]  # a dataclass
    }
    full = {name: f"{section}.{key}" if section else key for name, key in keys.items()}
    with as_keys(section or "", full):
        return kind(**{name: values[key] for name, key in keys.items() if key in values})
