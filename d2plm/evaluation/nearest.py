"""How similar a protein is to the most similar training protein, by an MMseqs2 search.

It splits an evaluation by what a model may have seen, and distinguishes copying from invention in
generated proteins. Identity is local: identical residues ÷ columns of the alignment, columns with
a gap counted, where the alignment covers enough of the query. Only the query's coverage counts,
because a domain copied from a longer training protein is no novelty; a split that requires
coverage of both lets such pairs pass. The search takes minutes, so its result is kept on disk.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core.alphabet import CANONICAL_START, RESIDUES, TOKENS, decode
from d2plm.core.cores import usable_cores
from d2plm.core.errors import DataError, require_number
from d2plm.data.homology import (
    MAX_E_VALUE,
    MMseqs,
    SearchSettings,
    find_mmseqs,
    write_indexed_fasta,
)
from d2plm.data.prepare import Resources
from d2plm.data.store import SequenceStore

FORMAT_VERSION = 1
IDENTITY_EDGES = (0.3, 0.5)
IDENTITY_BINS = ("< 30 %", "30–50 %", "> 50 %")
LOG = "mmseqs.log"
OF_THE_QUERY = 2  # MMseqs2's number for coverage of the query

_UNKNOWN = TOKENS.index("X")
_DECIMALS = 3  # of the identities that MMseqs2 writes

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Nearest:
    """The nearest training protein of each of N sequences.

    Attributes:
        identities: float64 [N], to it, 0 … 1; 0 without a hit.
        proteins: int64 [N], its index in the training store; -1 without a hit.
    """

    identities: NDArray[np.float64]
    proteins: NDArray[np.int64]

    def split(self, ends: NDArray[np.integer]) -> list["Nearest"]:
        """The parts that end before each of `ends`, and the rest."""
        parts = zip(np.split(self.identities, ends), np.split(self.proteins, ends), strict=True)
        return [Nearest(*part) for part in parts]


def nearest_search(sensitivity: float = 7.0) -> SearchSettings:
    """Search settings that count a training protein as similar; there is no least identity.

    Args:
        sensitivity: of the k-mer prefilter, 1 (fast) … 7.5 (sensitive).

    Raises:
        ConfigError: the sensitivity is out of range.
    """
    require_number("sensitivity", sensitivity, low=1, high=7.5)
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
    """Identity of each held-out protein to its nearest training protein, 0 … 1.

    Args:
        held_out: N proteins.
        train: what the model was trained on.
        folder: the result is kept here under the stores' digests and the settings, and read back
            instead of searching again unless it is damaged. MMseqs2's log is here, too. The folder
            is created where missing, and only read where the result is there.
        settings: of the search.
        resources: what MMseqs2 may use; temporary files go to `folder` if it names no other.
        report: called with one line per stage.

    Returns:
        float64 [N]: the largest identity among the hits (see the module), 0 without any.

    Raises:
        DataError: MMseqs2 is missing or fails, or `folder` cannot be written.
    """
    path = folder / f"nearest-{_key(held_out, train, settings)[:16]}.npz"
    kept = _kept(path, len(held_out), report)
    if kept is not None:
        return kept
    with mmseqs_in(folder, resources) as mmseqs:
        identities = find_nearest(held_out, train, settings, mmseqs, report=report).identities
    _keep(path, identities)
    return identities


def identity_bins(identities: NDArray[np.float64]) -> NDArray[np.int64]:
    """The place of each identity [N] in IDENTITY_BINS, int64 [N]; both edges are in the middle."""
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
    """Which training protein is nearest, for sequences in memory or streamed; nothing is kept.

    Args:
        queries: N sequences of residue tokens, uint8 [L]; those too short for MMseqs2 to find
            (see `d2plm.data.homology`) have no hit.
        train: the training proteins.
        settings: of the search.
        mmseqs: from `mmseqs_in`.
        report: called with a line before the search.

    Returns:
        Of each sequence the hit of the largest identity, the first in the store among equals.

    Raises:
        DataError: MMseqs2 fails, or a file cannot be written.
    """
    folder = mmseqs.temporary_folder
    query_fasta, train_fasta = folder / "queries.fasta", folder / "train.fasta"
    with _writing(folder):
        count = write_fasta_of_tokens(query_fasta, queries)
        write_indexed_fasta(train_fasta, train, np.ones(len(train), dtype=np.bool_))
    report(
        f"searching {len(train):,} training proteins for the nearest of {count:,} sequences with "
        f"MMseqs2; its log is {mmseqs.log}"
    )
    hits = mmseqs.search(query_fasta, train_fasta, settings, MAX_E_VALUE)
    best_first = np.lexsort((hits.targets, -hits.identities, hits.queries))
    queries_hit, places = np.unique(hits.queries[best_first], return_index=True)
    best = best_first[places]
    nearest = Nearest(np.zeros(count), np.full(count, -1))
    nearest.identities[queries_hit] = hits.identities[best].astype(np.float64).round(_DECIMALS)
    nearest.proteins[queries_hit] = hits.targets[best]
    return nearest


@contextmanager
def mmseqs_in(folder: Path, resources: Resources) -> Iterator[MMseqs]:
    """MMseqs2 with its log in `folder`, and a temporary folder that goes away at the end.

    Raises:
        DataError: MMseqs2 is missing, or a folder cannot be written.
    """
    binary = find_mmseqs()
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(
            prefix="nearest-", dir=resources.temporary_dir or folder, ignore_cleanup_errors=True
        )
    with scratch as temporary_folder:
        yield MMseqs(
            binary=binary,
            threads=resources.threads or usable_cores(),
            log=folder.resolve() / LOG,
            temporary_folder=Path(temporary_folder).resolve(),
            memory_limit=resources.memory_limit,
        )


def write_fasta_of_tokens(path: Path, sequences: Iterable[NDArray[np.uint8]]) -> int:
    """Write sequences under the names 0, 1, …, tokens that are no residue as X; their number."""
    count = 0
    with open(path, "w") as file:
        for tokens in sequences:
            is_residue = (tokens >= CANONICAL_START) & (tokens < CANONICAL_START + len(RESIDUES))
            file.write(f">{count}\n{decode(np.where(is_residue, tokens, np.uint8(_UNKNOWN)))}\n")
            count += 1
    return count


def _key(held_out: SequenceStore, train: SequenceStore, settings: SearchSettings) -> str:
    origin = [FORMAT_VERSION, held_out.digest, train.digest, asdict(settings), MAX_E_VALUE]
    return hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()


def _kept(path: Path, count: int, report: Report) -> NDArray[np.float64] | None:
    """The identities kept at `path`, if they are there and whole; zip archives have checksums."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            identities: NDArray[np.float64] = archive["identities"]
        if identities.shape != (count,) or identities.dtype != np.float64:
            raise ValueError(f"{identities.dtype} {list(identities.shape)}")
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged archive may raise anything
        report(f"{path} is damaged ({' '.join(str(error).split())}) and made again")
        return None
    report(f"reusing {path}")
    return identities


def _keep(path: Path, identities: NDArray[np.float64]) -> None:
    # A folder of its own for each writer: others may be at the same search.
    with (
        _writing(path),
        tempfile.TemporaryDirectory(prefix="nearest-", dir=path.parent) as folder,
    ):
        partial = Path(folder) / path.name
        np.savez(partial, identities=identities)
        os.replace(partial, path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); free space, change its permissions or "
            "choose another folder"
        ) from None
