"""`SequenceStore`: tokenised proteins on disk, read at random by index.

A store is a folder: `data.mdb` (LMDB), `lengths.npy`, `offsets.npy`, optionally `clusters.npy`, and
`manifest.json`. LMDB maps the file, so that all processes of a machine share one copy in memory and
a read costs no system call. A value holds the tokens of 1,024 sequences, which wastes less than one
per cent of the disk where a value for each would waste a fifth; the price is an array of offsets,
and that nothing can be added to a finished store. The manifest is written last and the folder
renamed last, so a half-written store is never taken for a whole one.
"""

import hashlib
import json
import logging
import os
import shutil
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Self, TypeVar

import lmdb
import numpy as np
from numpy.typing import ArrayLike, NDArray

from d2plm.core.alphabet import TOKENS
from d2plm.core.errors import DataError
from d2plm.core.files import nearest_path
from d2plm.data.records import ALIAS_SEPARATOR

FORMAT_VERSION = 2
BLOCK_SEQUENCES = 1024
MAX_RESIDUES = 1_000_000  # of a sequence: 1,024 of them must not exceed a 32-bit offset


_DATA, _MANIFEST = "data.mdb", "manifest.json"
_LENGTHS, _OFFSETS, _CLUSTERS = "lengths.npy", "offsets.npy", "clusters.npy"
_SEQUENCES, _NAMES = b"sequences", b"names"
_KEY = struct.Struct(">Q")
_COMMIT_BYTES = 1 << 20
_FIRST_MAP_BYTES = 64 << 20
_PASS_BYTES = 1 << 20  # mapped at a time in a pass over the store

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive sequences of a store, in memory.

    Attributes:
        first: index of the first of them.
        tokens: uint8 [M], their residue tokens one after another.
        bounds: int64 [n + 1], where each begins and ends in `tokens`.
    """

    first: int
    tokens: NDArray[np.uint8]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        bounds = self.bounds.tolist()
        return (self.tokens[a:b] for a, b in pairwise(bounds))


class SequenceStore:
    """A finished store, read-only; may be forked and pickled, and shared between threads.

    `store[i]` is sequence i as a fresh uint8 array [L] of residue tokens, without `<cls>` and
    `<eos>`. LMDB is opened without locks at the first read, and again in each process that uses
    the store.

    Attributes:
        path: the folder.
        manifest: format version, kind, counts, alphabet, digests, free `provenance`.
        lengths: int32 [N], residues of each sequence, memory mapped.
        clusters: int32 [N], homology cluster of each sequence, memory mapped; None if not known.

    Raises:
        DataError: the folder is no store, is half-written or damaged, or has another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._environment: _Environment | None = None
        self._names_read: tuple[int, list[bytes]] = -1, []
        with self._reading():
            self._file = _file_of(self.path / _DATA)
            self.manifest = _read_manifest(self.path)
            self.lengths = self._load(_LENGTHS, np.int32)
            self._offsets = self._load(_OFFSETS, np.uint32)
            has_clusters = "clusters" in self.manifest["digests"]
            self.clusters = self._load(_CLUSTERS, np.int32) if has_clusters else None
            # LMDB maps the file: reading a truncated one would end the process with SIGBUS.
            if _size(self.path / _DATA) != self.manifest["data_bytes"]:
                raise DataError(f"{self.path / _DATA}: {_DAMAGED}")

    @property
    def digest(self) -> str:
        """SHA-256 in hex over the lengths and tokens of all sequences in order, block by block."""
        return self.manifest["digests"]["sequences"]

    @property
    def residues(self) -> int:
        """Residues of all sequences together."""
        return self.manifest["residues"]

    def __len__(self) -> int:
        return self.manifest["sequences"]

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        if not 0 <= index < len(self.lengths):
            index = self._position(index)
        start, length = int(self._offsets[index]), int(self.lengths[index])
        environment = self._open()
        with environment.lock:
            view = self._view(environment, index // BLOCK_SEQUENCES)
            tokens = np.array(view[start : start + length])
        if len(tokens) != length:
            raise DataError(f"{self.path / _DATA}: {_DAMAGED}")
        return tokens

    def copy_into(
        self,
        row: NDArray[np.uint8],
        indices: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> None:
        """Copy a window of each of S sequences into `row`, with no array made for any of them.

        Args:
            row: uint8 [T], written to.
            indices: int64 [S], the sequences, each 0 ≤ i < N.
            starts, counts: int64 [S], first residue and number of residues of each window.
            places: int64 [S], where in `row` each window goes.

        Raises:
            DataError: the store is damaged.
        """
        environment = self._open()
        first = self._offsets[indices] + starts
        views, target = environment.views, row.data
        with environment.lock:
            try:
                for block, source, count, place in zip(
                    (indices // BLOCK_SEQUENCES).tolist(),
                    first.tolist(),
                    counts.tolist(),
                    places.tolist(),
                    strict=True,
                ):
                    view = views.get(block)
                    if view is None:
                        view = self._view(environment, block)
                    # Between memoryviews, as these refuse a shorter source and cost half as much.
                    target[place : place + count] = view[source : source + count]
            except ValueError:
                raise DataError(f"{self.path / _DATA}: {_DAMAGED}") from None

    def blocks(self) -> Iterator[Block]:
        """One pass over all sequences in order, in bounded memory and at the disk's full speed."""
        for number, tokens in enumerate(self._pass(_SEQUENCES, np.array)):
            first = number * BLOCK_SEQUENCES
            lengths = self.lengths[first : first + BLOCK_SEQUENCES]
            bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
            np.cumsum(lengths, out=bounds[1:])
            if bounds[-1] != len(tokens):
                raise DataError(
                    f"{self.path}: the sequences from {first} on have {len(tokens)} residues "
                    f"where {_LENGTHS} says {bounds[-1]}; prepare the data again"
                )
            yield Block(first, tokens, bounds)

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        return (tokens for block in self.blocks() for tokens in block)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "digest": self.digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]  # opens the store anew
        if self.digest != state["digest"]:
            raise DataError(f"{self.path}: {_REPLACED}")

    def names(self, index: int) -> list[str]:
        """The names (first words of FASTA headers) of sequence `index` and of its duplicates."""
        position = self._position(index)
        block = position // BLOCK_SEQUENCES
        number, names = self._names_read  # both at once, as another thread may change them
        if number != block:
            environment = self._open()
            with self._reading(), environment.lock:
                names = _names_in(environment.value(_NAMES, block))
            self._names_read = block, names
        self._check_names(block, names)
        name = names[position % BLOCK_SEQUENCES]
        return [alias.decode("utf-8", "replace") for alias in name.split(ALIAS_SEPARATOR)]

    def name(self, index: int) -> str:
        """The first of `names`."""
        return self.names(index)[0]

    def name_blocks(self) -> Iterator[list[bytes]]:
        """The names of the sequences of each of `blocks`, those of duplicates joined by \\x01."""
        for block, names in enumerate(self._pass(_NAMES, _names_in)):
            self._check_names(block, names)
            yield names

    def verify(self, progress: Callable[[int], None] = lambda done: None) -> None:
        """Read everything and compare counts, lengths and digests with the manifest.

        Args:
            progress: called with the number of sequences read so far.

        Raises:
            DataError: they differ, or something cannot be read.
        """
        digest, names_digest = hashlib.sha256(), hashlib.sha256()
        for block, names in zip(self.blocks(), self.name_blocks(), strict=True):
            window = slice(block.first, block.first + len(block))
            if not np.array_equal(self._offsets[window], block.bounds[:-1]):
                raise DataError(
                    f"{self.path}: {_OFFSETS} and {_LENGTHS} disagree from sequence {block.first} "
                    "on; prepare the data again"
                )
            _add_to_digest(digest, self.lengths[window], block.tokens.data)
            names_digest.update(_joined(names))
            progress(block.first + len(block))
        environment = self._open()
        with self._reading(), environment.lock:
            entries = [environment.entries(database) for database in (_SEQUENCES, _NAMES)]
        found = {"sequences": digest.hexdigest(), "names": names_digest.hexdigest()}
        if self.clusters is not None:
            found["clusters"] = _array_digest(self.clusters)
        residues = int(self.lengths.sum(dtype=np.int64))
        blocks = -(-len(self) // BLOCK_SEQUENCES)
        expected = self.manifest["digests"]
        wrong = [what for what in {**expected, **found} if expected.get(what) != found.get(what)]
        if wrong or residues != self.residues or entries != [blocks, blocks]:
            raise DataError(
                f"{self.path}: the {' and '.join(wrong) or 'counts'} are not those of {_MANIFEST}; "
                "prepare the data again"
            )

    def _load(self, file: str, dtype: Any) -> NDArray[Any]:
        path = self.path / file
        try:
            values = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # a damaged header may raise anything
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: cannot be read ({reason}); prepare the data again") from None
        if values.shape != (len(self),) or values.dtype != dtype:
            raise DataError(f"{path}: {_DAMAGED}")
        return values.view(np.ndarray)  # indexing the memmap class itself takes ten times as long

    def _position(self, index: int) -> int:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"{self.path}: no sequence {index} among {len(self)}")
        return position

    def _view(self, environment: "_Environment", block: int) -> memoryview:
        """The tokens of a block where they are mapped; valid while the caller holds the lock."""
        view = environment.views.get(block)
        if view is None:
            with self._reading():
                view = environment.views[block] = environment.value(_SEQUENCES, block)
        return view

    def _pass(self, database: bytes, read: Callable[[memoryview], T]) -> Iterator[T]:
        """What `read` copies out of the value of each block, in order."""
        environment, mapped = self._open(), _PASS_BYTES
        try:
            for block in range(-(-len(self) // BLOCK_SEQUENCES)):
                # What is mapped and was read counts as this process's memory until it is unmapped.
                if mapped >= _PASS_BYTES:
                    with self._reading():
                        environment.reopen(readahead=True)
                    mapped = 0
                with self._reading(), environment.lock:
                    value = environment.value(database, block)
                    mapped += len(value)
                    content = read(value)
                yield content
        finally:
            with self._reading():
                environment.reopen(readahead=False)

    def _check_names(self, block: int, names: list[bytes]) -> None:
        count = min(BLOCK_SEQUENCES, len(self) - block * BLOCK_SEQUENCES)
        if len(names) != count:
            raise DataError(
                f"{self.path / _DATA}: {_DAMAGED} ({len(names)} names for {count} sequences)"
            )

    def _open(self) -> "_Environment":
        if self._environment is None or self._environment.pid != os.getpid():
            with self._reading():
                self._environment = _Environment.of(self.path)
            if self._environment.file != self._file:
                self._environment = None
                raise DataError(f"{self.path}: {_REPLACED}")
        return self._environment

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (lmdb.Error, zlib.error, KeyError) as error:
            raise DataError(f"{self.path / _DATA}: {_DAMAGED} ({error})") from None
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot be read ({error.strerror}); check the path, its permissions "
                "and the disk"
            ) from None


class SequenceStoreWriter:
    """Writes a store into `<path>.partial` and puts it in place when the `with` block ends well.

    On an exception the partial folder is removed and a store that was at `path` stays as it was.
    Blocks go to disk as they fill; memory is bounded whatever the number of sequences.

    Args:
        path: the store's folder; an existing store there is replaced, anything else refused.
        kind: what the store holds: "raw", "train", "validation", …
        provenance: anything JSON can hold, kept in the manifest.

    Attributes:
        provenance: may still be changed until the block ends.
        scratch: a folder for temporary files, on the same disk; gone when the block ends.

    Raises:
        DataError: the folder cannot be written, the disk is full, or no sequence was appended.
    """

    def __init__(self, path: Path, kind: str, provenance: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.kind = kind
        self.provenance = dict(provenance or {})
        self._partial = self.path.with_name(self.path.name + ".partial")
        self.scratch = self._partial / "scratch"
        self._clusters: NDArray[np.int32] | None = None
        self._digest, self._names_digest = hashlib.sha256(), hashlib.sha256()
        self._names: list[bytes] = []
        self._values: list[Any] = []
        self._pending: list[tuple[bytes, bytes, bytes]] = []
        self._pending_bytes = 0
        self._blocks = 0
        self._residues = 0

    def __enter__(self) -> Self:
        with self._writing(), ExitStack() as undo:
            self._refuse_foreign_folder()
            self._lock = self._lock_partial()
            undo.callback(os.close, self._lock)
            undo.callback(self._remove_partial)
            _empty_folder(self._partial)  # a writer that was killed may have left something there
            self.scratch.mkdir()
            self._open(_FIRST_MAP_BYTES)
            undo.callback(lambda: self._environment.close())
            self._lengths = _ArrayFile(self._partial / _LENGTHS, np.dtype("<i4"))
            undo.callback(self._lengths.close)
            self._offsets = _ArrayFile(self._partial / _OFFSETS, np.dtype("<u4"))
            undo.callback(self._offsets.close)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._undo:
            if kind is None:
                self._finish()

    def append(self, name: str, tokens: NDArray[np.uint8]) -> None:
        """Add a sequence: its name and its residue tokens, uint8 [L] with 1 ≤ L ≤ MAX_RESIDUES."""
        if tokens.dtype != np.uint8 or tokens.ndim != 1 or not len(tokens):
            raise DataError(
                f"{self.path}: sequence {name!r} must be a non-empty uint8 array [L], "
                f"not {tokens.dtype} {list(tokens.shape)}"
            )
        self.extend([name.encode()], [tokens.tobytes()])

    def extend(self, names: Sequence[bytes], sequences: Sequence[Any]) -> None:
        """Add sequences: their names, and the residue tokens of each as a buffer of bytes."""
        taken = 0
        while taken < len(names):
            until = taken + BLOCK_SEQUENCES - len(self._names)
            self._names += names[taken:until]
            self._values += sequences[taken:until]
            taken = until
            if len(self._names) == BLOCK_SEQUENCES:
                self._end_block()

    def set_clusters(self, clusters: ArrayLike) -> None:
        """Give the homology cluster of every sequence, integers [N]."""
        self._clusters = np.asarray(clusters, dtype=np.int32)

    def _open(self, map_bytes: int) -> None:
        self._environment = lmdb.open(
            str(self._partial), map_size=map_bytes, max_dbs=2, lock=False, sync=False
        )
        self._sequences = self._environment.open_db(_SEQUENCES)
        self._name_blocks = self._environment.open_db(_NAMES)

    def _end_block(self) -> None:
        lengths = np.fromiter(map(len, self._values), dtype=np.int64, count=len(self._values))
        wrong = np.flatnonzero((lengths < 1) | (lengths > MAX_RESIDUES))
        if len(wrong):
            name = self._names[wrong[0]].decode("utf-8", "replace")
            raise DataError(
                f"{self.path}: sequence {name!r} has {lengths[wrong[0]]:,} residues; a store takes "
                f"1 to {MAX_RESIDUES:,}"
            )
        tokens, names = b"".join(self._values), _joined(self._names)
        if names.count(b"\n") != len(lengths):
            raise DataError(f"{self.path}: a name holds a line break; remove it")
        _add_to_digest(self._digest, lengths, tokens)
        self._names_digest.update(names)
        self._pending.append((_KEY.pack(self._blocks), tokens, zlib.compress(names, 1)))
        self._pending_bytes += len(tokens)
        self._blocks += 1
        self._residues += len(tokens)
        self._names.clear()
        self._values.clear()
        with self._writing():
            self._lengths.extend(lengths)
            self._offsets.extend(np.cumsum(lengths) - lengths)
        if self._pending_bytes >= _COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        with self._writing():
            while True:
                try:
                    with self._environment.begin(write=True) as transaction:
                        for key, tokens, names in self._pending:
                            transaction.put(key, tokens, db=self._sequences, append=True)
                            transaction.put(key, names, db=self._name_blocks, append=True)
                    break
                except lmdb.MapFullError:
                    self._environment.set_mapsize(2 * self._environment.info()["map_size"])
            # What is mapped and was touched counts as this process's memory until it is unmapped.
            map_bytes = self._environment.info()["map_size"]
            self._environment.close()
            self._open(map_bytes)
        self._pending.clear()
        self._pending_bytes = 0

    def _finish(self) -> None:
        if self._names:
            self._end_block()
        count = self._lengths.count
        if not count:
            raise DataError(f"{self.path}: no sequence to write; check the input and its filters")
        if self._clusters is not None and self._clusters.shape != (count,):
            raise DataError(
                f"{self.path}: {self._clusters.size} clusters for {count} sequences; "
                "give one cluster a sequence"
            )
        self._commit()
        digests = {
            "sequences": self._digest.hexdigest(),
            "names": self._names_digest.hexdigest(),
        }
        with self._writing():
            self._environment.sync(True)
            self._environment.close()
            self._lengths.finish()
            self._offsets.finish()
            if self._clusters is not None:
                np.save(self._partial / _CLUSTERS, self._clusters)
                digests["clusters"] = _array_digest(self._clusters)
            shutil.rmtree(self.scratch)
            manifest = {
                "format": "d2plm.SequenceStore",
                "format_version": FORMAT_VERSION,
                "kind": self.kind,
                "sequences": count,
                "residues": self._residues,
                "digests": digests,
                "data_bytes": (self._partial / _DATA).stat().st_size,
                "alphabet": list(TOKENS),
                "provenance": self.provenance,
            }
            (self._partial / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            for file in self._partial.iterdir():
                _flush_to_disk(file)
            _replace_folder(self._partial, self.path)

    def _lock_partial(self) -> int:
        """Make the partial folder and keep other writers out; closing what is given lets them in.

        The folder itself is locked, so that no lock file stays behind, and only while this process
        lives, so that a folder that a killed writer left can be used again.
        """
        import fcntl  # exists on POSIX only, and reading a store needs no lock

        while True:
            self._partial.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._partial, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise DataError(
                    f"{self.path}: another process is writing this store; wait for it or choose "
                    "another folder"
                ) from None
            except OSError as error:
                log.warning(
                    "%s is on a file system without locks (%s): let nothing else write there",
                    self.path,
                    error.strerror,
                )
                return lock
            # A writer that has just ended may have renamed or removed the folder that was opened.
            if _file_of(self._partial) == _file_of(lock):
                return lock
            os.close(lock)

    def _remove_partial(self) -> None:
        # A finished store's folder has been renamed, and another writer may have made a new one.
        if _file_of(self._partial) == _file_of(self._lock):
            shutil.rmtree(self._partial, ignore_errors=True)

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


class _ArrayFile:
    """A one-dimensional .npy file that grows: its header is written over when the size is known."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.file: BinaryIO = open(path, "w+b")  # noqa: SIM115  # closed by the writer
        self.dtype, self.count = dtype, 0
        self._write_header()

    def extend(self, values: NDArray[Any]) -> None:
        self.file.write(values.astype(self.dtype).tobytes())
        self.count += len(values)

    def finish(self) -> None:
        self.file.seek(0)
        self._write_header()
        self.file.close()

    def close(self) -> None:
        """Close the file, whatever becomes of it."""
        with suppress(OSError):  # where a write failed, what is left to write will fail, too
            self.file.close()

    def _write_header(self) -> None:
        # NumPy leaves room for a longer shape, so that the header's size never changes.
        np.lib.format.write_array_header_1_0(
            self.file,
            {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count,)},
        )


class _Environment:
    """An open LMDB environment, one per file and process, with one read transaction for its life.

    LMDB refuses to open a file twice in a process, so stores of the same folder share one. After a
    fork the child's copy counts as open, too: it is closed there and opened anew.

    Attributes:
        views: mapped tokens by block; used under `lock` alone, as `reopen` unmaps.
    """

    _open: ClassVar["weakref.WeakValueDictionary[tuple[int, int], _Environment]"] = (
        weakref.WeakValueDictionary()
    )
    _opening = threading.Lock()

    def __init__(self, path: Path, file: tuple[int, int]) -> None:
        self.pid, self.path, self.file = os.getpid(), path, file
        self.lock = threading.Lock()
        self.views: dict[int, memoryview] = {}
        self._map(readahead=False)

    def _map(self, readahead: bool) -> None:
        self.lmdb = lmdb.open(
            str(self.path),
            readonly=True,
            lock=False,
            readahead=readahead,
            subdir=True,
            create=False,
            max_dbs=2,
        )
        self.databases = {
            name: self.lmdb.open_db(name, create=False) for name in (_SEQUENCES, _NAMES)
        }
        self.transaction = self.lmdb.begin(buffers=True)

    def value(self, database: bytes, block: int) -> memoryview:
        """A value where it is mapped; used under `lock` alone."""
        value = self.transaction.get(_KEY.pack(block), db=self.databases[database])
        if value is None:
            raise KeyError(f"no {database.decode()} of block {block}")
        return value

    def entries(self, database: bytes) -> int:
        """The number of values; used under `lock` alone."""
        return self.transaction.stat(self.databases[database])["entries"]

    def reopen(self, readahead: bool) -> None:
        """Unmap the file and map it anew, for reading it in order or at random."""
        with self.lock:
            if _file_of(self.path / _DATA) != self.file:
                raise DataError(f"{self.path}: {_REPLACED}")
            self.close()
            self._map(readahead)

    def close(self) -> None:
        """Unmap the file."""
        self.views.clear()
        self.transaction.abort()
        self.lmdb.close()

    @classmethod
    def of(cls, path: Path) -> "_Environment":
        """The environment of this store in this process."""
        status = os.stat(path / _DATA)
        file = status.st_dev, status.st_ino
        with cls._opening:
            environment = cls._open.get(file)
            if environment is not None and environment.pid != os.getpid():
                environment.close()
                environment = None
            if environment is None:
                environment = cls._open[file] = cls(path, file)
            environment.path = path  # the folder may have been moved since it was opened
            return environment


_REPLACED = "was replaced after it had been opened; open it anew"
_DAMAGED = "damaged or not written by D2PLM; prepare the data again"


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        near = nearest_path(path)
        raise DataError(
            f"{path}: no such sequence store{near}; check the path or run d2plm prepare"
        )
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
    digests = manifest.get("digests")
    if not all(isinstance(count, int) for count in counts) or not (
        isinstance(digests, dict) and {"sequences", "names"} <= digests.keys()
    ):
        raise DataError(f"{file}: {_DAMAGED}")
    if manifest.get("alphabet") != list(TOKENS):
        raise DataError(f"{file}: written with another alphabet; prepare the data again")
    return manifest


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _file_of(file: Path | int) -> tuple[int, int] | None:
    """What tells a file (by path or descriptor) from all others; None where there is none."""
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _names_in(value: memoryview) -> list[bytes]:
    return zlib.decompress(value).split(b"\n")[:-1]


def _add_to_digest(digest: Any, lengths: NDArray[Any], tokens: Any) -> None:
    digest.update(lengths.astype(">u4").tobytes())
    digest.update(tokens)


def _array_digest(values: NDArray[np.int32]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, dtype="<i4").data).hexdigest()


def _joined(names: Sequence[bytes]) -> bytes:
    return b"\n".join(names) + b"\n"


def _empty_folder(path: Path) -> None:
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


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
