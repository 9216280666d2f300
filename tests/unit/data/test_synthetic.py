"""SyntheticSequences: random residues that stand in for a store of the same lengths."""

import numpy as np
from scipy.stats import chisquare

from d2plm.core.vocabulary import CANONICAL, decode
from d2plm.data.store import Windows
from d2plm.data.synthetic import SyntheticSequences

LENGTHS = np.array([1, 5, 300, 2, 77], dtype=np.int32)


def test_sequences_have_their_lengths_and_residues_are_canonical_and_equally_frequent() -> None:
    lengths = np.array([1, 5, 300, 2, 77, *[500] * 200], dtype=np.int32)
    synthetic = SyntheticSequences(lengths)
    sequences = [synthetic[i] for i in range(len(synthetic))]
    assert [len(tokens) for tokens in sequences] == lengths.tolist()
    counts = np.bincount(np.concatenate(sequences))
    assert {*decode(np.flatnonzero(counts).astype(np.uint8))} == {*CANONICAL}
    assert chisquare(counts[counts > 0]).pvalue > 1e-3
    assert len({tokens.tobytes() for tokens in sequences[5:]}) == 200


def test_residues_and_digest_are_functions_of_seed_and_lengths() -> None:
    first, again = SyntheticSequences(LENGTHS), SyntheticSequences(LENGTHS)
    other, longer = SyntheticSequences(LENGTHS, seed=1), SyntheticSequences(LENGTHS + 1)
    assert all(np.array_equal(first[i], again[i]) for i in range(len(LENGTHS)))
    assert not np.array_equal(first[2], other[2])
    assert first.digest == again.digest
    assert len({first.digest, other.digest, longer.digest}) == 3


def test_windows_are_those_of_the_whole_sequences() -> None:
    synthetic = SyntheticSequences(LENGTHS)
    row = np.zeros(40, dtype=np.uint8)
    windows = ([2, 0, 4], [290, 0, 3], [10, 1, 5], [1, 20, 30])
    synthetic.copy_into(row, Windows(*map(np.array, windows)))
    expected = np.zeros(40, dtype=np.uint8)
    expected[1:11] = synthetic[2][290:]
    expected[20] = synthetic[0][0]
    expected[30:35] = synthetic[4][3:8]
    assert row.tolist() == expected.tolist()
