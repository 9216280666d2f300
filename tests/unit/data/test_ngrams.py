"""Hashes of n-grams against the n-grams themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2plm.data.ngrams import ngram_hashes


@given(tokens=st.lists(st.integers(4, 6), min_size=1, max_size=200), length=st.integers(1, 60))
def test_two_hashes_are_equal_where_the_ngrams_are(tokens: list[int], length: int) -> None:
    hashes = ngram_hashes(np.array(tokens, dtype=np.uint8), length).tolist()
    length = min(length, len(tokens))
    ngrams = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    assert len(hashes) == len(ngrams)
    assert len(set(zip(ngrams, hashes, strict=True))) == len(set(ngrams)) == len(set(hashes))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_the_dtype_of_the_tokens_does_not_matter(dtype: type[np.unsignedinteger]) -> None:
    tokens = np.arange(4, 250, dtype=np.uint8)
    assert np.array_equal(ngram_hashes(tokens, 13), ngram_hashes(tokens.astype(dtype), 13))


def test_hashes_are_spread_over_all_64_bits() -> None:
    hashes = ngram_hashes(np.arange(4, 250, dtype=np.uint8).repeat(40), 7)
    shares = [float((hashes >> np.uint64(bit) & np.uint64(1)).mean()) for bit in range(64)]
    assert 0.4 < min(shares) < max(shares) < 0.6
