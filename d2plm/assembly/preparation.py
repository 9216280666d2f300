"""Preparing the configured data, and checks before a pipeline's first step."""

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from d2plm.assembly.tracked_run import describe, log_data, tracked_run
from d2plm.core.errors import ConfigError, DataError, require, within
from d2plm.core.files import RUN_CONFIG, shipped
from d2plm.core.number_text import counted
from d2plm.core.progress import Progress
from d2plm.core.terminal import done
from d2plm.core.vocabulary import Vocabulary, vocabulary
from d2plm.data.prepare import prepare
from d2plm.settings.commands import PipelineSettings
from d2plm.settings.data import Reading, Resources, SplitSettings, TextSettings, VocabularySettings
from d2plm.settings.schema import part

log = logging.getLogger(__name__)


def prepare_data(config: PipelineSettings, runs: Iterable[str] = ()) -> dict[str, Any]:
    """Prepare the data, log them to the tracking run, and return the manifest.

    Args:
        runs: output folders of training runs on these data; default: the configured one.

    Raises:
        DataError: if the data of a training run would be replaced, unless trainer.resume=none.
    """
    data, replaced = config.data, list[Path]()

    def keep_for_runs(changed: str) -> None:
        own = [Path(one) for one in runs or (config.output_dir,)]
        trained = [one for one in own if (one / RUN_CONFIG).is_file()]
        trained += [one for one in _trained_on(config) if one not in trained]
        named = counted(len(trained), "run")
        if trained and config.trainer.resume != "none":
            raise DataError(
                f"{data.prepared_dir}: {changed} changed since the run in {trained[0]} "
                f"({named} used these data); to keep the data, undo the change or set "
                "data.keep_prepared=true; to train anew, set another work_dir, or "
                "trainer.resume=none, which replaces the data of all these runs"
            )
        if trained and not replaced:
            log.warning("replacing the data of %s: %s", named, ", ".join(map(str, trained)))
            replaced.extend(trained)

    require(bool(data.input), "data.input", data.input, "proteins or a raw store")
    assert data.input is not None
    require_fitting_window(config)
    with Progress("ingesting", 100, unit="%") as progress, within("data"):
        manifest = prepare(
            data.input,
            Path(data.prepared_dir),
            vocabulary=build_vocabulary(data),
            window=data.window,
            reading=part(Reading, data),
            min_residues=data.min_residues,
            max_residues=data.max_residues,
            split=part(SplitSettings, data),
            clustering=data.cluster,
            search=data.search,
            text=part(TextSettings, data),
            relatives_sensitivity=data.relatives_sensitivity,
            resources=part(Resources, data),
            keep=data.keep_prepared,
            report=log.info,
            progress=progress.update_share,
            replacing=keep_for_runs,
        )
    with tracked_run(config, "prepare") as tracked:
        log_data(tracked, Path(data.prepared_dir), {})
        if not Path(config.model_dir).is_dir():  # keeps the description of an existing model
            describe(tracked, config)
    counts = manifest["counts"]
    amounts = (
        f"{split} {counted(counts[f'{split}_sequences'], 'sequence')} in "
        f"{counted(counts[f'{split}_clusters'], 'cluster')}"
        for split in manifest["digests"]
    )
    done(f"prepared {data.prepared_dir}: {', '.join(amounts)}")
    return manifest


def _trained_on(config: PipelineSettings) -> list[Path]:
    """Folders of runs beside the prepared data, or in the work folder, that used these data."""
    import yaml

    folder = Path(config.data.prepared_dir)
    target, found = os.path.realpath(folder), set()
    unreadable = (OSError, ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError)
    for parent in {Path(config.work_dir), folder.parent}:
        places = ("*", "*/*", "multirun/*/*")
        for file in (file for place in places for file in parent.glob(f"{place}/{RUN_CONFIG}")):
            with suppress(*unreadable):
                data = yaml.safe_load(file.read_text())["data"]
                used = [data["prepared_dir"]]
                used += [one["prepared_dir"] for one in (data.get("mixture") or {}).values()]
                # A relative path may be from another working directory.
                if any(
                    os.path.realpath(one) == target or target.endswith(f"/{Path(one)}")
                    for one in used
                ):
                    found.add(file.parent)
    return sorted(found)


def build_vocabulary(settings: VocabularySettings) -> Vocabulary:
    """Build the vocabulary; raises `DataError` if its tokenizer cannot be read."""
    return vocabulary(
        settings.alphabet,
        tokenizer=None if settings.tokenizer is None else shipped(settings.tokenizer),
    )


def require_fitting_window(config: PipelineSettings) -> None:
    """Raise `ConfigError` if training would crop the windows into which sequences are cut."""
    window, longest = config.data.window, config.data.max_length
    limit = "data.max_length"
    if longest is None and config.init_from is None:  # otherwise the weights decide
        limit = "model.max_position_embeddings"
        longest = config.model.max_position_embeddings
    if window is not None and longest is not None:
        wanted = f"at most {limit} - 2 = {longest - 2}, as <cls> and <eos> take two tokens"
        require(window <= longest - 2, "data.window", window, wanted)


def require_fitting_relatives(config: PipelineSettings) -> None:
    """Raise `ConfigError` if later steps of a pipeline would reject the relatives.

    It must not import torch, which the image of the first step lacks.
    """
    if config.generation.relatives is not None and config.data.alphabet != "protein":
        raise ConfigError(
            f"is a family of proteins, and data.alphabet is {config.data.alphabet}; set "
            "generation.relatives=null",
            {"generation.relatives": config.generation.relatives},
        )
    if config.init_from is not None:  # the weights decide
        return
    width, paradigm = config.model.relatives_dim, config.paradigm
    takes = getattr(paradigm, "source", "mask") != "uniform"
    takes = takes and not getattr(paradigm, "shift", False)
    if width is not None and not takes:
        raise ConfigError(
            f"{paradigm.name} does not support relatives with the uniform source or shift=true; "
            f"set model.relatives_dim=null data.max_relatives=null",
            {"model.relatives_dim": width},
        )


def resources(config: PipelineSettings) -> Resources:
    return part(Resources, config.data)
