"""Checkpoints: everything a run needs to go on as if it had never stopped.

A checkpoint is a folder `step-00001234`: tensors by `torch.distributed.checkpoint`, and a
`manifest.json`, written last, with the run's progress and the digest of every file. It is written
under another name and renamed when complete; what is loaded is the newest whole one.
"""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from d2plm.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1

log = logging.getLogger(__name__)


def save(
    root: Path, step: int, tensors: dict[str, Any], progress: dict[str, Any], *, keep: int = 3
) -> Path:
    """Write the checkpoint of `step` into `root` and drop all but the newest `keep`.

    Args:
        tensors: nested dictionary of tensors.
        progress: what else there is to remember; JSON.

    Raises:
        CheckpointError: when it cannot be written; older checkpoints are untouched.
    """
    final = root / f"step-{step:08d}"
    partial = final.with_suffix(".partial")
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        dcp.save(tensors, checkpoint_id=partial, no_dist=True)
        digests = {file.name: _digest(file) for file in sorted(partial.iterdir())}
        manifest = {"format_version": FORMAT_VERSION, "progress": progress, "files": digests}
        manifest["digest"] = _content_digest(manifest)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
        _remove(final)
        os.replace(partial, final)
    except (OSError, dcp.CheckpointException) as error:
        _remove(partial)
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}; free space or choose another output_dir"
        ) from error
    for old in list_checkpoints(root)[:-keep]:
        _remove(old)
    return final


def load(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill `tensors` in place from a checkpoint that `verify` has found whole.

    Raises:
        CheckpointError: if it is of another model.
    """
    try:
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    except (OSError, RuntimeError, ValueError, dcp.CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint {folder} does not fit this model ({_first_line(error)}); use the settings "
            "that it was made with, or resume=none"
        ) from error


def verify(folder: Path) -> dict[str, Any]:
    """The progress in a whole checkpoint's manifest.

    Raises:
        CheckpointError: if a file is missing or differs from its digest.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {folder} has format version {manifest['format_version']}, not "
                f"{FORMAT_VERSION}: resume it with the d2plm that wrote it"
            )
        if manifest.pop("digest") != _content_digest(manifest):
            raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} was changed")
        for name, digest in manifest["files"].items():
            if _digest(folder / name) != digest:
                raise CheckpointError(f"checkpoint {folder} is damaged: {name} was changed")
        return manifest["progress"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder} is not a whole checkpoint ({error}); choose another one"
        ) from error


def newest_whole(root: Path) -> Path | None:
    """The newest whole checkpoint in `root`; each damaged one passed over is named in the log."""
    for folder in reversed(list_checkpoints(root)):
        try:
            verify(folder)
        except CheckpointError as error:
            log.warning("%s; trying the one before", error)
        else:
            return folder
    return None


def set_aside(root: Path, beyond: int = -1) -> None:
    """Move the checkpoints of steps after `beyond` to `<root>.old`: the run goes another way."""
    old = root.with_name(root.name + ".old")
    for folder in list_checkpoints(root):
        if int(folder.name.removeprefix("step-")) > beyond:
            old.mkdir(exist_ok=True)
            _remove(old / folder.name)
            os.replace(folder, old / folder.name)
            log.info("moved %s to %s: it is not of the run that begins now", folder.name, old)


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoint folders in `root`, oldest first."""
    return sorted(folder for folder in root.glob("step-*") if folder.suffix != ".partial")


def _content_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
