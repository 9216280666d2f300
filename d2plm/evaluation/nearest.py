"""Identity of a protein to the most similar training protein, from an MMseqs2 search.

It splits an evaluation by similarity to the training data and tells copies from new sequences among
generated proteins. Identity is local: identical residues ÷ alignment columns, gaps included, if the
alignment covers enough of the query. Only the query's coverage counts, because a domain copied from
a longer training protein is not new. The search takes minutes, so its result is cached on disk.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core.vocabulary import CANONICAL_START, ESM2_TOKENS, RESIDUES, decode
from d2plm.data.cache import ArrayCache
from d2plm.data.homology import MAX_E_VALUE, OF_THE_QUERY, MMseqs, mmseqs_in, write_indexed_fasta
from d2plm.data.store import SequenceStore
from d2plm.settings.data import Resources, SearchSettings

FORMAT_VERSION = 1
IDENTITY_EDGES = (0.3, 0.5)
IDENTITY_BINS = ("< 30 %", "30–50 %", "> 50 %")

_UNKNOWN = ESM2_TOKENS.index("X")
_DECIMALS = 3  # precision of MMseqs2's identities

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Nearest:
    """The nearest training protein of each of N sequences.

    Attributes:
        identities: float64 [N], 0 … 1; 0 without a hit.
        proteins: int64 [N], index in the training store; -1 without a hit.
    """

    identities: NDArray[np.float64]
    proteins: NDArray[np.int64]


def nearest_search(sensitivity: float = 7.0) -> SearchSettings:
    """Search settings without a minimum identity.

    Args:
        sensitivity: of the k-mer prefilter, 1 (fast) … 7.5 (sensitive); ConfigError beyond.
    """
    return SearchSettings(min_seq_id=0.0, coverage_mode=OF_THE_QUERY, sensitivity=sensitivity)


def nearest_identities(
    held_out: SequenceStore,
    train: SequenceStore,
    folder: Path,
    settings: SearchSettings = nearest_search(),
    *,
    resources: Resources = Resources(),
    report: Report = lambda line: None,
) -> NDArray[np.float64]:
    """float64 [N]: identity of each held-out protein to its nearest training protein; 0 without.

    Args:
        folder: holds the cached result (see `ArrayCache`) and MMseqs2's log.
        resources: temporary files go to `folder` unless another is named here.
        report: called with one line per stage.

    Raises:
        DataError: if MMseqs2 is missing or fails, or `folder` cannot be written.
    """
    origin = [FORMAT_VERSION, held_out.digest, train.digest, asdict(settings), MAX_E_VALUE]

    def search() -> NDArray[np.float64]:
        with mmseqs_in(folder, resources) as mmseqs:
            return find_nearest(held_out, train, settings, mmseqs, report=report).identities

    return ArrayCache(folder, report).array("nearest", origin, search)


def identity_bins(identities: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64 [N]: index of each identity [N] in IDENTITY_BINS; both edges are in the middle bin."""
    low, high = IDENTITY_EDGES
    return (identities >= low).astype(np.int64) + (identities > high)


def find_nearest(
    queries: Iterable[NDArray[np.uint8]],
    train: SequenceStore,
    settings: SearchSettings,
    mmseqs: MMseqs,
    *,
    report: Report = lambda line: None,
) -> Nearest:
    """The hit with the largest identity for each query, the first among equals; not cached.

    Args:
        queries: N sequences of residue tokens, uint8 [L]; those too short for MMseqs2 (see
            `d2plm.data.homology`) have no hit.
        report: called with one line before the search.

    Raises:
        DataError: if MMseqs2 fails.
        OSError: if a file cannot be written.
    """
    folder = mmseqs.temporary_folder
    query_fasta, train_fasta = folder / "queries.fasta", folder / "train.fasta"
    count = write_fasta_of_tokens(query_fasta, queries)
    write_indexed_fasta(train_fasta, train, np.ones(len(train), dtype=np.bool_))
    report(
        f"searching {len(train):,} training proteins for the nearest of {count:,} sequences with "
        f"MMseqs2; its log is {mmseqs.log}"
    )
    hits = mmseqs.search(query_fasta, train_fasta, settings)
    best_first = np.lexsort((hits.targets, -hits.identities, hits.queries))
    queries_hit, places = np.unique(hits.queries[best_first], return_index=True)
    best = best_first[places]
    nearest = Nearest(np.zeros(count), np.full(count, -1))
    nearest.identities[queries_hit] = hits.identities[best].astype(np.float64).round(_DECIMALS)
    nearest.proteins[queries_hit] = hits.targets[best]
    return nearest


def write_fasta_of_tokens(path: Path, sequences: Iterable[NDArray[np.uint8]]) -> int:
    """Write sequences named 0, 1, … with X for tokens that are no residues; return their number."""
    count = 0
    with open(path, "w") as file:
        for tokens in sequences:
            is_residue = (tokens >= CANONICAL_START) & (tokens < CANONICAL_START + len(RESIDUES))
            file.write(f">{count}\n{decode(np.where(is_residue, tokens, np.uint8(_UNKNOWN)))}\n")
            count += 1
    return count
