"""Quality of generated sequences without a model: are they like natural ones, new and diverse?

A set is always compared with equal numbers of natural held-out sequences and samples of the best
baseline that ignores order, because n-gram divergence and diversity depend on the number of
sequences. For proteins, one MMseqs2 search of all sets and a clustering of each find homology; for
other alphabets only exact copies are found.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import rel_entr

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import (
    CANONICAL,
    CANONICAL_START,
    CANONICAL_STOP,
    PROTEIN,
    Tokens,
    Vocabulary,
    is_canonical,
)
from d2plm.data.homology import MMseqs, mmseqs_in
from d2plm.data.ngrams import ngram_hashes
from d2plm.data.store import MAX_RESIDUES, SequenceStore
from d2plm.evaluation.baselines import (
    SparseCounts,
    counts_of,
    joined,
    kmer_counts,
    sampled,
    some_of,
    sparse_counts,
    token_ranks,
)
from d2plm.evaluation.nearest import Nearest, find_nearest, nearest_search, write_fasta_of_tokens
from d2plm.evaluation.result import GENERATED, NATURAL, REPEATED_TOKENS, Quality, SequenceSet
from d2plm.evaluation.terms import REFERENCE, Terms
from d2plm.settings.data import ClusterSettings, Resources, SearchSettings

LONGEST_KMER = 3
LENGTH_BIN = 25  # residues per bin of the plotted histogram
IDENTITY_BIN = 0.05
CLOSE_IDENTITIES = (50, 90)  # percent
SAMPLED_TOKENS = 2_000_000  # training tokens sampled for the n-grams of other alphabets
KMER_SEQUENCES = 100_000  # number of training proteins sampled for the k-mers
# A window of low complexity, as in SEG (Wootton & Federhen, Computers & Chemistry 17, 149, 1993).
LOW_COMPLEXITY = {"low_complexity_window": 12, "low_complexity_bits": 2.2}

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class QualitySettings:
    """How quality is measured.

    Attributes:
        max_residues: number of leading residues counted per training protein, if generated ones
            cannot be longer; None for all.
        nearest: which training proteins count as similar.
        diversity: which sequences of a set are clustered together.
    """

    max_residues: int | None = None
    nearest: SearchSettings = nearest_search()
    diversity: ClusterSettings = ClusterSettings(method="cluster", min_seq_id=0.5, coverage=0.8)


@dataclass(frozen=True, slots=True)
class Counts:
    """Composition of sequences.

    Attributes:
        lengths: int64 [longest + 1], number of sequences of each length in tokens.
        tokens: int64 [K], count of each predicted token.
        kmers: for proteins: int64 [20^k] for k = 1 … LONGEST_KMER, from `kmer_counts`.
    """

    lengths: NDArray[np.int64]
    tokens: NDArray[np.int64]
    kmers: Sequence[NDArray[np.int64]] = ()


@dataclass(frozen=True, slots=True)
class Novelty:
    """Similarity of N sequences to the training proteins and to one another.

    Attributes:
        in_training: bool [N], whether a training protein is equal.
        clusters: number of homology clusters among them.
    """

    nearest: Nearest
    in_training: NDArray[np.bool_]
    clusters: int


def beside_others(
    generated: Sequence[Tokens],
    held_out: SequenceStore,
    max_residues: int,
    seed: int,
    sample: Callable[[Sequence[int], int], list[Tokens]],
    reference: str = REFERENCE,
) -> dict[str, Sequence[Tokens]]:
    """Generated sequences with the sets to compare them with, limited to the number held out.

    Args:
        held_out: natural sequences, sampled in the store's order and cut at `max_residues`.
        sample: (lengths, seed) → samples of the baseline `reference` with these lengths.
    """
    number = min(len(generated), len(held_out))
    lengths = [len(tokens) for tokens in generated[:number]]
    return {
        GENERATED: generated,
        NATURAL: [held_out[i][:max_residues] for i in sorted(some_of(held_out, number, seed))],
        reference: sample(lengths, seed),
    }


def compare_quality(
    sets: Mapping[str, Sequence[Tokens]],
    novelty: Mapping[str, Novelty],
    train: SequenceStore,
    settings: QualitySettings = QualitySettings(),
) -> Quality:
    """Quality of several sets of proteins.

    Args:
        sets: name → non-empty sequences of tokens, uint8 [L]; the sets should have equal sizes.
        novelty: from `find_novelty`.
    """
    training = training_counts(train, settings.max_residues)
    return Quality(
        {**asdict(settings), **LOW_COMPLEXITY, "kmer_sequences": KMER_SEQUENCES},
        {name: quality(sequences, training, novelty[name]) for name, sequences in sets.items()},
        in_bins(training.lengths),
        _frequencies(training),
    )


def compare_texts(
    sets: Mapping[str, Sequence[Tokens]], train: SequenceStore, max_residues: int, terms: Terms
) -> Quality:
    """Quality of several sets of sequences of any alphabet.

    Args:
        sets: name → sequences of tokens [L]; the sets should have equal sizes.
        max_residues: number of leading tokens counted per training sequence.
    """
    vocabulary = train.vocabulary
    among = sampled(train, SAMPLED_TOKENS, max_residues)
    sample = [*joined(train[int(i)][:max_residues] for i in among)]
    rows = {name: [*joined(sequences)] for name, sequences in sets.items()}
    ranks = token_ranks([*sample, *(row for own in rows.values() for row in own)], vocabulary)
    of_training = sparse_counts(sample, LONGEST_KMER, ranks)
    lengths = np.bincount(np.minimum(train.lengths, max_residues))
    training = Counts(lengths, _tokens(sample, vocabulary))

    def figures(sequences: Sequence[Tokens], own: Sequence[Tokens]) -> SequenceSet:
        ngrams = sparse_counts(own, LONGEST_KMER, ranks)
        counts = Counts(length_counts(sequences), _tokens(own, vocabulary))
        divergences = map(_divergence, ngrams, of_training)
        copied = in_training(sequences, train)
        windows = [window_hashes(tokens, REPEATED_TOKENS) for tokens in sequences]
        new = sum(len(np.unique(hashes)) for hashes in windows)
        return SequenceSet(
            **of_any_alphabet(sequences, counts, training, divergences, copied, vocabulary),
            distinct={
                str(n): len(one.codes) / max(int(one.counts.sum()), 1)
                for n, one in enumerate(ngrams, start=1)
            },
            repeated_share=1 - new / max(sum(map(len, windows)), 1) if new else 0.0,
        )

    by_set = {name: figures(sequences, rows[name]) for name, sequences in sets.items()}
    return Quality({}, by_set, in_bins(lengths), {}, terms)


def find_novelty(
    sets: Mapping[str, Sequence[Tokens]],
    train: SequenceStore,
    folder: Path,
    settings: QualitySettings = QualitySettings(),
    *,
    resources: Resources = Resources(),
    report: Report = lambda line: None,
) -> dict[str, Novelty]:
    """Novelty of each set, by one pass over the training proteins and one search for all sets.

    Args:
        sets: name → non-empty sequences of tokens, uint8 [L].
        folder: for MMseqs2's log, and for temporary files unless `resources` names another.
        report: called with one line per stage.

    Raises:
        DataError: if a set or sequence is empty or of another type, MMseqs2 is missing or fails, or
            a folder cannot be written.
    """
    for name, sequences in sets.items():
        _check(name, sequences)
    everything = list(chain.from_iterable(sets.values()))
    ends = np.cumsum([len(sequences) for sequences in sets.values()])[:-1]
    report("looking for exact copies of training proteins")
    copied = np.split(in_training(everything, train), ends)
    with mmseqs_in(folder, resources) as mmseqs:
        found = find_nearest(everything, train, settings.nearest, mmseqs, report=report)
        if settings.diversity.method != "none":
            report(f"clustering the sequences of {', '.join(sets)}")
        clusters = [count_clusters(one, settings.diversity, mmseqs) for one in sets.values()]
    nearest = map(Nearest, np.split(found.identities, ends), np.split(found.proteins, ends))
    parts = zip(nearest, copied, clusters, strict=True)
    return {name: Novelty(*part) for name, part in zip(sets, parts, strict=True)}


def quality(sequences: Sequence[Tokens], training: Counts, novelty: Novelty) -> SequenceSet:
    """Quality of one set of non-empty proteins, uint8 [L] each, given their novelty."""
    kmers = kmer_counts(sequences, LONGEST_KMER)
    counts = Counts(length_counts(sequences), kmers[0], kmers)
    divergences = map(js_divergence, counts.kmers, training.kmers)
    window, bits = LOW_COMPLEXITY.values()
    simple = sum(int(low_complexity(tokens, int(window), bits).sum()) for tokens in sequences)
    identities, bins = novelty.nearest.identities, round(1 / IDENTITY_BIN)
    # Identities have three decimals; integers avoid rounding at bin edges.
    places = np.minimum((identities * 1000).round().astype(np.int64) * bins // 1000, bins - 1)
    return SequenceSet(
        **of_any_alphabet(sequences, counts, training, divergences, novelty.in_training, PROTEIN),
        valid_share=float(np.mean([is_canonical(tokens).all() for tokens in sequences])),
        low_complexity_share=simple / sum(map(len, sequences)),
        hit_share=float((identities > 0).mean()),
        identity_mean=float(identities.mean()),
        identity_median=float(np.median(identities)),
        identity_above={
            f"{percent}": float((identities > percent / 100).mean()) for percent in CLOSE_IDENTITIES
        },
        clusters=novelty.clusters,
        diversity=novelty.clusters / len(sequences),
        residue_frequencies=_frequencies(counts),
        identity_histogram=np.bincount(places, minlength=bins).tolist(),
    )


def of_any_alphabet(
    sequences: Sequence[Tokens],
    counts: Counts,
    training: Counts,
    divergences: Iterable[float | None],
    copied: NDArray[np.bool_],
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    """The figures of `SequenceSet` that every alphabet has.

    Args:
        divergences: n-gram divergences from the training sequences, for n = 1, 2, …
        copied: bool [N], whether a training sequence is equal.
    """
    runs = [longest_run(tokens, vocabulary) for tokens in sequences]
    return {
        "sequences": len(sequences),
        "tokens": sum(map(len, sequences)),
        "token_kl": kl_divergence(counts.tokens, training.tokens + 1),
        "length_ks": ks_distance(counts.lengths, training.lengths),
        "ngram_js": {str(n): divergence for n, divergence in enumerate(divergences, start=1)},
        "longest_run_mean": float(np.mean(runs)),
        "longest_run_max": max(runs),
        "duplicate_share": 1 - len({tokens.tobytes() for tokens in sequences}) / len(sequences),
        "in_training_share": float(copied.mean()),
        "length_histogram": in_bins(counts.lengths),
    }


def length_counts(sequences: Iterable[Tokens]) -> NDArray[np.int64]:
    """int64 [longest + 1]: number of sequences of each length."""
    return np.bincount([len(tokens) for tokens in sequences])


def training_counts(
    train: SequenceStore, max_residues: int | None = None, kmer_sequences: int = KMER_SEQUENCES
) -> Counts:
    """Composition of the training proteins' first `max_residues`; k-mers from a sample of them."""
    limit = max_residues or MAX_RESIDUES
    of_lengths = np.zeros(min(int(train.lengths.max()), limit) + 1, dtype=np.int64)
    token_counts = np.zeros(256, dtype=np.int64)
    for block in train.blocks():
        lengths = np.diff(block.bounds)
        np.add.at(of_lengths, np.minimum(lengths, limit), 1)
        places = np.arange(len(block.tokens)) - np.repeat(block.bounds[:-1], lengths)
        token_counts += np.bincount(block.tokens[places < limit], minlength=256)
    sampled = (train[index][:limit] for index in sorted(some_of(train, kmer_sequences)))
    return Counts(
        of_lengths, token_counts[CANONICAL_START:CANONICAL_STOP], kmer_counts(sampled, LONGEST_KMER)
    )


