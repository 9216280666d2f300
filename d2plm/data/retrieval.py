"""Finding relatives: an MMseqs2 search of a collection against itself or another one.

Relatives from another collection are chosen for diversity: a hit that repeats an earlier one adds
nothing. MMseqs2's own filter (`filterresult --max-seq-id`) is not used because it includes the
protein itself and would remove its close relatives. Instead, hits are compared residue by residue
in their alignments to the protein, which needs no further search.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import ConfigError, DataError
from d2plm.core.locks import locked
from d2plm.core.vocabulary import decode
from d2plm.data.cache import ArrayCache
from d2plm.data.fasta import write_fasta
from d2plm.data.homology import (
    GAP,
    LOG,
    MAX_E_VALUE,
    OF_THE_QUERY,
    Alignment,
    MMseqs,
    mmseqs_in,
    write_indexed_fasta,
)
from d2plm.data.ingest import describe, ingest, source_digest
from d2plm.data.manifest import MANIFEST, is_prepared, open_prepared
from d2plm.data.relatives import RelativesIndex
from d2plm.data.store import SequenceStore, add_to_digest
from d2plm.settings.data import Reading, Resources, RetrievalSettings, SearchSettings

FORMAT_VERSION = 3  # of cached results
MOST_HITS = 10_000  # per protein; most may be near-copies of it or of each other

Tokens = NDArray[np.uint8]
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Relative:
    """A relative of a protein.

    Attributes:
        name: name in the reference; for several equal proteins the first one's.
        identity: identity to the protein, identical residues ÷ aligned columns, 0 … 1.
        coverage: fraction of the protein that the alignment covers.
        tokens: uint8 [L], its residues.
    """

    name: str
    identity: float
    coverage: float
    tokens: Tokens = field(repr=False)


def find_relatives(
    store: SequenceStore,
    mmseqs: MMseqs,
    sensitivity: float,
    most: int,
    report: Callable[[str], None] = lambda line: None,
    chosen: Sequence[int] | None = None,
) -> RelativesIndex:
    """Search the sequences of a store among themselves for relatives of each, excluding itself.

    Raises `DataError` if MMseqs2 fails, `OSError` if a file cannot be written.

    Args:
        sensitivity: sensitivity of the prefilter, 1 (fast) … 7.5 (sensitive).
        most: maximum number of relatives of each protein between successive `IDENTITIES`.
        report: called with a line before and after the search.
        chosen: the sequences whose relatives are searched, in ascending order; None for all.
    """
    settings = SearchSettings(min_seq_id=0, coverage=0, coverage_mode=0, sensitivity=sensitivity)
    numbers = np.arange(len(store)) if chosen is None else np.asarray(chosen)
    report(
        f"searching {len(store):,} sequences for relatives of {len(numbers):,} of them with "
        f"MMseqs2; its log is {mmseqs.log}"
    )
    everything = queries = mmseqs.temporary_folder / "sequences.fasta"
    write_indexed_fasta(everything, store, np.ones(len(store), dtype=np.bool_))
    if chosen is not None:
        queries = mmseqs.temporary_folder / "chosen.fasta"
        write_indexed_fasta(queries, store, np.isin(np.arange(len(store)), numbers))
    hits = mmseqs.search(queries, everything, settings)
    everything.unlink()
    found = (numbers[hits.queries], hits.targets, hits.identities)
    index = RelativesIndex.of_hits(len(store), *found, most)
    having = int((np.diff(index.bounds) > 0).sum())
    report(f"{having:,} of them have relatives, {len(index.targets):,} in all")
    return index


def held_out_relatives(
    held_out: SequenceStore,
    folder: Path,
    sensitivity: float = 7.0,
    *,
    chosen: Sequence[int] | None = None,
    resources: Resources = Resources(),
    report: Callable[[str], None] = lambda line: None,
) -> RelativesIndex:
    """The relatives of each held-out sequence among the others, searched once and cached.

    Raises `DataError` if MMseqs2 is missing or fails, or `folder` cannot be written.

    Args:
        chosen: the sequences whose relatives are searched, in ascending order; None for all.
        folder: folder of the cached result (see `ArrayCache`) and MMseqs2's log.
    """
    most = SearchSettings().max_seqs
    origin = [FORMAT_VERSION, held_out.digest, sensitivity, most, MAX_E_VALUE]
    if chosen is not None and len(chosen) < len(held_out):
        origin.append([*chosen])

    def search() -> NDArray[np.float64]:
        with mmseqs_in(folder, resources) as mmseqs:
            index = find_relatives(held_out, mmseqs, sensitivity, most, report, chosen)
        queries = np.repeat(np.arange(len(index)), np.diff(index.bounds))
        return np.column_stack([queries, index.targets, index.identities])

    queries, targets, identities = ArrayCache(folder, report).array("relatives", origin, search).T
    columns = (queries.astype(np.int64), targets.astype(np.int64), identities)
    return RelativesIndex.of_hits(len(held_out), *columns, most)


def retrieve_relatives(
    proteins: Sequence[Tokens],
    reference: str | Path,
    folder: Path,
    settings: RetrievalSettings = RetrievalSettings(),
    *,
    resources: Resources = Resources(),
    report: Report = lambda line: None,
    progress: Callable[[float, str], None] = lambda done, note: None,
) -> list[list[Relative]]:
    """The relatives of each protein in a reference collection, searched once and cached.

    A protein that is itself in the reference is never its own relative. Raises `DataError` if the
    reference cannot be read, MMseqs2 is missing or fails, or `folder` cannot be written.

    Args:
        proteins: uint8 residue tokens, each with at least one residue.
        reference: a file or folder as in `open_reference`.
        folder: folder of the result (see `ArrayCache`), the reference's store and MMseqs2's log.
        report: called with a line per stage.
        progress: called with the fraction of the reference that has been read, and a note.
    """
    if not proteins:
        return []
    store = open_reference(reference, folder, report, progress)
    digest = hashlib.sha256()
    add_to_digest(digest, np.array([len(one) for one in proteins]), b"".join(map(bytes, proteins)))
    origin = [FORMAT_VERSION, digest.hexdigest(), store.digest, asdict(settings)]

    def search() -> NDArray[np.float64]:
        report(
            f"searching {len(store):,} proteins for relatives of {len(proteins):,} with MMseqs2; "
            f"its log is {folder / LOG}"
        )
        with mmseqs_in(folder, resources) as mmseqs:
            rows = [*_search(proteins, store, mmseqs, settings)]
        return np.array(rows, dtype=np.float64).reshape(-1, 4)

    found: list[list[Relative]] = [[] for _ in proteins]
    themselves = set()
    for *pair, identity, coverage in ArrayCache(folder, report).array("retrieval", origin, search):
        query, target = map(int, pair)
        tokens = store[target]
        if np.array_equal(tokens, proteins[query]):
            themselves.add(query)
        else:
            name = store.name(target)
            found[query].append(Relative(name, float(identity), float(coverage), tokens))
    report(
        f"{len(themselves):,} of {len(proteins):,} proteins are in the reference themselves; no "
        "protein is taken as its own relative"
    )
    return found


def open_reference(
    reference: str | Path,
    folder: Path,
    report: Report = lambda line: None,
    progress: Callable[[float, str], None] = lambda done, note: None,
) -> SequenceStore:
    """The store of a reference collection.

    Raises `DataError` if the reference cannot be read, or `folder` cannot be written.

    Args:
        reference: a store; prepared data (its training proteins); or any input of `ingest`, in
            which records that are no proteins are dropped.
        folder: folder into which other inputs are ingested, unless that was done before.
    """
    path = Path(os.path.expanduser(reference))
    if is_prepared(path):
        return open_prepared(path).splits["train"]
    if (path / MANIFEST).is_file():
        return SequenceStore(path)
    digest = source_digest(reference)
    if digest is None and path.is_dir():
        raise DataError(f"{path}: is empty; give FASTA files, a store or prepared data")
    if digest is None:
        wanted = "a file or a folder, not standard input, as it may be read again"
        raise ConfigError(f"must be {wanted}", {"reference": str(reference)})
    ingested = folder / f"reference-{digest[:16]}"
    lock, busy = ingested.with_suffix(".wait"), f"another process is reading {reference}"
    with locked(lock, busy):
        with suppress(DataError):  # missing or incomplete
            store = SequenceStore(ingested)
            report(f"reusing {ingested}: {describe(store)}")
            return store
        reading = Reading(on_illegal="drop")
        ingest(reference, ingested, reading=reading, report=report, progress=progress)
    return SequenceStore(ingested)


def _search(
    proteins: Sequence[Tokens], store: SequenceStore, mmseqs: MMseqs, settings: RetrievalSettings
) -> Iterator[tuple[int, int, float, float]]:
    """(protein, sequence of the store, identity, coverage): itself, then its relatives."""
    search = SearchSettings(
        min_seq_id=0,
        coverage=settings.min_coverage,
        coverage_mode=OF_THE_QUERY,
        sensitivity=settings.sensitivity,
        max_seqs=MOST_HITS + settings.max_relatives,
    )
    queries, targets = (mmseqs.temporary_folder / name for name in ("proteins", "reference"))
    write_fasta(queries, ((str(number), decode(one)) for number, one in enumerate(proteins)))
    write_indexed_fasta(targets, store, np.ones(len(store), dtype=np.bool_))
    hits = mmseqs.alignments(queries, targets, search, settings.max_e_value)
    for query, own in groupby(hits, key=attrgetter("query")):
        others = []
        for hit in own:
            as_long = store.lengths[hit.target] == len(proteins[query])
            if as_long and np.array_equal(store[hit.target], proteins[query]):
                yield query, hit.target, hit.identity, hit.coverage
            elif hit.identity < settings.identity_below:
                others.append(hit)
        for hit in diverse(others, settings.max_relatives, settings.mutual_identity_below):
            yield query, hit.target, hit.identity, hit.coverage


def diverse(hits: Sequence[Alignment], most: int, below: float | None) -> list[Alignment]:
    """The first `most` hits of a query that do not repeat an earlier one.

    A hit repeats another one if at least the fraction `below` of its residues aligned to the query
    is the same in both; None disables the comparison. Insertions are ignored.
    """
    chosen: list[Alignment] = []
    letters = np.empty((min(most, len(hits)), len(hits[0].opposite) if hits else 0), dtype=np.uint8)
    for hit in hits:
        if len(chosen) == most:
            break
        aligned, earlier = hit.opposite != GAP, letters[: len(chosen)]
        shared = (earlier == hit.opposite)[:, aligned].mean(1)
        if below is None or not (shared >= below).any():
            letters[len(chosen)] = hit.opposite
            chosen.append(hit)
    return chosen
