"""The similarity search for a vocabulary: MMseqs2, or shared n-grams for texts.

`prepare` clusters similar sequences to hold out whole clusters, and then searches the rest for
sequences similar to held-out ones. A `SimilaritySearch` provides both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from d2plm.core.vocabulary import Tokens, Vocabulary
from d2plm.data.homology import MMseqs, find_mmseqs, mmseqs_in, mmseqs_version, write_indexed_fasta
from d2plm.data.near_duplicates import cluster_near_duplicates
from d2plm.data.overlap import NgramIndex, find_overlaps
from d2plm.data.sources import read_sequences
from d2plm.data.split import Mask
from d2plm.data.store import SequenceStore
from d2plm.settings.data import ClusterSettings, Resources, SearchSettings, TextSettings

Report = Callable[[str], None]

# Tokens of an n-gram of near-duplicates (about five words) and of overlaps (about ten).
_NGRAMS = {"bytes": (25, 50), "tokenizer": (5, 13)}


class Finder(Protocol):
    """Finds similar sequences of a store."""

    def clusters(self, store: SequenceStore, selected: Mask) -> NDArray[np.int32]:
        """int32 [selected]: each one's cluster, as its first member's index among the selected."""

    def pairs(
        self,
        store: SequenceStore,
        direction: str,
        held_out: Mask,
        pool: Mask,
        more: Sequence[str | Path],
    ) -> NDArray[np.int64]:
        """int64 [pairs, 2]: pairs of similar sequences, one from the pool and one held out.

        Each row has the index of its sequence in the pool, and whether enough of both sequences is
        similar, 0 or 1.

        Args:
            direction: "from_held_out" queries with the held-out sequences, "from_training" with the
                pool.
            held_out, pool: bool [N].
            more: stores and files, whose sequences are added to the held-out ones.
        """


@dataclass(frozen=True, slots=True)
class SimilaritySearch:
    """How similar sequences are clustered and found.

    Attributes:
        program, version: the search program; manifests contain the version as `<program>_version`.
        clustering, search: the settings, as JSON.
        directions: directions of the search, as in `SplitSettings`.
        hits: description of the pairs that a search finds.
        thresholds: names of the clustering and search settings to raise if too many are similar.
        open: the finder for a preparation's (folder, key, report), with its log and temporary files
            in the folder.
    """

    program: str
    version: str
    clustering: Mapping[str, Any]
    search: Mapping[str, Any]
    directions: str
    hits: str
    thresholds: tuple[str, str]
    open: Callable[[Path, str, Report], AbstractContextManager[Finder]]


def similarity_search(
    vocabulary: Vocabulary,
    clustering: ClusterSettings,
    search: SearchSettings,
    directions: str,
    resources: Resources,
    text: TextSettings,
) -> SimilaritySearch:
    """The similarity search for a vocabulary; `DataError` if MMseqs2 is needed and missing."""
    if vocabulary.name in _NGRAMS:
        of_duplicates, of_overlaps = _NGRAMS[vocabulary.name]
        duplicates = {"ngram": of_duplicates, "similarity": text.near_duplicate_similarity}
        overlaps = {"ngram": text.overlap_ngram or of_overlaps, "share": text.overlap_share}
        return SimilaritySearch(
            *("text_similarity", "1", duplicates, overlaps),
            directions="from_training",  # the other direction finds the same pairs
            hits="overlaps with",
            thresholds=("near_duplicate_similarity", "overlap_share"),
            open=lambda folder, key, report: nullcontext(
                _OverlapFinder(duplicates, overlaps, report)
            ),
        )

    @contextmanager
    def opened(folder: Path, key: str, report: Report) -> Iterator[Finder]:
        with mmseqs_in(folder, resources, vocabulary) as mmseqs:
            with mmseqs.log.open("a") as log:
                log.write(f"# preparation {key}\n")
            yield _HomologFinder(mmseqs, clustering, search, report)

    return SimilaritySearch(
        *("mmseqs", mmseqs_version(find_mmseqs()), asdict(clustering), asdict(search)),
        directions=directions,
        hits="homologs of",
        thresholds=("cluster.min_seq_id", "search.min_seq_id"),
        open=opened,
    )


@dataclass(frozen=True, slots=True)
class _HomologFinder:
    mmseqs: MMseqs
    clustering: ClusterSettings
    search: SearchSettings
    report: Report

    def clusters(self, store: SequenceStore, selected: Mask) -> NDArray[np.int32]:
        count = int(selected.sum())
        if self.clustering.method == "none":
            return np.arange(count, dtype=np.int32)
        self.report(f"clustering {count:,} sequences with MMseqs2; its log is {self.mmseqs.log}")
        fasta = self.mmseqs.temporary_folder / "sequences.fasta"
        write_indexed_fasta(fasta, store, selected)
        found = self.mmseqs.cluster(fasta, count, self.clustering)
        fasta.unlink()
        return found

    def pairs(
        self,
        store: SequenceStore,
        direction: str,
        held_out: Mask,
        pool: Mask,
        more: Sequence[str | Path],
    ) -> NDArray[np.int64]:
        folder = self.mmseqs.temporary_folder
        held_fasta, pool_fasta = folder / "held_out.fasta", folder / "pool.fasta"
        write_indexed_fasta(held_fasta, store, held_out, _sequences(more, store.vocabulary))
        write_indexed_fasta(pool_fasta, store, pool)
        if direction == "from_held_out":
            hits = self.mmseqs.search(held_fasta, pool_fasta, self.search)
            places = hits.targets
        else:
            hits = self.mmseqs.search(pool_fasta, held_fasta, self.search)
            places = hits.queries
        return np.column_stack([places, hits.coverages >= self.search.coverage])


@dataclass(frozen=True, slots=True)
class _OverlapFinder:
    clustering: Mapping[str, Any]
    search: Mapping[str, Any]
    report: Report

    def clusters(self, store: SequenceStore, selected: Mask) -> NDArray[np.int32]:
        count = int(selected.sum())
        if self.clustering["similarity"] is None:
            return np.arange(count, dtype=np.int32)
        self.report(f"searching {count:,} texts for near-duplicates")
        return cluster_near_duplicates(store, selected, **self.clustering)

    def pairs(
        self,
        store: SequenceStore,
        direction: str,
        held_out: Mask,
        pool: Mask,
        more: Sequence[str | Path],
    ) -> NDArray[np.int64]:
        documents = chain(store.chosen(held_out), _sequences(more, store.vocabulary))
        index = NgramIndex(documents, self.search["ngram"])
        return find_overlaps(store, pool, index, self.search["share"])


def _sequences(paths: Sequence[str | Path], vocabulary: Vocabulary) -> Iterator[Tokens]:
    return (record.tokens for path in paths for record in read_sequences(path, vocabulary))