def in_training(sequences: Iterable[Tokens], train: SequenceStore) -> NDArray[np.bool_]:
    """bool [N]: whether each sequence equals a training protein; the latter stay on disk."""
    kept = [tokens.astype(train.vocabulary.dtype, copy=False) for tokens in sequences]
    contents, lengths = [tokens.tobytes() for tokens in kept], np.unique([*map(len, kept)])
    wanted = set(contents)
    found: set[bytes] = set()
    for block in train.blocks():
        bounds = block.bounds.tolist()
        for i in np.flatnonzero(np.isin(np.diff(block.bounds), lengths)).tolist():
            content = block.tokens[bounds[i] : bounds[i + 1]].tobytes()
            if content in wanted:
                found.add(content)
    return np.array([content in found for content in contents], dtype=np.bool_)


def count_clusters(sequences: Iterable[Tokens], settings: ClusterSettings, mmseqs: MMseqs) -> int:
    """Number of homology clusters of sequences uint8 [L]; equal sequences are one cluster.

    A sequence too short for MMseqs2 is a cluster of its own.

    Raises:
        DataError: if MMseqs2 fails.
        OSError: if a file cannot be written.
    """
    distinct = sorted({tokens.tobytes() for tokens in sequences})
    if settings.method == "none":
        return len(distinct)
    fasta = mmseqs.temporary_folder / "sequences.fasta"
    write_fasta_of_tokens(fasta, (np.frombuffer(tokens, np.uint8) for tokens in distinct))
    return len(np.unique(mmseqs.cluster(fasta, len(distinct), settings)))


