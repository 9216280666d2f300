"""Quality: every figure against plain Python, scipy or a case counted by hand."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon
from scipy.stats import ecdf, entropy

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import CANONICAL, encode
from d2plm.data.store import SequenceStore
from d2plm.evaluation import quality
from d2plm.evaluation.baselines import sample_composition as composition_samples
from d2plm.evaluation.nearest import Nearest, nearest_search
from d2plm.evaluation.quality import Novelty
from d2plm.evaluation.result import Quality, typed
from d2plm.settings.data import ClusterSettings, Resources
from tests.conftest import Tokens, write_store

StoreFactory = Callable[[list[Tokens]], SequenceStore]
FAST = quality.QualitySettings(
    nearest=nearest_search(4),
    diversity=ClusterSettings(method="linclust", min_seq_id=0.5, coverage=0.8),
)

texts = st.text("AAAACDWXK", min_size=1, max_size=60)
histograms = st.lists(st.integers(0, 9), min_size=5, max_size=5).map(np.array)


def counts_of(sequences: list[str]) -> quality.Counts:
    """By counting substrings."""
    kmers = []
    for k in (1, 2, 3):
        pieces = (text[i : i + k] for text in sequences for i in range(len(text) - k + 1))
        seen = Counter(piece for piece in pieces if {*piece} <= {*CANONICAL})
        kmers.append(np.array([seen["".join(piece)] for piece in product(CANONICAL, repeat=k)]))
    lengths = np.bincount([len(text) for text in sequences])
    return quality.Counts(lengths, kmers[0], kmers)


def assert_same(found: quality.Counts, expected: quality.Counts) -> None:
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    for one, other in zip(found.kmers, expected.kmers, strict=True):
        np.testing.assert_array_equal(one, other)


@given(texts)
def test_the_longest_run_is_that_of_one_canonical_residue(text: str) -> None:
    runs = [len(list(run)) for letter, run in groupby(text) if letter in CANONICAL]
    assert quality.longest_run(encode(text)) == max(runs, default=0)


@given(texts, st.integers(1, 14), st.sampled_from([0.0, 0.9, 1.37, 2.2]))
@settings(deadline=None)
def test_low_complexity_is_of_windows_of_small_entropy(text: str, window: int, bits: float) -> None:
    expected = [False] * len(text)
    for start in range(len(text) - window + 1):
        part = text[start : start + window]
        shares = [count / window for count in Counter(part).values()]
        if "X" not in part and -sum(p * math.log2(p) for p in shares) <= bits + 1e-12:
            expected[start : start + window] = [True] * window
    # No entropy of a composition of 1 … 14 residues is within rounding of these thresholds but 0.
    assert quality.low_complexity(encode(text), window, bits + 1e-12).tolist() == expected


@given(histograms, histograms)
def test_divergences_are_those_of_scipy(one: NDArray[np.int64], other: NDArray[np.int64]) -> None:
    kl, js = quality.kl_divergence(one, other + 1), quality.js_divergence(one, other)
    assert (kl is None) == (not one.any())
    assert (js is None) == (not one.any() or not other.any())
    if kl is not None:
        assert kl == pytest.approx(entropy(one, other + 1), abs=1e-12)
    if js is not None:
        assert js == pytest.approx(jensenshannon(one, other) ** 2, abs=1e-7)
        assert 0 <= js <= math.log(2) + 1e-12
        assert js == pytest.approx(quality.js_divergence(other, one), abs=1e-12)


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=30)


@given(lengths, lengths)
def test_the_ks_distance_is_that_of_scipy_s_functions(one: list[int], other: list[int]) -> None:
    at = np.arange(13)
    expected = np.abs(ecdf(one).cdf.evaluate(at) - ecdf(other).cdf.evaluate(at)).max()
    assert quality.ks_distance(np.bincount(one), np.bincount(other)) == pytest.approx(
        expected, abs=1e-12
    )


@pytest.mark.parametrize("limit", [None, 7])
def test_training_counts_are_of_substrings(make_store: StoreFactory, limit: int | None) -> None:
    random = np.random.default_rng(0)
    sequences = ["".join(random.choice([*"ACDWXU"], size)) for size in random.integers(1, 13, 1500)]
    store = make_store([encode(text) for text in sequences])  # more than one block
    found = quality.training_counts(store, limit)
    assert_same(found, counts_of([text[:limit] for text in sequences]))


def test_only_exact_copies_are_found(make_store: StoreFactory, proteins: list[Tokens]) -> None:
    store = make_store(proteins[:1500])
    changed = proteins[1400].copy()
    changed[0] ^= 1
    asked = [proteins[3], changed, proteins[1400], proteins[3], proteins[3][:-1], encode("M")]
    assert quality.in_training(asked, store).tolist() == [True, False, True, True, False, False]


def nearest(identities: list[float]) -> Nearest:
    return Nearest(np.array(identities), np.zeros(len(identities), dtype=np.int64))


def test_the_figures_of_a_set_counted_by_hand() -> None:
    sequences = ["AAAC", "AAAC", "WX", "C" * 12]
    training = ["AC", "CCC", "WWWWWW"]
    novelty = Novelty(nearest([0.9, 0.95, 0.0, 0.301]), np.array([True, True, False, False]), 3)
    found = quality.quality([encode(x) for x in sequences], counts_of(training), novelty)
    assert (found.sequences, found.tokens, found.valid_share) == (4, 22, 0.75)
    own = {"A": 6 / 21, "C": 14 / 21, "W": 1 / 21}
    smoothed = {"A": 2 / 31, "C": 5 / 31, "W": 7 / 31}  # 11 residues and 20 pseudo-counts
    expected = sum(p * math.log(p / smoothed[letter]) for letter, p in own.items())
    assert found.token_kl == pytest.approx(expected)
    # Shares up to lengths 2, 3, 4, 6 and 12: 1, 1, 3, 3, 4 quarters and 1, 2, 2, 3, 3 thirds.
    assert found.length_ks == pytest.approx(2 / 3 - 1 / 4)
    # AA AA AC AA AA AC, 11 CC; AC, CC CC, 5 WW
    own_js = jensenshannon([4, 2, 11, 0], [0, 1, 2, 5]) ** 2
    assert found.ngram_js["2"] == pytest.approx(own_js)
    assert (found.longest_run_mean, found.longest_run_max) == ((3 + 3 + 1 + 12) / 4, 12)
    assert found.low_complexity_share == 12 / 22
    assert (found.duplicate_share, found.in_training_share) == (0.25, 0.5)
    assert found.identity_mean == pytest.approx(2.151 / 4)
    assert found.identity_median == pytest.approx((0.301 + 0.9) / 2)
    assert (found.hit_share, found.identity_above) == (0.75, {"50": 0.5, "90": 0.25})
    assert (found.clusters, found.diversity) == (3, 0.75)
    assert found.residue_frequencies["W"] == pytest.approx(1 / 21)
    assert found.length_histogram == [4]
    assert [i for i, n in enumerate(found.identity_histogram) if n] == [0, 6, 18, 19]
    nothing = Novelty(nearest([0.0]), np.array([False]), 1)
    found = quality.quality([encode("XX")], counts_of(["ACD"]), nothing)
    assert found.token_kl is None
    assert found.ngram_js == {"1": None, "2": None, "3": None}


def test_copies_are_not_novel_and_shuffled_ones_are(tmp_path: Path, proteins: list[Tokens]) -> None:
    """Copies, near copies and short peptides beside natural proteins and shuffled ones."""
    store = write_store(tmp_path / "train", proteins[:200])
    random = np.random.default_rng(0)
    long = [tokens for tokens in proteins[:200] if 200 < len(tokens) < 400 and max(tokens) < 24]
    near = long[2].copy()
    near[5:-5:5] = 4 + (near[5:-5:5] - 4 + 7) % 20
    peptides = [encode("MKVLACDEFGHIKLMNPQRSTVWYMKVLAC"[:n]) for n in (1, 2, 5, 9, 14, 30)]
    others: Any = [*peptides, encode("MKX"), encode("A" * 40)]
    sets = {
        "generated": [long[0], long[0].copy(), long[1], near, *others],
        "natural": proteins[300:312],
        "shuffled": [random.permutation(tokens) for tokens in long[:12]],
    }
    lines: list[str] = []
    arguments = sets, store, tmp_path / "work", FAST
    novelty = quality.find_novelty(*arguments, resources=Resources(threads=1), report=lines.append)
    result = quality.compare_quality(sets, novelty, store, FAST)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mmseqs.log"]
    assert [line.split()[0] for line in lines] == ["looking", "searching", "clustering"]
    assert typed(Quality, json.loads(json.dumps(asdict(result), allow_nan=False))) == result
    assert sum(result.training_lengths) == 200
    sets = result.sets
    generated = sets["generated"]
    assert (generated.sequences, generated.clusters, generated.in_training_share) == (12, 11, 0.25)
    assert generated.hit_share == 4 / 12  # the peptides and the repeat are without a hit
    assert generated.identity_above == {"50": 4 / 12, "90": 3 / 12}
    assert generated.identity_mean == pytest.approx((3 + 0.8) / 12, abs=0.001)
    assert sets["shuffled"].hit_share == 0 == sets["shuffled"].identity_mean
    assert sets["shuffled"].diversity == 1
    assert sets["natural"].in_training_share == 0


def test_what_is_no_sequence_is_rejected_first(tmp_path: Path, tiny_store: SequenceStore) -> None:
    empty, wide = [encode("MK"), encode("")], [np.array([4, 5])]
    for sequences, place in (([], ""), (empty, "sequence 1"), (wide, "sequence 0")):
        report = Mock()
        with pytest.raises(DataError, match=f"generated: .*{place}"):
            quality.find_novelty({"generated": sequences}, tiny_store, tmp_path, report=report)
        assert not report.called


def test_composition_samples_have_the_moments_of_a_dirichlet_multinomial() -> None:
    alpha, length, number = np.linspace(0.3, 2.5, 20), 50, 8_000
    total = alpha.sum()
    samples = composition_samples(alpha, [length] * number, seed=1)
    assert all(s.dtype == np.uint8 and len(s) == length for s in samples)
    counts = np.array([np.bincount(s, minlength=24)[4:] for s in samples])
    assert (counts.sum(axis=1) == length).all()
    p = alpha / total
    variance = length * p * (1 - p) * (length + total) / (1 + total)
    np.testing.assert_allclose(counts.mean(axis=0), length * p, atol=4 * math.sqrt(8 / number))
    np.testing.assert_allclose(counts.var(axis=0), variance, rtol=0.15)
    rows = np.array(samples)  # without order: a neighbour is as often the same as one far away
    beside, far = ((rows[:, 0] == rows[:, place]).mean() for place in (1, 40))
    same = (alpha * (alpha + 1)).sum() / (total * (total + 1))
    assert beside == pytest.approx(same, abs=0.015) and far == pytest.approx(same, abs=0.015)
