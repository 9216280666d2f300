"""`SequenceStore`: tokenised sequences on disk, with random access by index.

A store is a folder: `data.mdb` (LMDB), `lengths.npy`, `offsets.npy`, optionally `clusters.npy` and
`pieces.npy`, and `manifest.json`. LMDB maps the file: all processes of a machine share one copy in
memory, and a read needs no system call. A value contains the tokens of 1,024 sequences, which
wastes less than one per cent of the disk, whereas one value per sequence would waste a fifth; the
price is an array of offsets, and that nothing can be added to a finished store. The folder is
renamed last, so a half-written store is never opened.
"""

import hashlib
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import lmdb
import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, ModelError
from d2plm.core.files import nearest_path, read_json
from d2plm.core.vocabulary import Tokens, Vocabulary, vocabulary_of
from d2plm.data.records import ALIAS_SEPARATOR, readable

FORMAT, FORMAT_VERSION = "d2plm.SequenceStore", 2
BLOCK_SEQUENCES = 1024
MAX_RESIDUES = 1_000_000  # per sequence, so that offsets in a block fit 32 bits

# Files and databases of a store, for this module and the writer only.
DATA, MANIFEST = "data.mdb", "manifest.json"
LENGTHS, OFFSETS, CLUSTERS = "lengths.npy", "offsets.npy", "clusters.npy"
PIECES = "pieces.npy"
PIECE = np.dtype([("sequence", "<i8"), ("record", "<i8")])
SEQUENCES, NAMES = b"sequences", b"names"
KEY = struct.Struct(">Q")

