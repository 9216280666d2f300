"""`SequenceStore`: tokenised proteins on disk, read at random by index.

A store is a folder: `data.mdb` (LMDB with two databases, `sequences` and `names`, both keyed by the
8-byte big-endian index), `lengths.npy`, optionally `clusters.npy`, and `manifest.json`. LMDB gives
zero-copy random reads shared by all processes of a machine; the price is that nothing can be added
to a finished store. The manifest is written last and the folder renamed last, so a half-written
store is never taken for a whole one.
"""

import hashlib
import json
import os
import shutil
import struct
import threading
import weakref
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import lmdb
import numpy as np
from numpy.typing import ArrayLike, NDArray

from d2plm.alphabet import TOKENS
from d2plm.errors import DataError

FORMAT_VERSION = 1

_DATA, _LENGTHS, _CLUSTERS, _MANIFEST = "data.mdb", "lengths.npy", "clusters.npy", "manifest.json"
_SEQUENCES, _NAMES = b"sequences", b"names"
_KEY = struct.Struct(">Q")
_BATCH_RECORDS, _BATCH_BYTES = 4096, 16 << 20
_FIRST_MAP_BYTES = 64 << 20


class SequenceStore:
    """A finished store, read-only; may be forked and pickled, and shared between threads.

    `store[i]` is sequence i as a fresh uint8 array [L] of residue tokens, without `<cls>` and
    `<eos>`. LMDB is opened at the first read and again in each process that uses the store.

    Attributes:
        path: the folder.
        manifest: format version, kind, counts, alphabet, digest, free `provenance`.
        lengths: int32 [N], residues of each sequence, memory mapped.
        clusters: int32 [N], homology cluster of each sequence, memory mapped; None if not known.

    Raises:
        DataError: the folder is no store, is half-written or damaged, or has another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._environment: _Environment | None = None
        with self._reading():
            self.manifest = _read_manifest(self.path)
            self.lengths = self._load(_LENGTHS)
            self.clusters = self._load(_CLUSTERS) if (self.path / _CLUSTERS).exists() else None
            # LMDB maps the file: reading a truncated one would end the process with SIGBUS.
            if _size(self.path / _DATA) != self.manifest["data_bytes"]:
                raise DataError(f"{self.path / _DATA}: {_DAMAGED}")

    @property
    def digest(self) -> str:
        """SHA-256 over (length as 8 bytes big-endian, tokens) of each sequence in order, in hex."""
        return self.manifest["digest"]

    @property
    def residues(self) -> int:
        """Residues of all sequences together."""
        return self.manifest["residues"]

    def __len__(self) -> int:
        return self.manifest["sequences"]

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        environment, key = self._open(), self._key(index)
        with self._reading(), environment.lmdb.begin(environment.sequences, buffers=True) as read:
            return np.frombuffer(_found(read.get(key)), dtype=np.uint8).copy()

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]  # opens the store anew

    def name(self, index: int) -> str:
        """The first word of sequence `index`'s FASTA header."""
        environment, key = self._open(), self._key(index)
        with self._reading(), environment.lmdb.begin(environment.names) as read:
            return _found(read.get(key)).decode()

    def verify(self) -> None:
        """Read everything and compare counts, lengths and digest with the manifest.

        Raises:
            DataError: they differ, or something cannot be read.
        """
        digest, residues = hashlib.sha256(), 0
        for index, tokens in enumerate(self):
            if len(tokens) != self.lengths[index]:
                raise DataError(
                    f"{self.path}: sequence {index} has {len(tokens)} residues where {_LENGTHS} "
                    f"says {self.lengths[index]}; prepare the data again"
                )
            residues += len(tokens)
            _add_to_digest(digest, tokens.tobytes())
        environment = self._open()
        with self._reading(), environment.lmdb.begin() as read:
            stored = read.stat(environment.sequences)["entries"]
            named = read.stat(environment.names)["entries"]
        found = (stored, named, residues, digest.hexdigest())
        if found != (len(self), len(self), self.residues, self.digest):
            raise DataError(
                f"{self.path}: the sequences are not those of {_MANIFEST} ({stored} sequences, "
                f"{residues} residues, digest {found[-1][:12]}… instead of {len(self)}, "
                f"{self.residues}, {self.digest[:12]}…); prepare the data again"
            )

    def _load(self, file: str) -> NDArray[np.int32]:
        path = self.path / file
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: cannot be read ({error}); prepare the data again") from None
        if values.shape != (len(self),) or values.dtype != np.int32:
            raise DataError(f"{path}: {_DAMAGED}")
        return values

    def _key(self, index: int) -> bytes:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"{self.path}: no sequence {index} among {len(self)}")
        return _KEY.pack(position)

    def _open(self) -> "_Environment":
        if self._environment is None or self._environment.pid != os.getpid():
            with self._reading():
                self._environment = _Environment.of(self.path)
        return self._environment

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (lmdb.Error, KeyError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path / _DATA}: {_DAMAGED} ({error})") from None
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot be read ({error.strerror}); check the path, its permissions "
                "and the disk"
            ) from None


