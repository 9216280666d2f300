"""Preparing the data that a configuration describes, and the settings that other commands share."""

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from d2plm.assembly.tracked_run import describe, log_data, tracked_run
from d2plm.config import Config
from d2plm.core.errors import as_keys, require
from d2plm.core.progress import Progress
from d2plm.core.terminal import done
from d2plm.data.homology import ClusterSettings, Resources, SearchSettings
from d2plm.data.prepare import prepare
from d2plm.data.sources import Reading
from d2plm.data.split import SplitSettings

log = logging.getLogger(__name__)

Settings = TypeVar("Settings")


def prepare_data(config: Config) -> dict[str, Any]:
    """Prepare the data, log them to the tracking run, and return the manifest."""
    data = config["data"]
    require(bool(data["input"]), "data.input", data["input"], "proteins or a raw store")
    with Progress("ingesting", 100, unit="%") as progress, as_keys("data"):
        manifest = prepare(
            data["input"],
            Path(data["prepared_dir"]),
            reading=settings(Reading, data, "data"),
            min_residues=data["min_residues"],
            max_residues=data["max_residues"],
            split=settings(SplitSettings, data, "data", seed="split_seed"),
            clustering=settings(ClusterSettings, data, "data", "cluster_"),
            search=settings(SearchSettings, data, "data", "search_"),
            relatives_sensitivity=data["relatives_sensitivity"],
            resources=resources(config),
            keep=data["keep_prepared"],
            report=log.info,
            progress=progress.update_share,
        )
    with tracked_run(config, "prepare") as tracked:
        log_data(tracked, Path(data["prepared_dir"]), {})
        if not Path(config["model_dir"]).is_dir():  # the description of a model is kept
            describe(tracked, config)
    counts = manifest["counts"]
    amounts = (
        f"{split} {counts[f'{split}_sequences']:,} sequences in {counts[f'{split}_clusters']:,} "
        "clusters"
        for split in manifest["digests"]
    )
    done(f"prepared {data['prepared_dir']}: {', '.join(amounts)}")
    return manifest


def resources(config: Config) -> Resources:
    """The threads, memory and disk of the `data` section for MMseqs2."""
    return settings(Resources, config["data"], "data")


def settings(
    kind: type[Settings],
    values: dict[str, Any],
    section: str | None = None,
    prefix: str = "",
    **renamed: str,
) -> Settings:
    """The dataclass `kind`, each field from the key of its name after `prefix`.

    Args:
        values: of the section.
        section: its name, for errors; None for the configuration itself.
        **renamed: field → key, of those that differ in another way.

    Raises:
        ConfigError: for an impossible value, by its key.
    """
    keys = {
        field.name: renamed.get(field.name, prefix + field.name)
        for field in fields(kind)  # type: ignore[arg-type]  # a dataclass
    }
    full = {name: f"{section}.{key}" if section else key for name, key in keys.items()}
    with as_keys(section or "", full):
        return kind(**{name: values[key] for name, key in keys.items()})
