"""Megatron-indexed corpora (`PREFIX.bin` and `PREFIX.idx`): read in place, and written.

`PREFIX.bin` contains the concatenated token ids of all sequences, and `PREFIX.idx` the start of
each sequence and its document. All numbers are little-endian. Two layouts exist, both in version 1
and both with a document index, d entries from 0 to n: document i has the sequences from entry i to
entry i + 1.

    MMIDIDX  "MMIDIDX\\0\\0", uint64 version, uint8 dtype code, uint64 n, uint64 d,
             int32 [n] tokens of each sequence, int64 [n] its first byte in PREFIX.bin,
             int64 [d] document index, and in multimodal corpora int8 [n] modes (0 is text)
    TNTIDX   "TNTIDX\\0\\0", uint64 version, uint64 dtype code, uint64 bytes of a token, uint64 n,
             uint64 number of sizes (n), uint64 d, int64 [n + 1] first size of each sequence,
             int64 [n + 1] its first token in PREFIX.bin, int64 [n] sizes, int64 [d] document index

The dtype codes are those of `_DTYPES`. Sources: `megatron/core/datasets/indexed_dataset.py` and,
for TNTIDX, `megatron/data/indexed_dataset.py` in github.com/NVIDIA/Megatron-LM; the codes 9 and 10
are in fairseq's file of the same name, whose own corpora have no document index and are rejected.

Opening reads only the index, so even a terabyte opens quickly; the price is that a token outside
the vocabulary is reported only when it is read.
"""

import hashlib
import logging
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, require_number
from d2plm.core.files import nearest_path, written_beside
from d2plm.core.vocabulary import FIRST, Tokens, Vocabulary
from d2plm.data.store import BLOCK_SEQUENCES, Block, SequenceStore, Windows, copy_spans

log = logging.getLogger(__name__)

INDEX, DATA = ".idx", ".bin"
# Names of the token that `preprocess_data.py --append-eod` writes after a document.
END_OF_DOCUMENT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<eod>")

_MMIDIDX, _TNTIDX = b"MMIDIDX\0\0", b"TNTIDX\0\0"
_MMIDIDX_HEADER, _TNTIDX_HEADER = struct.Struct("<9sQBQQ"), struct.Struct("<8s6Q")
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2", 9: "u4", 10: "u8"}
_FLOATS = (6, 7)
_UINT16_LIMIT = 65_500  # size from which Megatron writes int32 instead of uint16
_SAMPLES, _SAMPLE_BYTES = 1024, 4096  # for the digest and the ends of documents
_BLOCK_TOKENS = 1 << 22
_LONGEST = np.iinfo(np.int32).max  # tokens of a sequence