def kl_divergence(counts: NDArray[np.int64], reference: NDArray[np.int64]) -> float | None:
    """KL(counts ‖ reference) of two histograms, nats; None if either is empty.

    Infinite if `reference` lacks a value.
    """
    if not counts.sum() or not reference.sum():
        return None
    return float(rel_entr(counts / counts.sum(), reference / reference.sum()).sum())


def js_divergence(one: NDArray[np.int64], other: NDArray[np.int64]) -> float | None:
    """Jensen–Shannon divergence of two histograms, nats, 0 … ln 2; None if either is empty.

    The mean KL divergence to the mixture of both (Lin, IEEE Trans. Inf. Theory 37, 145, 1991).
    """
    if not one.sum() or not other.sum():
        return None
    p, q = one / one.sum(), other / other.sum()
    mixture = (p + q) / 2
    divergence = (rel_entr(p, mixture).sum() + rel_entr(q, mixture).sum()) / 2
    return max(float(divergence), 0.0)  # rounding may give -1e-17 for equal histograms


def ks_distance(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Kolmogorov–Smirnov distance of two samples given as histograms over 0, 1, 2, …"""
    size = max(len(one), len(other))
    below = [np.pad(h, (0, size - len(h))).cumsum() / h.sum() for h in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


def longest_run(tokens: Tokens, vocabulary: Vocabulary = PROTEIN) -> int:
    """Length of the longest run of one predicted token in tokens [L], or 0."""
    starts = np.flatnonzero(np.diff(tokens, prepend=np.uint8(0)) != 0)
    runs = np.diff(starts, append=len(tokens))
    return int(runs[vocabulary.is_predicted(tokens[starts])].max(initial=0))


def low_complexity(tokens: Tokens, window: int, bits: float) -> NDArray[np.bool_]:
    """bool [L]: which residues are in a window of low complexity, the first stage of SEG.

    A window is of low complexity if the Shannon entropy of its composition is at most `bits`; one
    with a non-canonical token is not. SEG's extension and trimming (Wootton & Federhen 1993) are
    left out.
    """
    low = np.zeros(len(tokens), dtype=np.bool_)
    for start in np.flatnonzero(simple_windows(tokens, window, bits)).tolist():
        low[start : start + window] = True
    return low


def simple_windows(tokens: Tokens, window: int, bits: float) -> NDArray[np.bool_]:
    """bool [L - window + 1]: which windows are of low complexity, see `low_complexity`."""
    if len(tokens) < window:
        return np.zeros(1, dtype=np.bool_)
    letters = np.arange(CANONICAL_START, CANONICAL_STOP, dtype=np.uint8)
    seen = np.zeros((len(tokens) + 1, len(letters)), dtype=np.int32)
    np.cumsum(tokens[:, None] == letters, axis=0, out=seen[1:])
    in_window = seen[window:] - seen[:-window]  # [L - window + 1, 20]
    # The entropy of counts n is log2 w - Σ n·log2 n / w; tabulate n·log2 n for n = 0 … w.
    terms = np.arange(window + 1) * np.log2(np.maximum(np.arange(window + 1), 1))
    entropy = np.log2(window) - terms[in_window].sum(axis=1) / window
    return np.asarray((entropy <= bits) & (in_window.sum(axis=1) == window))


def _check(name: str, sequences: Sequence[Tokens]) -> None:
    if not len(sequences):
        raise DataError(f"{name}: holds no sequences; give at least one")
    for index, tokens in enumerate(sequences):
        if tokens.dtype != np.uint8 or tokens.ndim != 1 or not len(tokens):
            raise DataError(
                f"{name}: sequence {index} must be a non-empty uint8 array [L], not "
                f"{tokens.dtype} {list(tokens.shape)}; leave it out"
            )


def _frequencies(counts: Counts) -> dict[str, float]:
    frequencies = counts.tokens / max(int(counts.tokens.sum()), 1)
    return dict(zip(CANONICAL, frequencies.tolist(), strict=True))


def in_bins(lengths: NDArray[np.int64]) -> list[int]:
    """A histogram of lengths in bins of LENGTH_BIN."""
    bins: list[int] = np.add.reduceat(lengths, np.arange(0, len(lengths), LENGTH_BIN)).tolist()
    return bins


def window_hashes(values: NDArray[Any], width: int) -> NDArray[np.uint64]:
    """uint64 [L − width + 1]: hash of every run of `width` values; empty if L is smaller."""
    return ngram_hashes(values, width) if len(values) >= width else np.empty(0, dtype=np.uint64)


def _divergence(one: SparseCounts, other: SparseCounts) -> float | None:
    runs = np.union1d(one.codes, other.codes)
    if not len(one.codes) or not len(other.codes):
        return None
    return js_divergence(one[runs], other[runs])


def _tokens(rows: Sequence[Tokens], vocabulary: Vocabulary) -> NDArray[np.int64]:
    counts: NDArray[np.int64] = np.sum([counts_of(row, vocabulary) for row in rows], axis=0)
    return counts
