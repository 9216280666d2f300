"""Statistics of a store against plain numpy and Counter; the table and the picture."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import CANONICAL, RESIDUES, decode, encode
from d2plm.data.statistics import StoreStatistics, plot, store_statistics
from tests.conftest import write_store

Tokens = np.ndarray


def _statistics(path: Path, *sequences: str) -> StoreStatistics:
    return store_statistics(write_store(path, [encode(sequence) for sequence in sequences]))


def test_the_figures_are_those_of_plain_counting(tmp_path: Path, proteins: list[Tokens]) -> None:
    sequences = [*proteins[:3000], encode("XBUZOX")]
    clusters = [index // 3 if index < 900 else index for index in range(len(sequences))]
    store = write_store(tmp_path / "s", sequences, clusters)
    seen: list[int] = []
    found = store_statistics(store, seen.append)
    lengths = [len(tokens) for tokens in sequences]
    letters = Counter("".join(decode(tokens) for tokens in sequences))
    assert seen == [1024, 2048, 3001]
    assert (len(found.lengths), found.store.residues) == (3001, sum(lengths))
    assert list(found.length_summary().values()) == pytest.approx(
        [
            min(lengths),
            np.percentile(lengths, 25),
            np.median(lengths),
            np.mean(lengths),
            np.percentile(lengths, 75),
            max(lengths),
        ]
    )
    assert dict(zip(RESIDUES, found.counts.tolist(), strict=True)) == {
        letter: letters[letter] for letter in RESIDUES
    }
    expected = [100 * letters[letter] / sum(lengths) for letter in RESIDUES]
    np.testing.assert_allclose(found.composition, expected)
    canonical = sum(letters[letter] for letter in CANONICAL)
    assert found.non_canonical == pytest.approx(100 * (1 - canonical / sum(lengths)))
    assert found.clusters == {"number": 300 + 2101, "largest": 3, "singletons": 2101}
    assert found.bytes_on_disk == sum(f.stat().st_size for f in (tmp_path / "s").iterdir())
    assert found.summary()["digests"] == store.manifest["digests"]


def test_a_store_of_other_tokens_has_no_statistics(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [np.array([29], dtype=np.uint8)])
    with pytest.raises(DataError, match="no sequence of residues"):
        store_statistics(store)


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_a_picture_is_drawn_in_a_folder_that_is_made(ending: str, tmp_path: Path) -> None:
    stores = {
        "train": _statistics(tmp_path / "a", "MKV" * 50, "MK"),
        "b": _statistics(tmp_path / "b", "X"),
    }
    file = tmp_path / "new" / f"stats{ending}"
    plot(stores, file, "title")
    assert file.read_bytes().startswith(b"\x89PNG" if ending == ".png" else b"<?xml")
    with pytest.raises(DataError, match="cannot be written"):
        plot(stores, file / "s.png", "title")
