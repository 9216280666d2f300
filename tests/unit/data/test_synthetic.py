"""SyntheticSequences: random residues that stand in for a store of the same lengths."""

from itertools import islice

import numpy as np
from scipy.stats import chisquare

from d2plm.core.vocabulary import CANONICAL, CLS, EOS, decode
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.store import SequenceStore, Windows
from d2plm.data.synthetic import SyntheticSequences

LENGTHS = np.array([1, 5, 300, 2, 77], dtype=np.int32)


def test_sequences_are_as_long_as_those_they_stand_for_and_of_canonical_residues() -> None:
    synthetic = SyntheticSequences(LENGTHS)
    sequences = [synthetic[i] for i in range(len(synthetic))]
    assert [len(tokens) for tokens in sequences] == LENGTHS.tolist()
    assert set("".join(decode(tokens) for tokens in sequences)) <= set(CANONICAL)


def test_residues_are_equally_frequent_and_sequences_differ() -> None:
    synthetic = SyntheticSequences(np.full(200, 500, dtype=np.int32))
    counts = np.bincount(np.concatenate([synthetic[i] for i in range(200)]))
    assert chisquare(counts[counts > 0]).pvalue > 1e-3
    assert len({synthetic[i].tobytes() for i in range(200)}) == 200


def test_residues_and_digest_are_functions_of_seed_and_lengths() -> None:
    first, again = SyntheticSequences(LENGTHS), SyntheticSequences(LENGTHS)
    other = SyntheticSequences(LENGTHS, seed=1)
    assert all(np.array_equal(first[i], again[i]) for i in range(len(LENGTHS)))
    assert not np.array_equal(first[2], other[2])
    longer = SyntheticSequences(LENGTHS + 1)
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


def test_a_loader_packs_them_as_it_packs_the_store(tiny_store: SequenceStore) -> None:
    def stream(sequences: SequenceStore | SyntheticSequences) -> PackedLoader:
        return PackedLoader([Collection(sequences)], token_budget=512, max_length=128)

    synthetic = SyntheticSequences(tiny_store.lengths)
    real = stream(tiny_store).stream(Position())
    for ours, theirs in islice(zip(stream(synthetic).stream(Position()), real, strict=True), 80):
        (ours_packed,), (theirs_packed,) = ours.micro_batches, theirs.micro_batches
        assert ours.following == theirs.following
        assert ours_packed.sequence_ids.tolist() == theirs_packed.sequence_ids.tolist()
        assert ours_packed.cu_seqlens.tolist() == theirs_packed.cu_seqlens.tolist()
        ends = np.isin(theirs_packed.tokens.numpy(), [CLS, EOS])
        assert np.isin(ours_packed.tokens.numpy(), [CLS, EOS]).tolist() == ends.tolist()
        for index, row in zip(ours_packed.sequence_ids.tolist(), ours_packed.split(), strict=False):
            residues = row.numpy()[~np.isin(row.numpy(), [CLS, EOS])]
            assert residues.tobytes() in synthetic[index].tobytes()
