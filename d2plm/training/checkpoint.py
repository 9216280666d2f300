"""Checkpoints: everything that a run needs to continue as if it had not been interrupted.

A checkpoint is a folder `step-00001234`: tensors by `torch.distributed.checkpoint`, each rank its
own shards, and a `manifest.json`, written last, with the state of the run and the digest of every
file. The state is copied and written by a thread while training continues, under a temporary name
until it is complete. The newest complete checkpoint is loaded, by any number of ranks. The root is
a local folder or any fsspec URL.
"""

import hashlib
import json
import logging
import math
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, cast

import fsspec  # type: ignore[import-untyped]  # ships no types
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.dirfs import DirFileSystem  # type: ignore[import-untyped]
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from d2plm.core.errors import CheckpointError, first_line
from d2plm.core.waiting import waiting
from d2plm.data.cache import digest_of
from d2plm.training.checkpoint_metadata import read_metadata
from d2plm.training.distributed import Process
from d2plm.training.shards import local, sharded_like

MANIFEST, METADATA = "manifest.json", ".metadata"
FORMAT_VERSION = 3
PARTIAL = ".partial"
_ERRORS = (Exception, dcp.CheckpointException)  # the latter is not an Exception

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose

log = logging.getLogger(__name__)

# Nested dictionaries of tensors by name.
Tensors = Mapping[str, Any]
Layout = list[tuple[tuple[str, ...], TensorStorageMetadata]]


