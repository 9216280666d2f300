"""Near-duplicates against exact Jaccard similarities."""

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from d2plm.core.vocabulary import Tokens
from d2plm.data import near_duplicates as module
from d2plm.data.near_duplicates import cluster_near_duplicates
from tests.conftest import MonkeyPatch, write_store

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
def test_the_clusters_are_the_components_of_exact_similarities(
    tmp_path: Path, hashes: int, monkeypatch: MonkeyPatch
) -> None:
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
