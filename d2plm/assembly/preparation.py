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
from d2plm.data.homology import ClusterSettings, SearchSettings
from d2plm.data.prepare import Resources, prepare
from d2plm.data.sources import Reading
from d2plm.data.split import SplitSettings

T = TypeVar("T")

log = logging.getLogger(__name__)


def prepare_data(config: Config) -> dict[str, Any]:
    """Prepare the data, log them to the tracking run, and return the manifest."""
    data = config["data"]
    require(bool(data["input"]), "data.input", data["input"], "proteins or a raw store")
    with as_keys("data", {"seed": "data.split_seed"}):
        split = SplitSettings(
            validation_fraction=data["validation_fraction"],
            test_fraction=data["test_fraction"],
            validation_ids=data["validation_ids"],
            test_ids=data["test_ids"],
            exclude_homologs_of=tuple(data["exclude_homologs_of"]),
            search_directions=data["search_directions"],
            seed=data["split_seed"],
        )
    with as_keys("data"), Progress("ingesting", 100, unit="%") as progress:
        manifest = prepare(
            data["input"],
            Path(data["prepared_dir"]),
            reading=reading(data),
            min_residues=data["min_residues"],
            max_residues=data["max_residues"],
            split=split,
            clustering=_settings(ClusterSettings, data, "cluster_"),
            search=_settings(SearchSettings, data, "search_"),
            resources=resources(config),
            keep=data["keep_prepared"],
            report=log.info,
            progress=progress.update_share,
        )
    with tracked_run(config, "prepare") as tracked:
        log_data(tracked, Path(data["prepared_dir"]), {})
        if not Path(config["model_dir"]).is_dir():  # what is said of a model stays
            describe(tracked, config)
    done(f"prepared {data['prepared_dir']}: {_amounts(manifest)}")
    return manifest


def _settings(settings: type[T], data: dict[str, Any], prefix: str) -> T:
    """Build a settings class from the keys of its fields after `prefix`."""
    names = [field.name for field in fields(settings)]  # type: ignore[arg-type]  # a dataclass
    with as_keys("data", {name: f"data.{prefix}{name}" for name in names}):
        return settings(**{name: data[prefix + name] for name in names})


def _amounts(manifest: dict[str, Any]) -> str:
    """How much is in each split, in words."""
    counts = manifest["counts"]
    return ", ".join(
        f"{split} {counts[f'{split}_sequences']:,} sequences in {counts[f'{split}_clusters']:,} "
        "clusters"
        for split in manifest["digests"]
    )


def resources(config: Config) -> Resources:
    """What the `data` section lets MMseqs2 use."""
    data = config["data"]
    with as_keys("data"):
        return Resources(data["threads"], data["memory_limit"], data["temporary_dir"])


def reading(settings: dict[str, Any]) -> Reading:
    """How inputs are read, from the settings of that name."""
    return Reading(
        settings["format"],
        settings["sequence_field"],
        settings["name_field"],
        settings["on_illegal"],
    )
