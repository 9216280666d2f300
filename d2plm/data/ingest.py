"""From any input to a raw store of distinct sequences, with counts of the dropped records.

One streaming pass cleans and filters the records, an external sort brings equal sequences together,
and a second pass writes the store. Memory does not depend on the size of the input, at the price of
temporary files of the size of the sequences. A store appears only when it is complete; a killed
ingest starts again from the beginning.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, require, require_number
from d2plm.core.files import files_digest
from d2plm.core.number_text import counted
from d2plm.core.vocabulary import PROTEIN, Codons, Letters, Tokenised, Vocabulary
from d2plm.data.deduplication import Deduplicator
from d2plm.data.records import ALIAS_SEPARATOR, PIECE_SEPARATOR, RawRecords, refuse
from d2plm.data.sources import input_files, read_sources, resolve_inputs
from d2plm.data.store import MAX_RESIDUES, SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter
from d2plm.settings.data import Reading


def ingest(
    inputs: str | Path | Sequence[str | Path],
    output: Path,
    *,
    reading: Reading = Reading(),
    vocabulary: Vocabulary = PROTEIN,
    window: int | None = None,
    min_residues: int = 1,
    max_residues: int | None = None,
    provenance: dict[str, Any] | None = None,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[float, str], None] = lambda done, note: None,
) -> dict[str, Any]:
    """Write the distinct sequences of the inputs into a raw store, in the order of their digests.

    Args:
        inputs: paths or glob patterns of FASTA, LMDB, Parquet, CSV, JSON lines, plain text, Hugging
            Face datasets or Megatron corpora; `-` is standard input.
        window: longer records are cut into pieces of this number of tokens (the last may be
            shorter), named `name/1`, `name/2`, …; None cuts none. A record of many megabytes is
            read in parts that are cut separately, so there are shorter pieces within it, too.
        min_residues, max_residues: bounds of the records kept, in tokens before cutting. Without
            `max_residues`, long records can be read in parts.
        provenance: stored in the manifest, together with the counts.
        report: called with one line per stage.
        progress: called with the fraction of the work done, 0 … 1, and a note.

    Returns:
        The store's manifest; its provenance contains the numbers of `records`, of `duplicates`, and
        of records `dropped` by reason: records = sequences + duplicates + dropped; with a window
        also that of `pieces`, cut or whole: pieces = sequences + duplicates.

    Raises:
        DataError: an input is invalid or contains no usable record, or the store cannot be written.
        ConfigError: a setting is impossible.
    """
    check_bounds(min_residues, max_residues)
    require_number("window", window, optional=True, integer=True, low=1, high=MAX_RESIDUES)
    paths = resolve_inputs(inputs)
    in_parts = window is not None and max_residues is None and not isinstance(vocabulary, Codons)
    dropped: Counter[str] = Counter()
    records_read = pieces = duplicates = 0
    began = time.perf_counter()
    report(f"reading {', '.join(map(str, paths[:3]))}{' …' if len(paths) > 3 else ''}")
    with SequenceStoreWriter(output, "raw", provenance, vocabulary) as writer:
        sorter = Deduplicator(writer.scratch)
        last_piece = 0
        for records in read_sources(paths, reading, vocabulary, in_parts):
            if not records.names:
                continue
            found = records.tokenised(vocabulary)
            kept = _keep(records, found, vocabulary, min_residues, max_residues, reading, dropped)
            if window is None:
                _require_short(records, found, kept, vocabulary)
            names, starts, lengths = records.names, found.starts[kept], found.lengths[kept]
            if len(kept) < len(names):
                names = [names[i] for i in kept.tolist()]
            owners = [b""] * len(names)
            if window is not None:
                first = None if records.part is None else last_piece * (records.part > 0) + 1
                numbers = records_read - bool(records.part) + kept
                names, starts, lengths, owners = _cut(
                    names, starts, lengths, numbers, window, first
                )
                last_piece = (first or 1) + len(names) - 1
            sorter.add(names, found.tokens, starts, lengths, owners)
            records_read += 0 if records.part else len(records.names)
            pieces += len(names)
            rate = records_read / (time.perf_counter() - began)
            progress(0.7 * records.done, f"{records_read:,} sequences, {rate:,.0f}/s")
        written = 0
        for distinct in sorter.sorted():
            duplicates += distinct.duplicates
            writer.extend(distinct.names, distinct.sequences, distinct.records)
            written += len(distinct.names) + distinct.duplicates
            share = written / max(pieces, 1)
            progress(0.7 + 0.3 * share, f"{records_read:,} sequences, sorting")
        writer.provenance.update(
            input=[path.name for path in paths],
            min_residues=min_residues,
            max_residues=max_residues,
            records=records_read,
            duplicates=duplicates,
            dropped=dict(dropped),
            **({} if window is None else {"window": window, "pieces": pieces}),
        )
    store = SequenceStore(output)
    report(describe(store))
    return store.manifest


def describe(store: SequenceStore) -> str:
    """One line on a raw store: numbers of sequences, duplicates and dropped records."""
    provenance = store.manifest["provenance"]
    left_out = {"equal to another": provenance["duplicates"], **provenance["dropped"]}
    pieces = f" in {counted(provenance['pieces'], 'piece')}" if "pieces" in provenance else ""
    return (
        f"{counted(len(store), 'distinct sequence')}, "
        f"{counted(store.residues, store.vocabulary.nouns.token)}, "
        f"of {counted(provenance['records'], 'record')}{pieces}"
        + "".join(f"; {count:,} {reason}" for reason, count in left_out.items() if count)
    )


def source_digest(inputs: str | Path | Sequence[str | Path]) -> str | None:
    """SHA-256 over the bytes of the input files; None if standard input is among them.

    Raises `DataError` if a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in resolve_inputs(inputs):
        files = input_files(path)
        if not files:
            return None
        for file in files:
            digest.update(bytes.fromhex(files_digest(file)))
    return digest.hexdigest()