class MegatronSequences(SequenceStore):
    """The documents of a corpus, as a store that reads tokens in place.

    A document is one sequence, or with a `window` consecutive sequences of at most that many
    tokens; empty documents are left out. The document's number is its cluster. There are no
    manifest and no digests of all tokens, so the corpus cannot be verified.

    Args:
        prefix: path of the two files without their suffixes, or one of the files.
        vocabulary: vocabulary of the corpus; ids in the files are its tokens less FIRST.
        window: maximum number of tokens of a sequence; None cuts nothing.
        end_of_document: id that ends every document and is left out, because packing writes an
            `<eos>` itself; None is the first of END_OF_DOCUMENT in the vocabulary with which every
            document ends, if any. A sample of the documents decides, and each is checked when it is
            read.

    Raises:
        ConfigError: `window` or `end_of_document` is out of range.
        DataError: a file is missing, damaged or no integer corpus, or a document does not end with
            `end_of_document`.
    """

    def __init__(
        self,
        prefix: str | Path,
        vocabulary: Vocabulary,
        window: int | None = None,
        end_of_document: int | None = None,
    ) -> None:
        require_number("window", window, optional=True, integer=True, low=1, high=_LONGEST)
        require_number("end_of_document", end_of_document, optional=True, integer=True, low=0)
        self.path = prefix_of(Path(prefix))
        self.vocabulary = vocabulary
        self._arguments = window, end_of_document
        self._bin, idx = _file(self.path, DATA), _file(self.path, INDEX)
        content = _mapped(idx)
        index = _parsed(content, idx)
        self._map = _mapped(self._bin)
        self._map.madvise(mmap.MADV_RANDOM)  # no readahead
        total, width = int(index.places[-1]), index.dtype.itemsize
        if len(self._map) != total * width:
            raise _damaged(
                self._bin,
                f"has {len(self._map):,} bytes, and {idx.name} is of {total:,} tokens of {width}",
            )
        self._ids = np.frombuffer(self._map, dtype=index.dtype)
        bounds = index.places[index.documents]
        lengths, firsts = np.diff(bounds), bounds[:-1]
        self._end = self._end_of_document(bounds[1:][lengths > 0] - 1)
        if self._end is not None:
            lengths -= lengths > 0
        longest = int(lengths.max(initial=0)) if window is None else window
        if max(longest, len(lengths)) > _LONGEST:
            raise DataError(
                f"{self.path}: has a document of {longest:,} tokens; cut it with a window"
            )
        pieces = -(-lengths // longest) if longest else lengths
        documents = np.repeat(np.arange(len(pieces), dtype=np.int32), pieces)
        self.clusters = self._documents = documents
        if not len(documents):
            raise DataError(f"{self.path}: holds no tokens; write the corpus again")
        within = np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        within *= longest
        self._firsts = firsts[documents] + within
        left = lengths[documents] - within
        self.lengths = np.minimum(left, longest).astype(np.int32)
        self._last = left <= longest
        self._index_digest = hashlib.sha256(content)

    @cached_property
    def digest(self) -> str:  # type: ignore[override]  # a property that is computed once
        """Identifies the corpus by the index and samples of the tokens.

        Resuming compares it at every start, when a pass over a terabyte would take hours; dates
        change with every copy. A change that keeps every length and hits no sample goes unnoticed.
        """
        digest = self._index_digest.copy()
        places = _sample(max(len(self._map) - _SAMPLE_BYTES, 0) + 1)
        digest.update(self._bytes_at(places, _SAMPLE_BYTES))
        digest.update(repr((self._arguments[0], self._end)).encode())
        return f"megatron-{digest.hexdigest()}"

    @property
    def residues(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tokens:
        index = self._position(index)
        tokens = np.empty(self.lengths[index], dtype=self.vocabulary.dtype)
        whole = Windows(*(np.array([value]) for value in (index, 0, len(tokens), 0)))
        self.copy_into(tokens, whole)
        return tokens

    def copy_into(self, row: Tokens, windows: Windows) -> None:
        """As `SequenceStore.copy_into`; `DataError` for an id that is not in the vocabulary."""
        first = self._firsts[windows.indices] + windows.starts
        ends = first + windows.counts
        if self._end is not None:
            closed = self._last[windows.indices] & (
                windows.starts + windows.counts == self.lengths[windows.indices]
            )
            wrong = closed.nonzero()[0][self._ids[ends[closed]] != self._end]
            if len(wrong):
                raise DataError(
                    f"{self._place(int(windows.indices[wrong[0]]))} does not end in the id "
                    f"{self._end}, as the others do; write the corpus again, with or without "
                    "--append-eod for all"
                )
        # Gathered, so that one call each checks and shifts the ids of all windows.
        until = np.cumsum(windows.counts)
        ids = np.empty(until[-1] if len(until) else 0, dtype=self._ids.dtype)
        copy_spans(self._ids, first, ids, until - windows.counts, windows.counts)
        unsigned = ids.view(f"u{ids.itemsize}")  # negative ids become too large
        legal = self.vocabulary.read_stop - FIRST
        if unsigned.max(initial=0) >= legal:
            place = int((unsigned >= legal).argmax())
            window = int(np.searchsorted(until, place, side="right"))
            offset = place - until[window] + windows.counts[window] + windows.starts[window]
            raise DataError(
                f"{self._place(int(windows.indices[window]))}, token {offset} of it: the id "
                f"{ids[place]} is not one of the vocabulary's, 0 … {legal - 1}; give the "
                "alphabet, tokenizer or end_of_document that the corpus was written with"
            )
        tokens = np.add(ids, FIRST, dtype=row.dtype, casting="unsafe")
        copy_spans(tokens, until - windows.counts, row, windows.places, windows.counts)

    def blocks(self) -> Iterator[Block]:
        self._map.madvise(mmap.MADV_SEQUENTIAL)
        try:
            for first, stop in self._spans():
                counts = self.lengths[first:stop].astype(np.int64)
                bounds = np.append(0, counts.cumsum())
                tokens = np.empty(bounds[-1], dtype=self.vocabulary.dtype)
                whole = np.arange(first, stop), np.zeros_like(counts), counts, bounds[:-1]
                self.copy_into(tokens, Windows(*whole))
                self._map.madvise(mmap.MADV_DONTNEED)  # or pages read would count as memory
                yield Block(first, tokens, bounds)
        finally:
            self._map.madvise(mmap.MADV_RANDOM)

    def names(self, index: int) -> list[str]:
        """`documentN`, or `documentN/P` for its piece P, N from 0 and P from 1 on."""
        index = self._position(index)
        document = self._documents[index]
        first = int(np.searchsorted(self._documents, document))
        whole = index == first and bool(self._last[index])
        return [f"document{document}" if whole else f"document{document}/{index - first + 1}"]

    def name_blocks(self) -> Iterator[list[bytes]]:
        for first, stop in self._spans():
            yield [self.name(index).encode() for index in range(first, stop)]

    def __getstate__(self) -> dict[str, Any]:
        return {
            "arguments": (self.path, self.vocabulary, *self._arguments),
            "digest": self._index_digest.hexdigest(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["arguments"])  # type: ignore[misc]  # maps the files again
        if self._index_digest.hexdigest() != state["digest"]:
            raise DataError(f"{self.path}: was replaced after it was opened; open it again")

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Start and end of each block, with bounded numbers of sequences and tokens."""
        first = 0
        while first < len(self):
            used = self.lengths[first : first + BLOCK_SEQUENCES].cumsum(dtype=np.int64)
            fitting = int(np.searchsorted(used, _BLOCK_TOKENS, side="right"))
            yield first, first + max(fitting, 1)
            first += max(fitting, 1)

    def _bytes_at(self, places: NDArray[np.int64], size: int) -> bytes:
        """Read `size` bytes at each place without mapping, which may cost megabytes each."""
        with self._bin.open("rb") as stream:
            return b"".join(os.pread(stream.fileno(), size, place) for place in places.tolist())

    def _place(self, index: int) -> str:
        return f"{self._bin}: {self.name(index)}"

    def _end_of_document(self, last: NDArray[np.int64]) -> int | None:
        """The id to leave out, given the positions of the last ids of the documents."""
        given = self._arguments[1]
        places = last[_sample(len(last))] * self._ids.itemsize
        found = np.frombuffer(self._bytes_at(places, self._ids.itemsize), dtype=self._ids.dtype)
        for end in _ends(self.vocabulary) if given is None else [given]:
            others = int((found != end).sum())
            if not others:
                return end
            unlike = f"{others:,} of {len(found):,} documents looked at do not end in the id {end}"
            if given is not None:
                raise DataError(
                    f"{self._bin}: {unlike}; give the end_of_document with which all were written"
                )
            if others < len(found):
                log.warning("%s: %s, so it is kept as a token", self._bin, unlike)
        return None


def prefix_of(path: Path) -> Path:
    """The prefix of a corpus, given it or one of the files."""
    return path.with_suffix("") if path.suffix in (INDEX, DATA) else path


def is_megatron(path: Path) -> bool:
    """Whether a path is one of the two files of a corpus."""
    return path.suffix in (INDEX, DATA) and all(
        path.with_suffix(ending).is_file() for ending in (INDEX, DATA)
    )


def export_megatron(
    store: SequenceStore,
    prefix: Path,
    end_of_document: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Write all sequences of a store, in their order, as the documents of a corpus (MMIDIDX).

    Ids are the store's tokens less FIRST, as uint16 or int32, the type that Megatron would choose.
    Read-only letters have ids after those of the predicted tokens. Memory is 28 bytes per sequence.

    Args:
        prefix: as in `MegatronSequences`; existing files are replaced when the new ones are
            complete.
        end_of_document: id to write after each document, as `--append-eod` does; None for none.
        progress: called with the number of sequences written so far.

    Raises:
        ConfigError: `end_of_document` is out of range.
        DataError: the store is damaged, or the files cannot be written.
    """
    require_number("end_of_document", end_of_document, optional=True, integer=True, low=0)
    ending = [] if end_of_document is None else [end_of_document]
    ids = max(store.vocabulary.mask - FIRST, *(end + 1 for end in ending), 0)
    code = 8 if ids < _UINT16_LIMIT else 4
    dtype = np.dtype(f"<{_DTYPES[code]}")
    lengths = store.lengths.astype("<i4") + np.int32(len(ending))
    ends = np.cumsum(lengths, dtype="<i8") * dtype.itemsize
    prefix = prefix_of(prefix)
    with written_beside(_file(prefix, INDEX)) as index, written_beside(_file(prefix, DATA)) as data:
        with data.open("wb") as stream:
            for block in store.blocks():
                if block.tokens.min() < FIRST or block.tokens.max() >= store.vocabulary.mask:
                    raise DataError(
                        f"{store.path}: from sequence {block.first} on holds special tokens; see "
                        "d2plm data verify, and prepare the data again"
                    )
                content = (block.tokens - block.tokens.dtype.type(FIRST)).astype(dtype)
                for end in ending:
                    content = np.insert(content, block.bounds[1:], end)
                stream.write(content.data)
                progress(block.first + len(block))
        with index.open("wb") as stream:
            stream.write(_MMIDIDX_HEADER.pack(_MMIDIDX, 1, code, len(store), len(store) + 1))
            stream.write(lengths.data)
            stream.write((ends - lengths.astype("<i8") * dtype.itemsize).data)
            stream.write(np.arange(len(store) + 1, dtype="<i8").data)


class _Index(NamedTuple):
    """Dtype of the ids, place of each sequence's first id [n + 1], document index [d]."""

    dtype: np.dtype[Any]
    places: NDArray[np.int64]
    documents: NDArray[np.int64]


def _parsed(content: mmap.mmap, file: Path) -> _Index:
    compact = content[: len(_MMIDIDX)] == _MMIDIDX
    if not compact and content[: len(_TNTIDX)] != _TNTIDX:
        raise _damaged(file, "does not begin as a Megatron index")
    header = _MMIDIDX_HEADER if compact else _TNTIDX_HEADER
    if len(content) < header.size:
        raise _damaged(file, "is truncated")
    _, version, code, *counts = header.unpack_from(content)
    if version != 1:
        raise _damaged(file, f"has version {version}, not 1")
    if code not in _DTYPES:
        what = "floating-point numbers" if code in _FLOATS else f"an unknown dtype ({code})"
        raise DataError(f"{file}: the corpus holds {what}, not token ids; give another one")
    dtype, documents = np.dtype(f"<{_DTYPES[code]}"), counts[-1]
    count = counts[-2 if compact else 1]
    layout = [("<i4", count), ("<i8", count), ("<i8", documents), ("<i1", count)]
    if not compact:
        layout = [("<i8", count + 1), ("<i8", count + 1), ("<i8", counts[2]), ("<i8", documents)]
    size = header.size + sum(np.dtype(kind).itemsize * number for kind, number in layout)
    if compact and len(content) == size - count:  # without modes, as usual
        size -= layout.pop()[1]
    if len(content) != size:
        raise _damaged(
            file,
            f"has {len(content):,} bytes where its header says {size:,} (an index that fairseq "
            "wrote knows no documents and cannot be read)",
        )
    columns, offset = [], header.size
    for kind, number in layout:
        columns.append(np.frombuffer(content, kind, number, offset))
        offset += columns[-1].nbytes
    lengths, firsts, bounds, *modes = columns if compact else (*columns[2:0:-1], columns[3])
    places = np.append(0, lengths.cumsum(dtype=np.int64))
    if not compact and (
        counts[0] != dtype.itemsize or counts[2] != count or (np.diff(columns[0]) != 1).any()
    ):
        raise _damaged(file, "has tokens of another size than its dtype, or several dimensions")
    unit = dtype.itemsize if compact else 1
    # A place is negative if the sum of the lengths overflows.
    negative = min(lengths.min(initial=0), places.min()) < 0
    if negative or not np.array_equal(firsts, places[: len(firsts)] * unit):
        raise _damaged(file, "has sequences that do not follow one another")
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
        raise _damaged(file, f"has a document index that does not go from 0 to {count:,}")
    if modes and modes[0].any():
        which = int(modes[0].nonzero()[0][0])
        raise DataError(
            f"{file}: sequence {which} has mode {modes[0][which]} and is not text; multimodal "
            "corpora cannot be read"
        )
    return _Index(dtype, places, bounds)


def _ends(vocabulary: Vocabulary) -> list[int]:
    """Ids of the tokens of END_OF_DOCUMENT in a vocabulary."""
    found = vocabulary.tokenise([name.encode() for name in END_OF_DOCUMENT])
    return [
        int(found[i][0]) - FIRST
        for i, name in enumerate(END_OF_DOCUMENT)
        if not found.illegal[i] and found.lengths[i] == 1 and vocabulary.decode(found[i]) == name
    ]


def _sample(number: int) -> NDArray[np.int64]:
    """At most _SAMPLES of the first `number` integers, evenly spaced."""
    return np.unique(np.linspace(0, max(number - 1, 0), min(number, _SAMPLES)).astype(np.int64))


def _file(prefix: Path, ending: str) -> Path:
    return Path(f"{prefix}{ending}")


def _mapped(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        near = nearest_path(file) if file.suffix == INDEX else ""  # the index was found
        raise DataError(
            f"{file}: no such file{near}; give the prefix of both files, .idx and .bin"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise _damaged(file, f"cannot be read ({error})") from error


def _damaged(file: Path, what: str) -> DataError:
    return DataError(f"{file}: {what}; copy or write the .bin and the .idx again")
