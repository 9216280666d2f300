"""Reading Megatron-indexed corpora (`PREFIX.bin` and `PREFIX.idx`), which are tokenised already.

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
"""

import logging
import struct
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import FIRST, Tokenised, Vocabulary
from d2plm.data.records import RawRecords

log = logging.getLogger(__name__)

INDEX, DATA = ".idx", ".bin"
# Names of the token that `preprocess_data.py --append-eod` writes after a document.
END_OF_DOCUMENT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<eod>")

_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2", 9: "u4", 10: "u8"}
_FLOATS = (6, 7)
_SAMPLES = 1024  # documents that decide which id ends all of them
_BLOCK_DOCUMENTS, _BLOCK_TOKENS = 1024, 1 << 22


def is_megatron(path: Path) -> bool:
    """Whether a path is one of the two files of a corpus."""
    return path.suffix in (INDEX, DATA) and all(
        path.with_suffix(ending).is_file() for ending in (INDEX, DATA)
    )


def read_megatron(path: Path, vocabulary: Vocabulary, end: int | None) -> Iterator[RawRecords]:
    """The documents of a corpus in order, `document0` and so on, without empty ones.

    Args:
        path: one of the two files.
        vocabulary: vocabulary of the corpus; ids in the files are its tokens less FIRST.
        end: id that ends every document and is left out, because packing writes an `<eos>` itself;
            None is the first of END_OF_DOCUMENT with which all documents of a sample end, if any.

    Raises `DataError` (when iterated) if a file is missing, damaged or no integer corpus, an id is
    not in the vocabulary, or a document does not end with `end`.
    """
    prefix = path.with_suffix("") if path.suffix in (INDEX, DATA) else path
    index, data = (Path(f"{prefix}{ending}") for ending in (INDEX, DATA))
    dtype, numbers, bounds = _parsed(index)
    size, total, width = len(_mapped(data)), int(bounds[-1]), dtype.itemsize
    if size != total * width:
        raise _damaged(data, f"has {size:,} bytes, and {index.name} is of {total:,} ids of {width}")
    sample = np.linspace(1, len(numbers), min(len(numbers), _SAMPLES)).astype(np.int64)
    last = [_mapped(data, dtype, place - 1, 1)[0] for place in bounds[sample].tolist()]
    end = _end_of_document(np.array(last), data, vocabulary, end)
    legal, first = vocabulary.read_stop - FIRST, 0
    while first < len(numbers):
        stop = int(np.searchsorted(bounds, bounds[first] + _BLOCK_TOKENS, side="right")) - 1
        stop = max(min(stop, first + _BLOCK_DOCUMENTS), first + 1)
        own = bounds[first : stop + 1] - bounds[first]
        names = [b"document%d" % number for number in numbers[first:stop].tolist()]
        # Copied, because mapped pages count as this process's memory until they are unmapped.
        ids = np.array(_mapped(data, dtype, int(bounds[first]), int(own[-1])))
        if end is not None:
            unlike = ids[own[1:] - 1] != end
            if unlike.any():
                raise DataError(
                    f"{data}: {names[unlike.argmax()].decode()} does not end in the id {end}, as "
                    "the others do; write the corpus again, with or without --append-eod for all"
                )
            ids[own[1:] - 1] = 0  # the end may lie outside the vocabulary
        illegal = ids.view(f"u{width}") >= legal  # also negative ids
        if illegal.any():
            place = illegal.argmax()
            which = np.searchsorted(own, place, side="right") - 1
            raise DataError(
                f"{data}: {names[which].decode()}, token {place - own[which]} of it: the id "
                f"{ids[place]} is not one of the vocabulary's, 0 … {legal - 1}; give the alphabet, "
                "tokenizer or end_of_document that the corpus was written with"
            )
        tokens = np.add(ids, FIRST, dtype=vocabulary.dtype, casting="unsafe")
        lengths = np.diff(own) - (end is not None)
        kept = lengths.nonzero()[0]
        names = [names[i] for i in kept.tolist()]
        found = Tokenised(tokens, own[kept], lengths[kept], np.zeros(len(kept), dtype=np.bool_))
        where = partial(_place, data, names)
        yield RawRecords(names, [], where, stop / len(numbers), tokens=found)
        first = stop