class SequenceStoreWriter:
    """Writes a store into `<path>.partial` and puts it in place when the `with` block ends well.

    On an exception the partial folder is removed and a store that was at `path` stays as it was.
    Records go to disk in batches; memory is bounded but for the lengths (4 bytes a sequence).

    Args:
        path: the store's folder; an existing store there is replaced, anything else refused.
        kind: what the store holds: "raw", "train", "validation", …
        provenance: anything JSON can hold, kept in the manifest.

    Attributes:
        provenance: may still be changed until the block ends.

    Raises:
        DataError: the folder cannot be written, the disk is full, or no sequence was appended.
    """

    def __init__(self, path: Path, kind: str, provenance: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.kind = kind
        self.provenance = dict(provenance or {})
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._lengths = array("i")
        self._clusters: NDArray[np.int32] | None = None
        self._digest = hashlib.sha256()
        self._batch: list[tuple[bytes, bytes, bytes]] = []
        self._batch_bytes = 0

    def __enter__(self) -> Self:
        with self._writing():
            self._refuse_foreign_folder()
            if self._partial.exists():
                shutil.rmtree(self._partial)
            self._partial.mkdir(parents=True)
            self._environment = lmdb.open(
                str(self._partial),
                map_size=_FIRST_MAP_BYTES,
                max_dbs=2,
                lock=False,
                sync=False,
            )
            self._sequences = self._environment.open_db(_SEQUENCES)
            self._names = self._environment.open_db(_NAMES)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._environment.close()
            shutil.rmtree(self._partial, ignore_errors=True)

    def append(self, name: str, tokens: NDArray[np.uint8]) -> None:
        """Add a sequence: its name and its residue tokens, uint8 [L] with L ≥ 1."""
        if tokens.dtype != np.uint8 or tokens.ndim != 1 or not len(tokens):
            raise DataError(
                f"{self.path}: sequence {name!r} must be a non-empty uint8 array [L], "
                f"not {tokens.dtype} {list(tokens.shape)}"
            )
        value = tokens.tobytes()
        self._batch.append((_KEY.pack(len(self._lengths)), value, name.encode()))
        self._batch_bytes += len(value)
        self._lengths.append(len(value))
        _add_to_digest(self._digest, value)
        if len(self._batch) >= _BATCH_RECORDS or self._batch_bytes >= _BATCH_BYTES:
            self._commit()

    def set_clusters(self, clusters: ArrayLike) -> None:
        """Give the homology cluster of every sequence, integers [N]."""
        self._clusters = np.asarray(clusters, dtype=np.int32)

    def _commit(self) -> None:
        with self._writing():
            while True:
                try:
                    with self._environment.begin(write=True) as transaction:
                        for key, value, name in self._batch:
                            transaction.put(key, value, db=self._sequences, append=True)
                            transaction.put(key, name, db=self._names, append=True)
                    break
                except lmdb.MapFullError:
                    self._environment.set_mapsize(2 * self._environment.info()["map_size"])
        self._batch.clear()
        self._batch_bytes = 0

    def _finish(self) -> None:
        lengths = np.array(self._lengths, dtype=np.int32)
        if not len(lengths):
            raise DataError(f"{self.path}: no sequence to write; check the input and its filters")
        if self._clusters is not None and self._clusters.shape != lengths.shape:
            raise DataError(
                f"{self.path}: {self._clusters.size} clusters for {len(lengths)} sequences; "
                "give one cluster a sequence"
            )
        self._commit()
        with self._writing():
            self._environment.sync(True)
            self._environment.close()
            np.save(self._partial / _LENGTHS, lengths)
            if self._clusters is not None:
                np.save(self._partial / _CLUSTERS, self._clusters)
            manifest = {
                "format": "d2plm.SequenceStore",
                "format_version": FORMAT_VERSION,
                "kind": self.kind,
                "sequences": len(lengths),
                "residues": int(lengths.sum(dtype=np.int64)),
                "digest": self._digest.hexdigest(),
                "data_bytes": (self._partial / _DATA).stat().st_size,
                "alphabet": list(TOKENS),
                "provenance": self.provenance,
            }
            (self._partial / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            for file in self._partial.iterdir():
                _flush_to_disk(file)
            _replace_folder(self._partial, self.path)

    def _refuse_foreign_folder(self) -> None:
        if not self.path.exists() or (self.path / _MANIFEST).is_file():
            return
        if not self.path.is_dir() or any(self.path.iterdir()):
            raise DataError(
                f"{self.path}: exists and is no sequence store, so it is not overwritten; "
                "choose another folder or remove it"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (lmdb.Error, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise DataError(
                f"{self.path}: the store cannot be written ({reason}); check the folder, its "
                "permissions and the free space"
            ) from error


class _Environment:
    """An open LMDB environment, one per file and process.

    LMDB refuses to open a file twice in a process, so stores of the same folder share one. After a
    fork the child's copy counts as open, too: it is closed there and opened anew.
    """

    _open: ClassVar["weakref.WeakValueDictionary[tuple[int, int], _Environment]"] = (
        weakref.WeakValueDictionary()
    )
    _lock = threading.Lock()

    def __init__(self, path: Path) -> None:
        self.pid = os.getpid()
        self.lmdb = lmdb.open(
            str(path),
            readonly=True,
            lock=False,
            readahead=False,
            subdir=True,
            create=False,
            max_dbs=2,
        )
        self.sequences = self.lmdb.open_db(_SEQUENCES, create=False)
        self.names = self.lmdb.open_db(_NAMES, create=False)

    @classmethod
    def of(cls, path: Path) -> "_Environment":
        """The environment of this store in this process."""
        status = os.stat(path / _DATA)
        file = status.st_dev, status.st_ino
        with cls._lock:
            environment = cls._open.get(file)
            if environment is not None and environment.pid != os.getpid():
                environment.lmdb.close()
                environment = None
            if environment is None:
                environment = cls._open[file] = cls(path)
            return environment


_DAMAGED = "damaged or not written by D2PLM; prepare the data again"


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise DataError(f"{path}: no such sequence store; check the path or run d2plm prepare")
    file = path / _MANIFEST
    if not file.is_file():
        raise DataError(
            f"{path}: no sequence store, or one whose writing was broken off ({_MANIFEST} is "
            "missing); prepare the data again"
        )
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({error}); prepare the data again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != "d2plm.SequenceStore":
        raise DataError(f"{file}: is not the manifest of a sequence store; check the path")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{file}: format version {manifest.get('format_version')}, but this D2PLM reads "
            f"{FORMAT_VERSION}; prepare the data again"
        )
    counts = [manifest.get(key) for key in ("sequences", "residues", "data_bytes")]
    if not all(isinstance(count, int) for count in counts) or "digest" not in manifest:
        raise DataError(f"{file}: {_DAMAGED}")
    if manifest.get("alphabet") != list(TOKENS):
        raise DataError(f"{file}: written with another alphabet; prepare the data again")
    return manifest


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _found(value: Any) -> Any:
    if value is None:
        raise KeyError("a sequence is missing")
    return value


def _add_to_digest(digest: Any, tokens: bytes) -> None:
    digest.update(_KEY.pack(len(tokens)))
    digest.update(tokens)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_folder(source: Path, destination: Path) -> None:
    """Rename a folder over another, which a single rename cannot do unless that one is empty."""
    previous = destination.with_name(destination.name + ".previous")
    shutil.rmtree(previous, ignore_errors=True)
    if destination.exists():
        os.replace(destination, previous)
    os.replace(source, destination)
    shutil.rmtree(previous, ignore_errors=True)
