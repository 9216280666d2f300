"""Quality of generated sequences of any alphabet: are they like others, repetitive, or copies?

As for proteins, a set is compared with as many held-out sequences and with samples of the best
baseline that ignores order, because divergences depend on the number of n-grams. No search for
similar sequences is made: only exact copies are found, in all training data. Training n-grams are
counted in a sample.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.vocabulary import Tokens, Vocabulary
from d2plm.data.ngrams import ngram_hashes
from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import (
    SparseCounts,
    counts_of,
    joined,
    sampled,
    sparse_counts,
    token_ranks,
)
from d2plm.evaluation.quality import (
    Counts,
    in_bins,
    in_training,
    js_divergence,
    length_counts,
    of_any_alphabet,
)
from d2plm.evaluation.result import REPEATED_TOKENS, Quality, SequenceSet
from d2plm.evaluation.terms import Terms

LONGEST_NGRAM = 3
SAMPLED_TOKENS = 2_000_000  # of training, for the n-grams


def compare_texts(
    sets: Mapping[str, Sequence[Tokens]], train: SequenceStore, max_residues: int, terms: Terms
) -> Quality:
    """Quality of several sets of sequences, beside one another.

    Args:
        sets: name → sequences of tokens [L]: the generated ones, held-out ones and samples of the
            reference, as many of each.
        max_residues: only this many tokens of a training sequence count, from its start.
    """
    vocabulary = train.vocabulary
    among = sampled(train, SAMPLED_TOKENS, max_residues)
    sample = [*joined(train[int(i)][:max_residues] for i in among)]
    rows = {name: [*joined(sequences)] for name, sequences in sets.items()}
    ranks = token_ranks([*sample, *(row for own in rows.values() for row in own)], vocabulary)
    of_training = sparse_counts(sample, LONGEST_NGRAM, ranks)
    lengths = np.bincount(np.minimum(train.lengths, max_residues))
    training = Counts(lengths, _tokens(sample, vocabulary))

    def figures(sequences: Sequence[Tokens], own: Sequence[Tokens]) -> SequenceSet:
        ngrams = sparse_counts(own, LONGEST_NGRAM, ranks)
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


def window_hashes(values: NDArray[Any], width: int) -> NDArray[np.uint64]:
    """uint64 [L − width + 1]: a hash of every run of `width` values, none where L is smaller."""
    return ngram_hashes(values, width) if len(values) >= width else np.empty(0, dtype=np.uint64)


def _divergence(one: SparseCounts, other: SparseCounts) -> float | None:
    runs = np.union1d(one.codes, other.codes)
    if not len(one.codes) or not len(other.codes):
        return None
    return js_divergence(one[runs], other[runs])


def _tokens(rows: Sequence[Tokens], vocabulary: Vocabulary) -> NDArray[np.int64]:
    counts: NDArray[np.int64] = np.sum([counts_of(row, vocabulary) for row in rows], axis=0)
    return counts
