"""`SequenceStoreWriter`: writes a `SequenceStore` in blocks, in bounded memory."""

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import lmdb
import numpy as np
from numpy.typing import ArrayLike, NDArray

from d2plm.core.errors import DataError
from d2plm.core.files import written_beside
from d2plm.core.vocabulary import PROTEIN, Vocabulary
from d2plm.data import store

_COMMIT_BYTES = 1 << 20
_FIRST_MAP_BYTES = 64 << 20
_ARRAYS = {
    store.LENGTHS: np.dtype("<i4"),
    store.OFFSETS: np.dtype("<u4"),
    store.PIECES: store.PIECE,
}


class SequenceStoreWriter:
    """Writes a store under a temporary name and renames it when the `with` block succeeds.

    On an exception, nothing remains of it and a store at `path` is unchanged. An `OSError` in the
    block, for example from a full disk, becomes a `DataError` that names the store.

    Args:
        path: the store's folder; an existing store is replaced, anything else rejected.
        kind: content of the store: "raw", "train", "validation", …
        provenance: JSON content, kept in the manifest.

    Attributes:
        provenance: may still be changed until the block ends.
        scratch: a folder for temporary files, on the same disk; removed when the block ends.

    Raises:
        DataError: the folder cannot be written, another process is writing it, the disk is full, or
            no sequence was appended.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        provenance: Mapping[str, Any] | None = None,
        vocabulary: Vocabulary = PROTEIN,
    ) -> None:
        self.path = Path(path)
        self.kind = kind
        self.provenance = dict(provenance or {})
        self.vocabulary = vocabulary
        self._clusters: NDArray[np.int32] | None = None
        self._digest, self._names_digest = hashlib.sha256(), hashlib.sha256()
        self._names: list[bytes] = []
        self._values: list[Any] = []
        self._pending: list[tuple[bytes, bytes, bytes]] = []
        self._pending_bytes = 0
        self._blocks = self._count = self._residues = 0

    def __enter__(self) -> Self:
        self._lifetime = self._written()
        self._lifetime.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._lifetime.__exit__(*error)

    @contextmanager
    def _written(self) -> Iterator[None]:
        self._refuse_foreign_folder()
        with written_beside(self.path) as self._partial, ExitStack() as files:
            self.scratch = self._partial / "scratch"
            self.scratch.mkdir(parents=True)
            self._arrays = {
                name: files.enter_context(open(self.scratch / name, "wb")) for name in _ARRAYS
            }
            files.callback(lambda: self._environment.close())
            try:
                self._open(_FIRST_MAP_BYTES)
                yield
                self._finish()
            except lmdb.Error as error:
                raise OSError(str(error)) from error

    def extend(
        self, names: Sequence[bytes], sequences: Sequence[Any], records: Sequence[bytes] = ()
    ) -> None:
        """Add sequences.

        Args:
            sequences: the tokens of each as a buffer of bytes: little-endian integers of the
                vocabulary's dtype.
            records: int64 as bytes, the records of which each is a piece; empty if none was cut.
        """
        if any(records):
            numbers = np.frombuffer(b"".join(records), np.int64)
            counts = [len(own) // numbers.itemsize for own in records]
            pieces = np.empty(len(numbers), store.PIECE)
            pieces["record"] = numbers
            pieces["sequence"] = np.repeat(np.arange(len(records)), counts)
            pieces["sequence"] += self._count + len(self._names)
            self._arrays[store.PIECES].write(pieces.tobytes())
        taken = 0
        while taken < len(names):
            until = taken + store.BLOCK_SEQUENCES - len(self._names)
            self._names += names[taken:until]
            self._values += sequences[taken:until]
            taken = until
            if len(self._names) == store.BLOCK_SEQUENCES:
                self._end_block()

    def set_clusters(self, clusters: ArrayLike) -> None:
        """Set the homology cluster of every sequence, integer [N]."""
        self._clusters = np.asarray(clusters, dtype=np.int32)

    def _open(self, map_bytes: int) -> None:
        self._environment = lmdb.open(
            str(self._partial), map_size=map_bytes, max_dbs=2, lock=False, sync=False
        )
        self._sequences = self._environment.open_db(store.SEQUENCES)
        self._name_blocks = self._environment.open_db(store.NAMES)

    def _end_block(self) -> None:
        lengths = np.fromiter(map(len, self._values), dtype=np.int64, count=len(self._values))
        lengths //= self.vocabulary.dtype.itemsize
        wrong = np.flatnonzero((lengths < 1) | (lengths > store.MAX_RESIDUES))
        if len(wrong):
            name = self._names[wrong[0]].decode("utf-8", "replace")
            raise DataError(
                f"{self.path}: sequence {name!r} has {lengths[wrong[0]]:,} "
                f"{self.vocabulary.nouns.token}s; a store takes 1 to {store.MAX_RESIDUES:,}"
            )
        tokens, names = b"".join(self._values), store.joined(self._names)
        if len(tokens) != lengths.sum() * self.vocabulary.dtype.itemsize:
            raise TypeError("sequences are buffers of bytes, each of whole tokens")
        if names.count(b"\n") != len(lengths):
            raise DataError(f"{self.path}: a name holds a line break; remove it")
        store.add_to_digest(self._digest, lengths, tokens)
        self._names_digest.update(names)
        self._pending.append((store.KEY.pack(self._blocks), tokens, zlib.compress(names, 1)))
        self._pending_bytes += len(tokens)
        self._blocks += 1
        self._count += len(lengths)
        self._residues += int(lengths.sum())
        self._names.clear()
        self._values.clear()
        offsets = np.cumsum(lengths) - lengths
        for name, values in ((store.LENGTHS, lengths), (store.OFFSETS, offsets)):
            self._arrays[name].write(values.astype(_ARRAYS[name]).data)
        if self._pending_bytes >= _COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    for key, tokens, names in self._pending:
                        transaction.put(key, tokens, db=self._sequences, append=True)
                        transaction.put(key, names, db=self._name_blocks, append=True)
                break
            except lmdb.MapFullError:
                self._environment.set_mapsize(2 * self._environment.info()["map_size"])
        # Touched pages count as this process's memory until they are unmapped.
        map_bytes = self._environment.info()["map_size"]
        self._environment.close()
        self._open(map_bytes)
        self._pending.clear()
        self._pending_bytes = 0

    def _finish(self) -> None:
        if self._names:
            self._end_block()
        if not self._count:
            raise DataError(f"{self.path}: no sequence to write; check the input and its filters")
        if self._clusters is not None and self._clusters.shape != (self._count,):
            raise DataError(
                f"{self.path}: {self._clusters.size} clusters for {self._count} sequences; "
                "give one cluster a sequence"
            )
        self._commit()
        self._environment.close()
        digests = {"sequences": self._digest.hexdigest(), "names": self._names_digest.hexdigest()}
        for name, file in self._arrays.items():
            file.close()
            raw, dtype = self.scratch / name, _ARRAYS[name]
            if name != store.PIECES or "window" in self.provenance:  # an empty file is not mapped
                values = np.memmap(raw, dtype, "r") if raw.stat().st_size else np.empty(0, dtype)
                np.save(self._partial / name, values)
        if "window" in self.provenance:
            pieces = store.mapped_array(self._partial / store.PIECES, store.PIECE)
            digests["pieces"] = store.array_digest(pieces)
        if self._clusters is not None:
            np.save(self._partial / store.CLUSTERS, self._clusters)
            digests["clusters"] = store.array_digest(self._clusters)
        shutil.rmtree(self.scratch)
        if self.vocabulary != PROTEIN:
            self.vocabulary.save(self._partial)
        manifest = {
            "format": store.FORMAT,
            "format_version": store.FORMAT_VERSION,
            "kind": self.kind,
            "sequences": self._count,
            "residues": self._residues,
            "digests": digests,
            "data_bytes": (self._partial / store.DATA).stat().st_size,
            "alphabet": self.vocabulary.describe(),
            "provenance": self.provenance,
        }
        (self._partial / store.MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")

    def _refuse_foreign_folder(self) -> None:
        with suppress(OSError):  # `written_beside` says why it cannot be written
            known = not self.path.exists() or (self.path / store.MANIFEST).is_file()
            if not known and (not self.path.is_dir() or any(self.path.iterdir())):
                raise DataError(
                    f"{self.path}: exists and is no sequence store, so it is not overwritten; "
                    "choose another folder or remove it"
                )