class Root:
    """A place for checkpoints: a local folder, or an fsspec URL (`s3://bucket/run/checkpoints`).

    Raises:
        CheckpointError: if the location cannot be reached.
    """

    def __init__(self, location: str) -> None:
        self.location = str(location).rstrip("/")
        self.is_local = "://" not in self.location
        try:
            files, self.path = fsspec.core.url_to_fs(self.location)
            files.invalidate_cache()
        except (ImportError, ValueError, OSError) as error:
            raise CheckpointError(
                f"{self.location}: no checkpoints can be kept there ({_reason(error)}); use a "
                "folder, or a URL whose fsspec package is installed"
            ) from error
        self.files = DirFileSystem(self.path, files)  # paths are relative to the root

    def names(self, suffix: str = "") -> list[str]:
        """Names of the complete checkpoints, or of those with `suffix`, oldest first.

        Raises:
            CheckpointError: if the root exists but cannot be read.
        """
        try:
            found = self.files_in("")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"{self.location}: cannot be listed ({_reason(error)}); make it readable, or "
                "choose another output_dir"
            ) from error
        return [name for name in found if re.fullmatch(rf"step-\d+{re.escape(suffix)}", name)]

    def files_in(self, name: str) -> list[str]:
        """The sorted names in a checkpoint, or in the root itself."""
        self.files.invalidate_cache(name)
        entries = self.files.ls(name, detail=False)
        return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in entries)

    def remove(self, name: str) -> None:
        """Delete a checkpoint, its manifest first, so that a part never counts as complete."""
        try:
            if self.files.exists(f"{name}/{MANIFEST}"):
                self.files.rm_file(f"{name}/{MANIFEST}")
            if self.files.exists(name):
                self.files.rm(name, recursive=True)
        except Exception as error:  # any file system's; later runs ignore leftover files
            log.warning("cannot remove checkpoint %s: %s", self.of(name), error)

    def of(self, name: str) -> str:
        return f"{self.location}/{name}"

    def rename(self, name: str, to: str) -> None:
        """Rename a checkpoint; atomically on a file system, by copies in an object store."""
        if self.is_local:
            os.rename(self.of(name), self.of(to))  # `mv` would move into an existing folder
        else:
            self.files.mv(name, to, recursive=True)

    def move(self, name: str, other: "Root") -> None:
        """Move a checkpoint to another root on the same file system."""
        self.files.fs.makedirs(other.path, exist_ok=True)
        other.remove(name)
        self.files.fs.mv(f"{self.path}/{name}", f"{other.path}/{name}", recursive=True)

    def digest(self, name: str, file: str) -> str:
        with self.files.open(f"{name}/{file}", "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def write(self, name: str, file: str, text: str) -> None:
        """Write a text file of a checkpoint; synchronised on a local disk."""
        with self.files.open(f"{name}/{file}", "w") as stream:
            stream.write(text)
            if self.is_local:
                stream.flush()
                os.fsync(stream.fileno())


class Saver:
    """Writes the checkpoints of a run, one at a time, while training continues.

    Every method except `failed` is called by all ranks at the same step.

    Args:
        keep: number of newest checkpoints to keep.
        keep_best: number of checkpoints with the lowest `monitored` value to keep in addition.
    """

    def __init__(self, root: Root, process: Process, keep: int = 3, keep_best: int = 0) -> None:
        self.root, self.process, self.keep, self.keep_best = root, process, keep, keep_best
        self.group = process.new_host_group()
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def save(self, step: int, tensors: Tensors, run_state: dict[str, Any]) -> str:
        """Copy `tensors` and start writing them; returns the checkpoint's future location.

        Args:
            run_state: all other state, as JSON; its `monitored` value ranks the checkpoint.

        Raises:
            CheckpointError: if the previous save, which is waited for, failed.
        """
        self.wait()
        name = name_of(step)
        staged, run_state = self._staged(tensors), json.loads(json.dumps(run_state))
        self._thread = threading.Thread(
            target=self._write, args=(name, staged, run_state), name="checkpoint"
        )
        self._thread.start()
        return self.root.of(name)

    @property
    def failed(self) -> bool:
        """Whether the save in progress is known on this rank to have failed."""
        return self._error is not None

    def wait(self) -> None:
        """Wait for the save in progress; raises CheckpointError if it failed."""
        self.finish()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait for the save in progress, even if it fails."""
        if self._thread is not None:
            with waiting(f"a checkpoint to be written to {self.root.location}"):
                self._thread.join()
            self._thread = None

    def _staged(self, tensors: Tensors, path: tuple[str, ...] = ()) -> dict[str, Any]:
        """A copy in host memory, which training does not change; its buffers are reused."""
        staged: dict[str, Any] = {}
        for key, value in tensors.items():
            place = (*path, key)
            if isinstance(value, Mapping):
                staged[key] = self._staged(value, place)
                continue
            shard = local(value).detach()
            buffer = self._buffers.get(place)
            if buffer is None or buffer.shape != shard.shape or buffer.dtype != shard.dtype:
                pinned = shard.device.type == "cuda"
                buffer = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=pinned)
                self._buffers[place] = buffer
            buffer.copy_(shard)
            staged[key] = sharded_like(buffer, value, self.process.host_mesh)
        return staged

    def _write(self, name: str, staged: dict[str, Any], run_state: dict[str, Any]) -> None:
        partial = name + PARTIAL
        writer = dcp.FileSystemWriter if self.root.is_local else FsspecWriter

        def begin() -> None:
            self.root.remove(partial)
            self.root.files.makedirs(partial, exist_ok=True)

        try:
            self.process.on_main(begin, self.group)
            dcp.save(
                staged,
                storage_writer=writer(self.root.of(partial)),
                process_group=self.group,
                no_dist=self.group is None,
            )
            digests = self._digests(partial)
            self.process.on_main(
                lambda: self._publish(partial, name, digests, run_state), self.group
            )
        except _ERRORS as error:  # passed to the training thread
            self._error = CheckpointError(
                f"cannot write checkpoint {self.root.of(name)}: {_reason(error)}; free space "
                "or choose another output_dir"
            )
            if self.process.is_main:
                self.root.remove(partial)

    def _digests(self, partial: str) -> dict[str, str]:
        """{file: digest} of all ranks' files; each rank reads back its own."""
        rank = self.process.rank

        def of_own_files() -> dict[str, str]:
            return {
                file: self.root.digest(partial, file)
                for file in self.root.files_in(partial)
                if file.startswith(f"__{rank}_") or (rank == 0 and file == METADATA)
            }

        parts = self.process.on_all(of_own_files, self.group)
        return {file: digest for part in parts for file, digest in part.items()}

    def _publish(
        self, partial: str, name: str, digests: dict[str, str], run_state: dict[str, Any]
    ) -> None:
        missing = sorted(digests.keys() - set(self.root.files_in(partial)))
        if missing:
            raise CheckpointError(
                f"rank 0 does not see {', '.join(missing)}, which other ranks wrote: the folder "
                "must be one that all machines share"
            )
        manifest = {"format_version": FORMAT_VERSION, "run_state": run_state, "files": digests}
        manifest["digest"] = digest_of(manifest)
        self.root.write(partial, MANIFEST, json.dumps(manifest, indent=2))
        self.root.remove(name)
        self.root.rename(partial, name)
        self._prune()

    def _prune(self) -> None:
        names = self.root.names()
        ranked = []
        for name in names if self.keep_best else ():
            with suppress(CheckpointError):
                value = manifest(self.root, name)["run_state"].get("monitored")
                if value is not None and math.isfinite(value):
                    ranked.append((float(value), name))
        best = {name for _, name in sorted(ranked)[: self.keep_best]}
        for name in names[: -self.keep]:
            if name not in best:
                self.root.remove(name)


@contextmanager
def fitting(location: str) -> Iterator[None]:
    """Convert any exception in the block to a CheckpointError that names the checkpoint."""
    try:
        yield
    except _ERRORS as error:  # loading raises many types of errors
        raise CheckpointError(
            f"checkpoint {location} does not fit this model ({_reason(error)}); use the settings "
            "that it was made with, or resume=none"
        ) from error


def layout(root: Root, name: str) -> Layout:
    """The path, size and dtype of each tensor in a checkpoint."""
    metadata = _Reader(root, name).read_metadata()
    entries = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
    return [(metadata.planner_data[key], entry) for key, entry in entries.items()]


def load(root: Root, name: str, tensors: dict[str, Any]) -> None:
    """Fill `tensors` in place from a verified checkpoint written by any number of ranks."""
    dcp.load(tensors, storage_reader=_Reader(root, name), no_dist=True)


def verify(root: Root, name: str) -> dict[str, Any]:
    """The run state of a checkpoint, after verifying all its files.

    Raises:
        CheckpointError: if a file is missing or differs from its digest.
    """
    content = manifest(root, name)
    for file, digest in content["files"].items():
        try:
            found = root.digest(name, file)
        except OSError as error:
            raise _not_whole(root, name, error) from error
        if found != digest:
            raise CheckpointError(f"checkpoint {root.of(name)} is damaged: {file} was changed")
    return content["run_state"]


def manifest(root: Root, name: str) -> dict[str, Any]:
    """The `files` (digests by name) and `run_state` of a checkpoint.

    Raises:
        CheckpointError: if it is missing, damaged or of another format.
    """
    try:
        content = json.loads(root.files.read_text(f"{name}/{MANIFEST}"))
        version, digest = content["format_version"], content.pop("digest")
        files, run_state = content["files"], content["run_state"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_whole(root, name, error) from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {root.of(name)} has format version {version}, not {FORMAT_VERSION}: "
            "resume it with the d2plm that wrote it"
        )
    if digest != digest_of(content):
        raise CheckpointError(f"checkpoint {root.of(name)} is damaged: {MANIFEST} was changed")
    return {"files": files, "run_state": run_state}


def newest_whole(root: Root, before: float = math.inf) -> str | None:
    """The newest complete checkpoint before a step, if any; damaged ones are skipped and logged."""
    for name in reversed(root.names()):
        if step_of(name) < before:
            try:
                verify(root, name)
            except CheckpointError as error:
                log.warning("%s; trying the one before", error)
            else:
                return name
    return None


def split_location(location: str) -> tuple[Root, str]:
    parent, slash, name = location.rstrip("/").rpartition("/")
    return Root(parent or slash or "."), name


def set_aside(root: Root, beyond: int = -1) -> None:
    """Move checkpoints of later steps, of another run, to `<root>.old`; delete incomplete ones."""
    for name in root.names(PARTIAL):
        root.remove(name)
    old = Root(root.location + ".old")
    for name in root.names():
        if step_of(name) > beyond:
            root.move(name, old)
            log.info("moved %s to %s: it is not of the run that begins now", name, old.location)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


class _Reader(FsspecReader):
    """Reads a checkpoint whose metadata are checked as they are read."""

    def __init__(self, root: Root, name: str) -> None:
        super().__init__(root.of(name))
        try:
            with root.files.open(f"{name}/{METADATA}", "rb") as stream:
                self._metadata = read_metadata(stream)
        except Exception as error:  # a damaged pickle raises anything
            raise _not_whole(root, name, error) from error

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


def _not_whole(root: Root, name: str, error: Exception) -> CheckpointError:
    reason = error if isinstance(error, OSError) else repr(error)  # an OSError names the file
    return CheckpointError(
        f"{root.of(name)} is not a whole checkpoint ({reason}); choose another one"
    )


def _reason(error: BaseException) -> str:
    """The first line of an error, for a `CheckpointException` that of the first rank."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error)[:300]