def digest_of_files(key: str, inputs: str | Path) -> str:
    """`source_digest` of inputs that are read more than once, given by the setting `key`.

    Raises `ConfigError` if standard input is among them, and `DataError` if a file cannot be read.
    """
    digest = source_digest(inputs)
    require(digest is not None, key, str(inputs), "a file or a folder, because it is read again")
    return str(digest)


def _keep(
    records: RawRecords,
    found: Tokenised,
    vocabulary: Vocabulary,
    min_residues: int,
    max_residues: int | None,
    reading: Reading,
    dropped: "Counter[str]",
) -> NDArray[np.int64]:
    """Indices of the records to keep; the others are counted by reason, or rejected."""
    illegal, lengths = found.illegal, found.lengths
    if records.part is not None:  # a part may consist of blanks
        min_residues = 0
    bad = illegal | (lengths < min(min_residues, 1))
    if reading.on_illegal == "error" and bad.any():
        refuse(
            records, int(bad.argmax()), vocabulary, ", or drop such records with on_illegal=drop"
        )
    # Codons and texts may have other faults than an illegal letter.
    faults = {
        "illegal letter" if isinstance(vocabulary, Letters) else "illegal": illegal,
        "no sequence": bad & ~illegal,
        f"shorter than {min_residues}": ~bad & (lengths < min_residues),
    }
    if max_residues is not None:
        faults[f"longer than {max_residues}"] = ~bad & (lengths > max_residues)
    for reason, concerned in faults.items():
        if concerned.any():
            dropped[reason] += int(concerned.sum())
    return np.flatnonzero(~np.logical_or.reduce([*faults.values()]))


def _require_short(
    records: RawRecords, found: Tokenised, kept: NDArray[np.int64], vocabulary: Vocabulary
) -> None:
    lengths = found.lengths[kept]
    if lengths.max(initial=0) > MAX_RESIDUES:
        longest = int(kept[lengths.argmax()])
        raise DataError(
            f"{records.where(longest, None)}: record "
            f"{records.names[longest].decode('utf-8', 'replace')!r} has {lengths.max():,} "
            f"{vocabulary.nouns.token}s, and a sequence at most {MAX_RESIDUES:,}; cut such records "
            "with window, or leave them out with max_residues"
        )


def _cut(
    names: list[bytes],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    numbers: NDArray[np.int64],
    window: int,
    first: int | None,
) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64], list[bytes]]:
    """Names, starts, lengths and records of the pieces of at most `window` tokens, in order.

    Args:
        numbers: indices of the records; returned as bytes for pieces, empty for an uncut record.
        first: number of the first piece of a record in parts; None for whole records, which keep
            their names if they are not cut.
    """
    counts = -(-lengths // window)
    if first is None and counts.max(initial=0) <= 1:
        return names, starts, lengths, [b""] * len(names)
    owner = np.repeat(np.arange(len(names)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    cut, records = [], []
    for own, piece in zip(owner.tolist(), (number + (first or 1)).tolist(), strict=True):
        whole = first is None and counts[own] == 1
        cut.append(names[own] if whole else _piece_name(names[own], piece))
        records.append(b"" if whole else numbers[own].tobytes())
    offsets = number * window
    return cut, starts[owner] + offsets, np.minimum(lengths[owner] - offsets, window), records


def _piece_name(name: bytes, number: int) -> bytes:
    suffix = b"%b%d" % (PIECE_SEPARATOR, number)
    return ALIAS_SEPARATOR.join(alias + suffix for alias in name.split(ALIAS_SEPARATOR))


def check_bounds(min_residues: int, max_residues: int | None) -> None:
    require_number("min_residues", min_residues, integer=True, low=1)
    require_number("max_residues", max_residues, optional=True, integer=True, low=min_residues)