def _parsed(file: Path) -> tuple[np.dtype[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Dtype of the ids, numbers of the documents that are not empty, and their bounds."""
    content = _mapped(file)
    compact = content[:9].tobytes() == b"MMIDIDX\0\0"
    header = struct.Struct("<9sQBQQ" if compact else "<8s6Q")
    known = compact or content[:8].tobytes() == b"TNTIDX\0\0"
    if not known or len(content) < header.size:
        raise _damaged(file, "does not begin as a Megatron index")
    _, version, code, *counts = header.unpack_from(content.data)
    if version != 1:
        raise _damaged(file, f"has version {version}, not 1")
    if code not in _DTYPES:
        what = "floating-point numbers" if code in _FLOATS else f"an unknown dtype ({code})"
        raise DataError(f"{file}: the corpus holds {what}, not token ids; give another one")
    dtype = np.dtype(f"<{_DTYPES[code]}")
    count, documents = counts[-2 if compact else 1], counts[-1]
    layout = [("<i8", count + 1), ("<i8", count + 1), ("<i8", count), ("<i8", documents)]
    if compact:
        has_modes = len(content) == header.size + 13 * count + 8 * documents
        layout = [("<i4", count), ("<i8", count), ("<i8", documents), ("<i1", count * has_modes)]
    edges = [*accumulate((int(kind[2]) * n for kind, n in layout), initial=header.size)]
    if len(content) != edges[-1]:
        what = f"has {len(content):,} bytes where its header says {edges[-1]:,}"
        raise _damaged(file, f"{what} (indexes of fairseq know no documents and cannot be read)")
    columns = [content[a:b].view(layout[i][0]) for i, (a, b) in enumerate(pairwise(edges))]
    if compact:
        lengths, firsts, bounds, modes = columns
    else:
        dimensions, firsts, lengths, bounds = columns
        if counts[0] != dtype.itemsize or counts[2] != count or (np.diff(dimensions) != 1).any():
            raise _damaged(file, "has tokens of another size than its dtype, or several dimensions")
    places = np.append(0, lengths.cumsum(dtype=np.int64))
    unit = dtype.itemsize if compact else 1
    # A place is negative if the sum of the lengths overflows.
    negative = min(lengths.min(initial=0), places.min()) < 0
    if negative or not np.array_equal(firsts, places[: len(firsts)] * unit):
        raise _damaged(file, "has sequences that do not follow one another")
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
        raise _damaged(file, f"has a document index that does not go from 0 to {count:,}")
    if compact and modes.any():
        which = modes.nonzero()[0][0]
        what = f"sequence {which} has mode {modes[which]} and is not text"
        raise DataError(f"{file}: {what}; multimodal corpora cannot be read")
    numbers = np.diff(starts := places[bounds]).nonzero()[0]
    return dtype, numbers, np.append(starts[numbers], starts[-1])


def _end_of_document(
    last: NDArray[Any], file: Path, vocabulary: Vocabulary, given: int | None
) -> int | None:
    """The id to leave out, given the last ids of some documents."""
    found = vocabulary.tokenise([name.encode() for name in END_OF_DOCUMENT])
    known = [
        int(found[i][0]) - FIRST
        for i, name in enumerate(END_OF_DOCUMENT)
        if not found.illegal[i] and found.lengths[i] == 1 and vocabulary.decode(found[i]) == name
    ]
    for end in known if given is None else [given]:
        others = int((last != end).sum())
        if not others:
            return end
        unlike = f"{others:,} of {len(last):,} documents looked at do not end in the id {end}"
        if given is not None:
            raise DataError(f"{file}: {unlike}; give the id with which all documents end")
        if others < len(last):
            log.warning("%s: %s, so it is kept as a token", file, unlike)
    return None


def _place(file: Path, names: list[bytes], record: int, offset: int | None) -> str:
    return f"{file}, {names[record].decode()}"


def _mapped(file: Path, kind: Any = "u1", first: int = 0, count: int | None = None) -> NDArray[Any]:
    try:
        return np.memmap(file, kind, "r", first * np.dtype(kind).itemsize, count)
    except (OSError, ValueError) as error:  # ValueError: it is empty, or became shorter
        raise _damaged(file, f"cannot be read ({error})") from None


def _damaged(file: Path, what: str) -> DataError:
    return DataError(f"{file}: {what}; copy or write the .bin and the .idx again")
