"""Overlaps against sets of n-grams, and near-duplicates against exact Jaccard similarities."""

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2plm.core.vocabulary import Tokens
from d2plm.data import near_duplicates as module
from d2plm.data.near_duplicates import cluster_near_duplicates
from d2plm.data.ngrams import ngram_hashes
from d2plm.data.overlap import NgramIndex, find_overlaps
from tests.conftest import MonkeyPatch, write_store


def _ngrams(tokens: Tokens, length: int) -> list[bytes]:
    length = min(length, len(tokens))
    return [tokens[i : i + length].tobytes() for i in range(len(tokens) - length + 1)]


def _expected(
    pool: Sequence[Tokens], held: Sequence[Tokens], length: int, share: float
) -> list[tuple[int, bool]]:
    pairs = []
    theirs = [set(_ngrams(one, length)) for one in held]
    for place, tokens in enumerate(pool):
        own = _ngrams(tokens, length)
        shared = [len(one & set(own)) for one in theirs]
        of_theirs = [n > 0 and n >= share * len(one) for n, one in zip(shared, theirs, strict=True)]
        of_own = [n > 0 and n >= share * len(own) for n in shared]
        if sum(any(one in them for them in theirs) for one in own) >= share * len(own):
            of_own[int(np.argmax(shared))] = True
        pairs += [(place, a and b) for a, b in zip(of_theirs, of_own, strict=True) if a or b]
    return pairs


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("length", [1, 4, 13])
def test_overlaps_are_those_of_sets_of_ngrams(tmp_path: Path, length: int, share: float) -> None:
    draw = np.random.default_rng(length)
    texts = [draw.integers(4, 8, draw.integers(1, 120)).astype(np.uint8) for _ in range(150)]
    pool = list[Tokens]()
    for one, other in zip(texts[:100], texts[50:], strict=True):
        cut = draw.integers(0, len(one) + 1)
        pool.append(np.concatenate([one[:cut], draw.permutation(other)]))
    store = write_store(tmp_path / "store", [*pool, *texts])
    chosen = np.arange(len(store)) < len(pool)
    chosen[7] = False
    del pool[7]
    found = find_overlaps(store, chosen, NgramIndex(texts, length), share)
    expected = sorted(_expected(pool, texts, length, share))
    assert sorted((int(a), bool(b)) for a, b in found) == expected
    assert len(found)


def test_a_document_made_of_small_parts_of_many_held_out_ones_is_found() -> None:
    held = np.random.default_rng(0).integers(4, 24, (10, 100)).astype(np.uint8)
    index = NgramIndex(held, 5)
    assert index.overlaps(held[:, :20].ravel(), 0.5).tolist() == [False]
    assert index.overlaps(held[:, :3].ravel(), 0.5).tolist() == []
    assert index.overlaps(np.full(3, 4, dtype=np.uint8), 0.5).tolist() == []


@given(tokens=st.lists(st.integers(4, 6), min_size=1, max_size=200), length=st.integers(1, 60))
def test_two_hashes_are_equal_where_the_ngrams_are(tokens: list[int], length: int) -> None:
    hashes = ngram_hashes(np.array(tokens, dtype=np.uint8), length).tolist()
    length = min(length, len(tokens))
    ngrams = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    assert len(hashes) == len(ngrams)
    assert len(set(zip(ngrams, hashes, strict=True))) == len(set(ngrams)) == len(set(hashes))
    for dtype in (np.uint16, np.uint32):
        assert ngram_hashes(np.array(tokens, dtype=dtype), length).tolist() == hashes


NGRAM = 5


def _documents(draw: np.random.Generator) -> list[Tokens]:
    """Eight originals; of each, a copy with few changes, one with many, and one cut in half."""
    documents: list[Tokens] = []
    for _ in range(8):
        original = draw.integers(4, 24, 600).astype(np.uint8)
        few, many = original.copy(), original.copy()
        few[draw.choice(600, 4, replace=False)] = 3
        many[::9] = 3
        documents += [original, few, many, original[:250]]
    return documents


def _jaccard(one: Tokens, other: Tokens) -> float:
    sets = [{x[i : i + NGRAM].tobytes() for i in range(len(x) - NGRAM + 1)} for x in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize("hashes", [97, module._HASHES])
def test_clusters_are_components(tmp_path: Path, hashes: int, monkeypatch: MonkeyPatch) -> None:
    """Whether or not a document has more n-grams than are hashed at once."""
    monkeypatch.setattr(module, "_HASHES", hashes)
    documents = _documents(np.random.default_rng(0))
    selected = np.ones(len(documents), dtype=np.bool_)
    selected[[1, 6]] = False  # a copy and a stranger
    store = write_store(tmp_path / "store", documents)
    clusters = cluster_near_duplicates(store, selected, NGRAM, 0.75)
    kept = np.flatnonzero(selected).tolist()
    for place, one in enumerate(kept):
        for other_place, other in enumerate(kept[:place]):
            similarity = _jaccard(documents[one], documents[other])
            assert similarity > 0.88 or similarity < 0.5  # beyond the error of the estimate
            assert (clusters[place] == clusters[other_place]) == (similarity > 0.75)
    assert (clusters <= np.arange(len(kept))).all()
    assert (clusters == clusters[clusters]).all()


def test_a_thousand_copies_are_one_cluster_after_a_few_comparisons_each(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    copies = np.repeat(draw.integers(4, 24, (1, 300)).astype(np.uint8), 1000, axis=0)
    copies[np.arange(1000), draw.integers(0, 300, 1000)] = 4
    store = write_store(tmp_path / "store", [*np.unique(copies, axis=0)])
    with patch.object(module, "_agreeing", wraps=module._agreeing) as agreeing:
        clusters = cluster_near_duplicates(store, np.ones(len(store), np.bool_), NGRAM, 0.75)
    assert not clusters.any()
    bands = [call.args[0] for call in agreeing.call_args_list]
    assert max(len(module._agreeing(band)) for band in bands) < 2 * len(store)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_documents_as_short_as_an_ngram_are_alike_if_equal(tmp_path: Path, length: int) -> None:
    tokens = [np.full(length, token, dtype=np.uint8) for token in range(4, 24)]
    store = write_store(tmp_path / "store", tokens)
    clusters = cluster_near_duplicates(store, np.ones(20, dtype=np.bool_), NGRAM, 0.75)
    assert clusters.tolist() == list(range(20))
