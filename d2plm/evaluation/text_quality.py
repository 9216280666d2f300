"""Quality of generated sequences of any alphabet: are they like others, repetitive, or copies?

As for proteins, a set is compared with as many held-out sequences and with samples of the best
baseline that ignores order, because divergences depend on the number of n-grams. No search for
similar sequences is made: only exact copies are found, in all training data. Training n-grams are
counted in a sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
    in_bins,
    in_training,
    js_divergence,
    kl_divergence,
    ks_distance,
    longest_run,
)
from d2plm.evaluation.terms import Terms

FORMAT_VERSION = 1
LONGEST_NGRAM = 3
REPEATED_TOKENS = 8  # a run of so many that has occurred before in the sequence is a repetition
SAMPLED_TOKENS = 2_000_000  # of training, for the n-grams


def compare_texts(
    sets: Mapping[str, Sequence[Tokens]], train: SequenceStore, max_residues: int, terms: Terms
) -> dict[str, Any]:
    """Quality of several sets of sequences, beside one another.

    Args:
        sets: name → sequences of tokens [L]: the generated ones, held-out ones and samples of the
            reference, as many of each.
        max_residues: only this many tokens of a training sequence count, from its start.

    Returns:
        JSON content: `settings`, `training` (the lengths) and `sets`, name → figures; shares are
        0 … 1, and None stands for a figure of nothing.

        - sequences, tokens: their numbers.
        - token_kl_nats: KL(set ‖ training) of the token frequencies, the training's with one
          pseudo-count for each token.
        - length_ks: Kolmogorov–Smirnov distance of the lengths.
        - ngram_js_nats: for n = "1", "2", "3" the Jensen–Shannon divergence of the n-grams to the
          sampled training sequences', 0 … ln 2; too large for a finite set.
        - distinct: for n = "1", "2", "3" the distinct n-grams ÷ all n-grams of the set.
        - longest_run_mean, longest_run_max: of one token in a sequence.
        - repeated_share: of the runs of REPEATED_TOKENS tokens, those that the sequence had before.
        - duplicate_share, in_training_share: of the sequences, copies of another one beyond the
          first, and those equal to a training sequence.
    """
    vocabulary = train.vocabulary
    among = sampled(train, SAMPLED_TOKENS, max_residues)
    sample = [*joined(train[int(i)][:max_residues] for i in among)]
    rows = {name: [*joined(sequences)] for name, sequences in sets.items()}
    ranks = token_ranks([*sample, *(row for own in rows.values() for row in own)], vocabulary)
    training = sparse_counts(sample, LONGEST_NGRAM, ranks)
    lengths = np.bincount(np.minimum(train.lengths, max_residues))
    return {
        "format_version": FORMAT_VERSION,
        "terms": asdict(terms),
        "settings": {"repeated_tokens": REPEATED_TOKENS},
        "digests": {"train": train.digest},
        "training": {"sequences": len(train), "length_histogram": in_bins(lengths)},
        "sets": {
            name: {
                **_figures(sequences, sparse_counts(rows[name], LONGEST_NGRAM, ranks), training),
                "token_kl_nats": kl_divergence(
                    _tokens(rows[name], vocabulary), _tokens(sample, vocabulary) + 1
                ),
                "length_ks": ks_distance(_lengths(sequences), lengths),
                "longest_run_mean": float(np.mean([longest_run(x, vocabulary) for x in sequences])),
                "longest_run_max": max(longest_run(x, vocabulary) for x in sequences),
                "in_training_share": float(in_training(sequences, train).mean()),
            }
            for name, sequences in sets.items()
        },
    }


def _figures(
    sequences: Sequence[Tokens], ngrams: Sequence[SparseCounts], training: Sequence[SparseCounts]
) -> dict[str, Any]:
    windows = [window_hashes(tokens, REPEATED_TOKENS) for tokens in sequences]
    distinct = sum(len(np.unique(hashes)) for hashes in windows)
    return {
        "sequences": len(sequences),
        "tokens": sum(map(len, sequences)),
        "ngram_js_nats": {
            str(n): _divergence(own, others)
            for n, (own, others) in enumerate(zip(ngrams, training, strict=True), start=1)
        },
        "distinct": {
            str(n): len(own.codes) / max(int(own.counts.sum()), 1)
            for n, own in enumerate(ngrams, start=1)
        },
        "repeated_share": 1 - distinct / max(sum(map(len, windows)), 1) if distinct else 0.0,
        "duplicate_share": 1 - len({tokens.tobytes() for tokens in sequences}) / len(sequences),
        "length_histogram": in_bins(_lengths(sequences)),
    }


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


def _lengths(sequences: Sequence[Tokens]) -> NDArray[np.int64]:
    return np.bincount([len(tokens) for tokens in sequences])
