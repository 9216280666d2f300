"""Finding relatives: an MMseqs2 search of a collection among itself."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.data.homology import (
    MAX_E_VALUE,
    MMseqs,
    Resources,
    SearchSettings,
    mmseqs_in,
    write_indexed_fasta,
)
from d2plm.data.relatives import RelativesIndex
from d2plm.data.stages import Stages
from d2plm.data.store import SequenceStore

FORMAT_VERSION = 2  # of the results that are kept


def find_relatives(
    store: SequenceStore,
    mmseqs: MMseqs,
    sensitivity: float,
    most: int,
    report: Callable[[str], None] = lambda line: None,
) -> RelativesIndex:
    """Search the sequences of a store among themselves for relatives of each, itself left out.

    Args:
        sensitivity: of the prefilter, 1 (fast) … 7.5 (sensitive).
        most: relatives of each between two `IDENTITIES`.
        report: called with a line before and after the search.

    Raises:
        DataError: MMseqs2 fails.
        OSError: a file cannot be written.
    """
    settings = SearchSettings(min_seq_id=0, coverage=0, coverage_mode=0, sensitivity=sensitivity)
    report(
        f"searching {len(store):,} sequences for relatives among themselves with MMseqs2; its log "
        f"is {mmseqs.log}"
    )
    fasta = mmseqs.temporary_folder / "sequences.fasta"
    write_indexed_fasta(fasta, store, np.ones(len(store), dtype=np.bool_))
    hits = mmseqs.search(fasta, fasta, settings)
    fasta.unlink()
    found = (hits.queries, hits.targets, hits.identities)
    index = RelativesIndex.of_hits(len(store), *found, most)
    having = int((np.diff(index.bounds) > 0).sum())
    report(f"{having:,} of them have relatives, {len(index.targets):,} in all")
    return index


def held_out_relatives(
    held_out: SequenceStore,
    folder: Path,
    sensitivity: float = 7.0,
    *,
    resources: Resources = Resources(),
    report: Callable[[str], None] = lambda line: None,
) -> RelativesIndex:
    """The relatives of each held-out sequence among the others, searched once and kept.

    Args:
        folder: where the result is kept (see `Stages`), and MMseqs2's log.

    Raises:
        DataError: MMseqs2 is missing or fails, or `folder` cannot be written.
    """
    most = SearchSettings().max_seqs
    origin = [FORMAT_VERSION, held_out.digest, sensitivity, most, MAX_E_VALUE]

    def search() -> NDArray[np.float64]:
        with mmseqs_in(folder, resources) as mmseqs:
            index = find_relatives(held_out, mmseqs, sensitivity, most, report)
        queries = np.repeat(np.arange(len(index)), np.diff(index.bounds))
        return np.column_stack([queries, index.targets, index.identities])

    queries, targets, identities = Stages(folder, report).array("relatives", origin, search).T
    columns = (queries.astype(np.int64), targets.astype(np.int64), identities)
    return RelativesIndex.of_hits(len(held_out), *columns, most)
