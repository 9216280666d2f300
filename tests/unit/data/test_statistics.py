"""Statistics of a store against plain numpy and Counter."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import CANONICAL, RESIDUES, decode, encode
from d2plm.data.statistics import store_statistics
from tests.conftest import write_store

Tokens = np.ndarray


def test_the_figures_are_those_of_plain_counting(tmp_path: Path, proteins: list[Tokens]) -> None:
    sequences = [*proteins[:2100], encode("XBUZOX")]
    clusters = [index // 3 if index < 900 else index for index in range(len(sequences))]
    store = write_store(tmp_path / "s", sequences, clusters)
    seen: list[int] = []
    found = store_statistics(store, seen.append)
    lengths = [len(tokens) for tokens in sequences]
    letters = Counter("".join(decode(tokens) for tokens in sequences))
    assert seen == [1024, 2048, 2101]
    assert (len(found.lengths), found.store.residues) == (2101, sum(lengths))
    quarter, median, three_quarters = np.percentile(lengths, [25, 50, 75])
    assert list(found.length_summary().values()) == pytest.approx(
        [min(lengths), quarter, median, np.mean(lengths), three_quarters, max(lengths)]
    )
    expected = [100 * letters[letter] / sum(lengths) for letter in RESIDUES]
    np.testing.assert_allclose(found.composition, expected)
    canonical = sum(letters[letter] for letter in CANONICAL)
    assert found.non_canonical == pytest.approx(100 * (1 - canonical / sum(lengths)))
    assert found.clusters == {"number": 300 + 1201, "largest": 3, "singletons": 1201}
    assert found.bytes_on_disk == sum(f.stat().st_size for f in (tmp_path / "s").iterdir())
    assert found.summary()["digests"] == store.manifest["digests"]


def test_a_store_of_other_tokens_has_no_statistics(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [np.array([29], dtype=np.uint8)])
    with pytest.raises(DataError, match="no sequence of residues"):
        store_statistics(store)