_PASS_BYTES = 1 << 20  # mapped at a time in a pass over the store
_REPLACED = "was replaced after it was opened; open it again"
_DAMAGED = "damaged or not written by D2PLM; prepare the data again"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive sequences of a store, in memory.

    Attributes:
        first: index of the first sequence.
        tokens: [M], concatenated tokens of the sequences, in the vocabulary's dtype.
        bounds: int64 [n + 1], start and end of each in `tokens`.
    """

    first: int
    tokens: Tokens
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[Tokens]:
        return (self.tokens[a:b] for a, b in pairwise(self.bounds.tolist()))


class Windows(NamedTuple):
    """Windows of S sequences, to be copied into a row.

    Attributes:
        indices: int64 [S], the sequences, each 0 ≤ i < N.
        starts, counts: int64 [S], first token and number of tokens of each window.
        places: int64 [S], position of each window in the row.
    """

    indices: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    places: NDArray[np.int64]


class SequenceStore:
    """A finished store, read-only; may be forked, pickled and shared between threads.

    `store[i]` is sequence i as a new array [L] of tokens, without `<cls>` and `<eos>`. LMDB is
    opened without locks at the first read, and again in each process that uses the store.

    Attributes:
        manifest: format version, kind, counts, alphabet, digests, free `provenance`.
        vocabulary: vocabulary of the tokens; arrays of tokens have its dtype.
        lengths: int32 [N], number of tokens of each sequence, memory mapped.
        clusters: int32 [N], homology cluster of each sequence, memory mapped; None if unknown.

    Raises:
        DataError: the folder is no store, is half-written or damaged, or has another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._environment: _Environment | None = None
        with self._reading():
            self._file = _file_of(self.path / DATA)
            self.manifest = _read_manifest(self.path)
            self.vocabulary = _vocabulary_of(self.path, self.manifest)
            self.lengths = self._load(LENGTHS, np.int32)
            self._offsets = self._load(OFFSETS, np.uint32)
            has_clusters = "clusters" in self.manifest["digests"]
            self.clusters = self._load(CLUSTERS, np.int32) if has_clusters else None
            # LMDB maps the file: reading a truncated one would end the process with SIGBUS.
            file = self.path / DATA
            if not file.is_file() or file.stat().st_size != self.manifest["data_bytes"]:
                raise DataError(f"{file}: {_DAMAGED}")

    @property
    def digest(self) -> str:
        """SHA-256 in hex over the lengths and tokens of all sequences in order, block by block."""
        return self.manifest["digests"]["sequences"]

    @property
    def residues(self) -> int:
        """Total number of tokens."""
        return self.manifest["residues"]

    def __len__(self) -> int:
        return self.manifest["sequences"]

    def __getitem__(self, index: int) -> Tokens:
        if not 0 <= index < len(self.lengths):
            index = self._position(index)
        start, length = int(self._offsets[index]), int(self.lengths[index])
        environment = self._open()
        with environment.lock:
            view = self._view(environment, index // BLOCK_SEQUENCES)
            tokens = np.array(view[start : start + length])
        if len(tokens) != length:
            raise DataError(f"{self.path / DATA}: {_DAMAGED}")
        return tokens

    def require_vocabulary(self, wanted: Vocabulary) -> None:
        """Raise `DataError` if the store has another vocabulary."""
        own = self.vocabulary
        if own != wanted:
            raise DataError(
                f"{self.path}: holds {own.nouns.sequence}s of the alphabet {own.name}, where "
                f"{wanted.name} is wanted (with the same settings and the same tokenizer); give "
                "another store, or its own alphabet"
            )

    def copy_into(self, row: Tokens, windows: Windows) -> None:
        """Copy windows into `row` [T] in the vocabulary's dtype; `DataError` on a damaged store."""
        environment = self._open()
        blocks = windows.indices // BLOCK_SEQUENCES
        first = self._offsets[windows.indices] + windows.starts
        columns = (blocks, first, windows.counts, windows.places)
        views, target = environment.views, row.data
        with environment.lock:
            try:
                for block, source, count, place in zip(
                    *(column.tolist() for column in columns), strict=True
                ):
                    view = views.get(block)
                    if view is None:
                        view = self._view(environment, block)
                    # Memoryviews reject a shorter source and cost half as much as arrays.
                    target[place : place + count] = view[source : source + count]
            except ValueError:
                raise DataError(f"{self.path / DATA}: {_DAMAGED}") from None

    def blocks(self) -> Iterator[Block]:
        """One pass over all sequences in order, in bounded memory and at the disk's full speed."""
        copies = self._pass(SEQUENCES, lambda block, value: np.array(self._tokens_in(value)))
        for number, tokens in enumerate(copies):
            first = number * BLOCK_SEQUENCES
            lengths = self.lengths[first : first + BLOCK_SEQUENCES]
            bounds = np.append(0, lengths.cumsum(dtype=np.int64))
            if bounds[-1] != len(tokens):
                raise DataError(
                    f"{self.path}: the sequences from {first} on have {len(tokens)} "
                    f"{self.vocabulary.nouns.token}s "
                    f"where {LENGTHS} says {bounds[-1]}; prepare the data again"
                )
            yield Block(first, tokens, bounds)

    def __iter__(self) -> Iterator[Tokens]:
        return (tokens for block in self.blocks() for tokens in block)

    def chosen(self, chosen: NDArray[np.bool_]) -> Iterator[Tokens]:
        """The chosen sequences, bool [N], in one pass."""
        return compress(self, chosen)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "digest": self.digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]  # opens the store again
        if self.digest != state["digest"]:
            raise DataError(f"{self.path}: {_REPLACED}")

    def names(self, index: int) -> list[str]:
        """The names (first words of FASTA headers) of sequence `index` and of its duplicates."""
        block, place = divmod(self._position(index), BLOCK_SEQUENCES)
        environment = self._open()
        with self._reading(), environment.lock:
            names = self._names_in(block, environment.value(NAMES, block))
        aliases = readable(names[place]).split(ALIAS_SEPARATOR)
        return [alias.decode("utf-8", "replace") for alias in aliases]

    def name(self, index: int) -> str:
        """The first of `names`."""
        return self.names(index)[0]

    def name_blocks(self) -> Iterator[list[bytes]]:
        """Stored names per block; \\x01 separates those of duplicates, \\x02 a piece's number."""
        return self._pass(NAMES, self._names_in)

    @property
    def pieces(self) -> NDArray[np.void]:
        """PIECE [P], memory mapped: a row for each pair of a piece and a record that contains it.

        Records are numbered from 0 in the order of the input. Raises `DataError` if the store was
        not written with a window, or the file is damaged.
        """
        return mapped_array(self.path / PIECES, PIECE)

    def verify(self, progress: Callable[[int], None] = lambda done: None) -> None:
        """Read everything and compare counts, lengths and digests with the manifest.

        Raises `DataError` if they differ, or something cannot be read; `progress` is called with
        the number of sequences read so far.
        """
        digest, names_digest = hashlib.sha256(), hashlib.sha256()
        for block, names in zip(self.blocks(), self.name_blocks(), strict=True):
            window = slice(block.first, block.first + len(block))
            if not np.array_equal(self._offsets[window], block.bounds[:-1]):
                raise DataError(
                    f"{self.path}: {OFFSETS} and {LENGTHS} disagree from sequence {block.first} "
                    "on; prepare the data again"
                )
            add_to_digest(digest, self.lengths[window], block.tokens.data)
            names_digest.update(joined(names))
            progress(block.first + len(block))
        environment = self._open()
        with self._reading(), environment.lock:
            entries = [environment.entries(database) for database in (SEQUENCES, NAMES)]
        found = {"sequences": digest.hexdigest(), "names": names_digest.hexdigest()}
        if self.clusters is not None:
            found["clusters"] = array_digest(self.clusters)
        if "pieces" in self.manifest["digests"]:
            found["pieces"] = array_digest(self.pieces)
        residues = int(self.lengths.sum(dtype=np.int64))
        blocks = -(-len(self) // BLOCK_SEQUENCES)
        expected = self.manifest["digests"]
        wrong = [what for what in {**expected, **found} if expected.get(what) != found.get(what)]
        if wrong or residues != self.residues or entries != [blocks, blocks]:
            raise DataError(
                f"{self.path}: the {' and '.join(wrong) or 'counts'} are not those of {MANIFEST}; "
                "prepare the data again"
            )

    def _load(self, file: str, dtype: Any) -> NDArray[Any]:
        values = mapped_array(self.path / file, dtype)
        if len(values) != len(self):
            raise DataError(f"{self.path / file}: {_DAMAGED}")
        return values

    def _position(self, index: int) -> int:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"{self.path}: no sequence {index} among {len(self)}")
        return position

    def _view(self, environment: "_Environment", block: int) -> memoryview:
        """A view of the mapped tokens of a block; valid while the caller holds the lock."""
        view = environment.views.get(block)
        if view is None:
            with self._reading():
                value = environment.value(SEQUENCES, block)
            view = environment.views[block] = self._tokens_in(value)
        return view

    def _tokens_in(self, value: memoryview) -> memoryview:
        dtype = self.vocabulary.dtype
        if len(value) % dtype.itemsize:
            raise DataError(f"{self.path / DATA}: {_DAMAGED}")
        return value.cast(dtype.char)  # type: ignore  # one of B, H and I

    def _pass(self, database: bytes, read: Callable[[int, memoryview], T]) -> Iterator[T]:
        """Results of `read` for the (number, value) of each block, in order."""
        environment, mapped = self._open(), _PASS_BYTES
        try:
            for block in range(-(-len(self) // BLOCK_SEQUENCES)):
                # Pages that were read count as this process's memory until they are unmapped.
                if mapped >= _PASS_BYTES:
                    with self._reading():
                        environment.reopen(readahead=True)
                    mapped = 0
                with self._reading(), environment.lock:
                    value = environment.value(database, block)
                    mapped += len(value)
                    content = read(block, value)
                yield content
        finally:
            with self._reading():
                environment.reopen(readahead=False)

    def _names_in(self, block: int, value: memoryview) -> list[bytes]:
        names = zlib.decompress(value).split(b"\n")[:-1]
        count = min(BLOCK_SEQUENCES, len(self) - block * BLOCK_SEQUENCES)
        if len(names) != count:
            raise DataError(
                f"{self.path / DATA}: {_DAMAGED} ({len(names)} names for {count} sequences)"
            )
        return names

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
            raise DataError(f"{self.path / DATA}: {_DAMAGED} ({error})") from None
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot be read ({error.strerror}); check the path, its permissions "
                "and the disk"
            ) from None


def clusters_of(store: SequenceStore) -> NDArray[np.int32]:
    """int32 [N]: the homology cluster of every sequence; `DataError` if the store has none."""
    if store.clusters is None:
        raise DataError(f"{store.path}: has no clusters; prepare the data with d2plm prepare")
    return store.clusters


class _Environment:
    """An open LMDB environment with one read transaction for its life, one per file and process.

    LMDB refuses to open a file twice in a process, so stores of the same folder share one. After a
    fork the child's copy counts as open, too: it is closed there and opened again.

    Attributes:
        views: mapped tokens by block; used only under `lock`, as `reopen` unmaps them.
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
            str(self.path), readonly=True, lock=False, readahead=readahead, create=False, max_dbs=2
        )
        self.databases = {
            name: self.lmdb.open_db(name, create=False) for name in (SEQUENCES, NAMES)
        }
        self.transaction = self.lmdb.begin(buffers=True)

    def value(self, database: bytes, block: int) -> memoryview:
        """A view of a mapped value; used only under `lock`."""
        value = self.transaction.get(KEY.pack(block), db=self.databases[database])
        if value is None:
            raise KeyError(f"no {database.decode()} of block {block}")
        return value

    def entries(self, database: bytes) -> int:
        """Number of values; used only under `lock`."""
        return self.transaction.stat(self.databases[database])["entries"]

    def reopen(self, readahead: bool) -> None:
        """Unmap the file and map it again, for sequential or random reading."""
        with self.lock:
            if _file_of(self.path / DATA) != self.file:
                raise DataError(f"{self.path}: {_REPLACED}")
            self.close()
            self._map(readahead)

    def close(self) -> None:
        self.views.clear()
        self.transaction.abort()
        self.lmdb.close()

    @classmethod
    def of(cls, path: Path) -> "_Environment":
        status = os.stat(path / DATA)
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


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        near = nearest_path(path)
        raise DataError(
            f"{path}: no such sequence store{near}; check the path or run d2plm prepare"
        )
    file = path / MANIFEST
    manifest = read_json(file)
    if manifest is None:
        raise DataError(
            f"{path}: no sequence store, or one whose writing was broken off ({MANIFEST} is "
            "missing); prepare the data again"
        )
    if manifest.get("format") != FORMAT:
        raise DataError(f"{file}: is not the manifest of a sequence store; check the path")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise DataError(f"{file}: written with another format version; prepare the data again")
    counts = [manifest.get(key) for key in ("sequences", "residues", "data_bytes")]
    digests = manifest.get("digests")
    if not all(isinstance(count, int) for count in counts) or not (
        isinstance(digests, dict) and {"sequences", "names"} <= digests.keys()
    ):
        raise DataError(f"{file}: {_DAMAGED}")
    return manifest


def _vocabulary_of(path: Path, manifest: dict[str, Any]) -> Vocabulary:
    try:
        return vocabulary_of(manifest.get("alphabet"), path)
    except ModelError as error:
        raise DataError(
            f"{path / MANIFEST}: written with another alphabet ({error}); prepare the data again"
        ) from None


def _file_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None if there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def mapped_array(path: Path, dtype: Any) -> NDArray[Any]:
    """The array [n] in a file, memory mapped; `DataError` if it is missing or damaged."""
    try:
        values = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header may raise anything
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read ({reason}); prepare the data again") from None
    if values.ndim != 1 or values.dtype != dtype:
        raise DataError(f"{path}: {_DAMAGED}")
    return values.view(np.ndarray)  # indexing the memmap class itself takes ten times as long


def add_to_digest(digest: Any, lengths: NDArray[Any], tokens: Any) -> None:
    digest.update(lengths.astype(">u4").tobytes())
    digest.update(tokens)


def array_digest(values: NDArray[Any]) -> str:
    values = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return hashlib.sha256(values.view(np.uint8).data).hexdigest()


def joined(names: Sequence[bytes]) -> bytes:
    return b"\n".join(names) + b"\n"
