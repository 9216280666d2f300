"""Quality: every figure against plain Python, scipy or a case counted by hand."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon
from scipy.stats import ecdf, entropy

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import CANONICAL, MASK, decode, encode
from d2plm.data.homology import mmseqs_in
from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import fit_baselines, fit_composition, kmer_counts
from d2plm.evaluation.baselines import sample_composition as composition_samples
from d2plm.evaluation.nearest import Nearest, nearest_search
from d2plm.evaluation.plots import plot_lengths, plot_novelty, plot_residues
from d2plm.evaluation.quality import (
    Counts,
    Novelty,
    QualitySettings,
    compare_quality,
    count_clusters,
    find_novelty,
    in_training,
    js_divergence,
    kl_divergence,
    ks_distance,
    longest_run,
    low_complexity,
    quality,
    training_counts,
)
from d2plm.evaluation.result import Quality, typed
from d2plm.settings.data import ClusterSettings, Resources
from tests.conftest import write_store

Tokens = NDArray[np.uint8]
StoreFactory = Callable[[list[Tokens]], SequenceStore]
FAST = QualitySettings(
    nearest=nearest_search(4),
    diversity=ClusterSettings(method="linclust", min_seq_id=0.5, coverage=0.8),
)

texts = st.text("AAAACDWXK", min_size=1, max_size=60)
histograms = st.lists(st.integers(0, 9), min_size=5, max_size=5).map(np.array)


def counts_of(sequences: list[str]) -> Counts:
    """By counting substrings."""
    kmers = []
    for k in (1, 2, 3):
        table = np.zeros(20**k, dtype=np.int64)
        for text in sequences:
            for i in range(len(text) - k + 1):
                if all(letter in CANONICAL for letter in text[i : i + k]):
                    digits = [CANONICAL.index(letter) for letter in text[i : i + k]]
                    table[sum(d * 20 ** (k - 1 - j) for j, d in enumerate(digits))] += 1
        kmers.append(table)
    lengths = np.bincount([len(text) for text in sequences])
    return Counts(lengths, kmers[0], kmers)


def assert_same(found: Counts, expected: Counts) -> None:
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    for one, other in zip(found.kmers, expected.kmers, strict=True):
        np.testing.assert_array_equal(one, other)


# --- runs and low complexity -----------------------------------------------------------------


@given(texts)
def test_the_longest_run_is_that_of_one_canonical_residue(text: str) -> None:
    runs = [len(list(run)) for letter, run in groupby(text) if letter in CANONICAL]
    assert longest_run(encode(text)) == max(runs, default=0)


def test_special_tokens_are_no_run() -> None:
    assert longest_run(np.array([0, 0, 0, 5, 32, 32, 32], dtype=np.uint8)) == 1
    assert longest_run(np.zeros(4, dtype=np.uint8)) == 0


@given(texts, st.integers(1, 14), st.sampled_from([0.0, 0.9, 1.37, 2.2]))
@settings(deadline=None)
def test_low_complexity_is_what_windows_of_small_entropy_cover(
    text: str, window: int, bits: float
) -> None:
    expected = [False] * len(text)
    for start in range(len(text) - window + 1):
        part = text[start : start + window]
        shares = [count / window for count in Counter(part).values()]
        if "X" not in part and -sum(p * math.log2(p) for p in shares) <= bits + 1e-12:
            expected[start : start + window] = [True] * window
    # No entropy of a composition of 1 … 14 residues is within rounding of these thresholds but 0.
    assert low_complexity(encode(text), window, bits + 1e-12).tolist() == expected


def test_a_repeat_is_of_low_complexity_and_what_surrounds_it_is_not() -> None:
    text = "ACDEFGHIKLMNPQRSTVWY" + "Q" * 30 + "YWVTSRQPNMLKIHGFEDCA"
    low = low_complexity(encode(text), 12, 2.2)
    assert low[20:50].all()
    assert not low[:13].any() and not low[57:].any()
    # Five different residues in twelve may have 2.2 bits at most: 5, 2, 2, 2, 1 have 2.12.
    assert low_complexity(encode("AAAAACCDDEEF"), 12, 2.2).all()
    assert not low_complexity(encode("AAACCCDDDEEF"), 12, 2.2).any()
    assert not low_complexity(encode("A" * 11), 12, 2.2).any()


# --- distances of histograms -----------------------------------------------------------------


@given(histograms, histograms)
def test_divergences_are_those_of_scipy(one: NDArray[np.int64], other: NDArray[np.int64]) -> None:
    kl, js = kl_divergence(one, other + 1), js_divergence(one, other)
    assert (kl is None) == (not one.any())
    assert (js is None) == (not one.any() or not other.any())
    if kl is not None:
        assert kl == pytest.approx(entropy(one, other + 1), abs=1e-12)
    if js is not None:
        assert js == pytest.approx(jensenshannon(one, other) ** 2, abs=1e-7)
        assert 0 <= js <= math.log(2) + 1e-12
        assert js == pytest.approx(js_divergence(other, one), abs=1e-12)


def test_the_direction_of_the_kl_divergence_is_from_the_set() -> None:
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert kl_divergence(np.array([3, 1]), np.array([1, 1])) == pytest.approx(expected)
    assert kl_divergence(np.array([1, 1]), np.array([1, 0])) == math.inf


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=30)


@given(lengths, lengths)
def test_the_ks_distance_is_that_of_scipys_distribution_functions(
    one: list[int], other: list[int]
) -> None:
    at = np.arange(13)
    expected = np.abs(ecdf(one).cdf.evaluate(at) - ecdf(other).cdf.evaluate(at)).max()
    assert ks_distance(np.bincount(one), np.bincount(other)) == pytest.approx(expected, abs=1e-12)


# --- the training proteins -------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 7])
def test_training_counts_are_those_of_substrings(
    make_store: StoreFactory, limit: int | None
) -> None:
    random = np.random.default_rng(0)
    sequences = ["".join(random.choice([*"ACDWXU"], size)) for size in random.integers(1, 13, 1500)]
    store = make_store([encode(text) for text in sequences])  # more than one block
    found = training_counts(store, limit)
    assert_same(found, counts_of([text[:limit] for text in sequences]))


def test_kmers_of_many_proteins_are_those_of_a_seeded_sample(make_store: StoreFactory) -> None:
    store = make_store([encode(CANONICAL[i % 20] * 3 + "W") for i in range(1500)])

    def sample(number: int = 40) -> Counts:
        return training_counts(store, kmer_sequences=number)

    assert sample().kmers[2].sum() == 2 * 40
    assert sample().tokens.sum() == 4 * 1500
    assert_same(sample(), sample())
    assert sample(1500).kmers[2].sum() == 2 * 1500


@given(st.lists(texts, max_size=6))
def test_kmer_counts_are_those_of_substrings(sequences: list[str]) -> None:
    expected = counts_of(sequences).kmers if sequences else [np.zeros(20**k) for k in (1, 2, 3)]
    for found, table in zip(kmer_counts(map(encode, sequences), 3), expected, strict=True):
        np.testing.assert_array_equal(found, table)


def test_copies_of_training_proteins_are_found_and_nothing_near_them(
    make_store: StoreFactory, proteins: list[Tokens]
) -> None:
    store = make_store(proteins[:1500])
    changed = proteins[1400].copy()
    changed[0] ^= 1
    asked = [proteins[3], changed, proteins[1400], proteins[3], proteins[3][:-1], encode("M")]
    training = {tokens.tobytes() for tokens in proteins[:1500]}
    assert in_training(asked, store).tolist() == [t.tobytes() in training for t in asked]
    assert in_training(asked, store).tolist() == [True, False, True, True, False, False]


# --- one set ---------------------------------------------------------------------------------


def nearest(identities: list[float]) -> Nearest:
    return Nearest(np.array(identities), np.zeros(len(identities), dtype=np.int64))


def test_the_figures_of_a_set_counted_by_hand() -> None:
    sequences = ["AAAC", "AAAC", "WX", "C" * 12]
    training = ["AC", "CCC", "WWWWWW"]
    novelty = Novelty(nearest([0.9, 0.95, 0.0, 0.301]), np.array([True, True, False, False]), 3)
    found = quality([encode(x) for x in sequences], counts_of(training), novelty)
    assert found.sequences == 4 and found.tokens == 22
    assert found.valid_share == 0.75
    own = {"A": 6 / 21, "C": 14 / 21, "W": 1 / 21}
    smoothed = {"A": 2 / 31, "C": 5 / 31, "W": 7 / 31}  # 11 residues and 20 pseudo-counts
    expected = sum(p * math.log(p / smoothed[letter]) for letter, p in own.items())
    assert found.token_kl == pytest.approx(expected)
    # Shares up to lengths 2, 3, 4, 6 and 12: 1, 1, 3, 3, 4 quarters and 1, 2, 2, 3, 3 thirds.
    assert found.length_ks == pytest.approx(2 / 3 - 1 / 4)
    # AA AA AC AA AA AC, 11 CC; AC, CC CC, 5 WW
    own_js = jensenshannon([4, 2, 11, 0], [0, 1, 2, 5]) ** 2
    assert found.ngram_js["2"] == pytest.approx(own_js)
    assert found.longest_run_mean == (3 + 3 + 1 + 12) / 4
    assert found.longest_run_max == 12
    assert found.low_complexity_share == 12 / 22
    assert found.duplicate_share == 0.25
    assert found.in_training_share == 0.5
    assert found.identity_mean == pytest.approx(2.151 / 4)
    assert found.identity_median == pytest.approx((0.301 + 0.9) / 2)
    assert found.hit_share == 0.75
    assert found.identity_above == {"50": 0.5, "90": 0.25}
    assert found.clusters == 3 and found.diversity == 0.75
    assert found.residue_frequencies["W"] == pytest.approx(1 / 21)
    assert found.length_histogram == [4]
    assert [i for i, n in enumerate(found.identity_histogram) if n] == [0, 6, 18, 19]


@given(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=30), min_size=1, max_size=5))
@settings(deadline=None)
def test_whatever_the_tokens_the_figures_are_json(sequences: list[list[int]]) -> None:
    sets = [np.array(tokens, dtype=np.uint8) for tokens in sequences]
    novelty = Novelty(nearest([0.0] * len(sets)), np.zeros(len(sets), dtype=bool), len(sets))
    found = quality(sets, counts_of(["ACDE", "W" * 40]), novelty)
    figures = asdict(found)
    json.dumps(figures, allow_nan=False)
    shares = [v for name, v in figures.items() if name.endswith("_share") and v is not None]
    assert all(0 <= share <= 1 for share in shares)
    assert sum(found.length_histogram) == sum(found.identity_histogram) == len(sets)


def test_figures_of_nothing_are_none() -> None:
    found = quality(
        [encode("XX")], counts_of(["ACD"]), Novelty(nearest([0.0]), np.array([False]), 1)
    )
    assert found.token_kl is None
    assert found.ngram_js == {"1": None, "2": None, "3": None}
    assert "–" in Quality({}, {"unknown": found}, [], {}).table().text()


def test_the_jensen_shannon_divergence_of_small_sets_is_biased(
    proteins: list[Tokens], make_store: StoreFactory
) -> None:
    """Why sets of one size are compared: natural proteins themselves look far off when few."""
    training = training_counts(make_store(proteins[:1000]))

    def three_mers(number: int) -> float:
        novelty = Novelty(nearest([0.0] * number), np.zeros(number, dtype=bool), number)
        return quality(proteins[2000 : 2000 + number], training, novelty).ngram_js["3"]

    assert three_mers(20) > 3 * three_mers(500)


# --- several sets ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison(
    tmp_path_factory: pytest.TempPathFactory, proteins: list[Tokens]
) -> tuple[Quality, list[str]]:
    """Copies, near copies and short peptides beside natural proteins and shuffled ones."""
    folder = tmp_path_factory.mktemp("quality")
    store = write_store(folder / "train", proteins[:200])
    random = np.random.default_rng(0)
    long = [tokens for tokens in proteins[:200] if 200 < len(tokens) < 400 and max(tokens) < 24]
    near = long[2].copy()
    near[5:-5:5] = 4 + (near[5:-5:5] - 4 + 7) % 20
    peptides = [encode("MKVLACDEFGHIKLMNPQRSTVWYMKVLAC"[:n]) for n in (1, 2, 5, 9, 14, 30)]
    sets = {
        "generated": [long[0], long[0], long[1], near, *peptides, encode("MKX"), encode("A" * 40)],
        "natural": proteins[300:312],
        "shuffled": [random.permutation(tokens) for tokens in long[:12]],
    }
    sets["generated"][1] = sets["generated"][1].copy()
    lines: list[str] = []
    resources = Resources(threads=1)
    arguments = sets, store, folder / "work", FAST
    novelty = find_novelty(*arguments, resources=resources, report=lines.append)
    result = compare_quality(sets, novelty, store, FAST)
    assert [path.name for path in (folder / "work").iterdir()] == ["mmseqs.log"]
    return result, lines


Comparison = tuple[Quality, list[str]]


def test_copies_are_not_novel_and_shuffled_proteins_are(comparison: Comparison) -> None:
    sets = comparison[0].sets
    generated = sets["generated"]
    assert generated.sequences == 12
    assert generated.in_training_share == 3 / 12
    assert generated.duplicate_share == pytest.approx(1 / 12)
    assert generated.hit_share == 4 / 12  # the peptides and the repeat are without a hit
    assert generated.identity_above == {"50": 4 / 12, "90": 3 / 12}
    assert generated.identity_mean == pytest.approx((3 + 0.8) / 12, abs=0.001)
    assert generated.clusters == 11
    assert generated.valid_share == 11 / 12
    assert sets["shuffled"].hit_share == 0 == sets["shuffled"].identity_mean
    assert sets["shuffled"].diversity == 1
    assert sets["natural"].in_training_share == 0


def test_a_comparison_is_json_and_says_what_it_is_doing(comparison: Comparison) -> None:
    result, lines = comparison
    assert typed(Quality, json.loads(json.dumps(asdict(result), allow_nan=False))) == result
    assert sum(result.training_lengths) == 200
    assert sum(result.training_frequencies.values()) == pytest.approx(1)
    assert [line.split()[0] for line in lines] == ["looking", "searching", "clustering"]


def test_the_table_has_a_column_for_each_set_and_a_row_for_each_figure(
    comparison: Comparison,
) -> None:
    result = comparison[0]
    lines = result.table().text().splitlines()
    assert lines[0].split() == ["generated", "natural", "shuffled"]
    row = next(line for line in lines if line.startswith("exact copies"))
    assert row.split()[-3:] == ["25.0", "0.0", "0.0"]
    assert not any("cannot be compared" in line for line in lines)
    sets = {**result.sets, "natural": replace(result.sets["natural"], sequences=7)}
    assert "cannot be compared" in replace(result, sets=sets).table().text().splitlines()[-1]


def test_the_picture_shows_the_numbers(comparison: Comparison) -> None:
    result = comparison[0]
    figure = Figure()
    axes = figure.subplots(1, 3)
    for draw, one in zip((plot_residues, plot_lengths, plot_novelty), axes, strict=True):
        draw(one, result)
    figure.canvas.draw()
    bars = sorted(bar.get_height() / 100 for bar in axes[0].patches)
    assert bars == pytest.approx(sorted(result.training_frequencies.values()))
    names = [text.get_text() for text in axes[1].get_legend().get_texts()]
    assert names == ["training", "generated", "natural", "shuffled"]
    novelty = [bar.get_height() for bar in axes[2].patches]
    generated = novelty[: len(novelty) // 3]
    assert generated[0] == pytest.approx(100 * (12 - 4) / 12) and sum(generated) == pytest.approx(
        100
    )


def test_clusters_of_equal_and_of_short_sequences(tmp_path: Path, proteins: list[Tokens]) -> None:
    base = next(tokens for tokens in proteins if 150 < len(tokens) < 250)
    near = base.copy()
    near[60:80] = 4 + (near[60:80] - 4 + 7) % 20
    short = [encode(x) for x in ("M", "M", "W", "MKV", "MKV")]
    with mmseqs_in(tmp_path, Resources(threads=1)) as mmseqs:
        settings = ClusterSettings(method="linclust", min_seq_id=0.5, coverage=0.8)
        assert count_clusters([base, near, base], settings, mmseqs) == 1
        assert count_clusters(short, settings, mmseqs) == 3
        assert count_clusters([*short, base, near], ClusterSettings(method="none"), mmseqs) == 5


# --- what can go wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "generated: holds no sequences"),
        ([encode("MK"), encode("")], r"generated: sequence 1 must be .* not uint8 \[0\]"),
        ([np.array([4, 5])], r"generated: sequence 0 must be .* not int64 \[2\]"),
    ],
)
def test_what_is_not_a_sequence_is_rejected_before_anything_is_counted(
    tmp_path: Path, tiny_store: SequenceStore, sequences: list[Any], message: str
) -> None:
    seen: list[str] = []
    with pytest.raises(DataError, match=message):
        find_novelty({"generated": sequences}, tiny_store, tmp_path, report=seen.append)
    assert not seen


def test_without_mmseqs_the_message_reports_it(
    tmp_path: Path, tiny_store: SequenceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMSEQS_BIN", str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"MMSEQS_BIN=.*not an executable file"):
        find_novelty({"generated": [encode("MKV")]}, tiny_store, tmp_path / "work")


# --- samples of the composition baseline -----------------------------------------------------


def test_composition_samples_have_the_moments_of_a_dirichlet_multinomial() -> None:
    alpha, length, number = np.linspace(0.3, 2.5, 20), 50, 20_000
    total = alpha.sum()
    samples = composition_samples(alpha, [length] * number, seed=1)
    assert all(s.dtype == np.uint8 and len(s) == length for s in samples)
    counts = np.array([np.bincount(s, minlength=24)[4:] for s in samples])
    assert (counts.sum(axis=1) == length).all()
    p = alpha / total
    variance = length * p * (1 - p) * (length + total) / (1 + total)
    np.testing.assert_allclose(counts.mean(axis=0), length * p, atol=4 * math.sqrt(8 / number))
    np.testing.assert_allclose(counts.var(axis=0), variance, rtol=0.1)
    # No order: a residue says the same of its neighbour as of one far away.
    rows = np.array(samples)
    beside, far = ((rows[:, 0] == rows[:, place]).mean() for place in (1, 40))
    same = (alpha * (alpha + 1)).sum() / (total * (total + 1))
    assert beside == pytest.approx(same, abs=0.01) and far == pytest.approx(same, abs=0.01)


def test_composition_samples_are_those_of_their_seed_and_lengths() -> None:
    alpha = np.full(20, 0.01)  # most compositions are of one residue nearly alone
    one, again, other = (composition_samples(alpha, [1, 300, 7], seed) for seed in (3, 3, 4))
    assert [len(tokens) for tokens in one] == [1, 300, 7]
    assert [decode(tokens) for tokens in one] == [decode(tokens) for tokens in again]
    assert [decode(tokens) for tokens in one] != [decode(tokens) for tokens in other]
    assert composition_samples(alpha, [], 0) == []


def test_the_fitted_concentration_is_at_hand_and_found_again_in_its_samples(
    tmp_path: Path, proteins: list[Tokens], make_store: StoreFactory
) -> None:
    store = make_store(proteins[:60])
    baselines = fit_baselines(store, max_residues=60)
    np.testing.assert_array_equal(baselines.concentration, fit_composition(store, 60))
    alpha = np.linspace(0.5, 4, 20)
    found = fit_composition(make_store(composition_samples(alpha, [300] * 3000, 5)), 300)
    np.testing.assert_allclose(found, alpha, rtol=0.1)


def test_masks_left_in_a_sequence_make_it_invalid() -> None:
    tokens = np.array([4, MASK, 5], dtype=np.uint8)
    novelty = Novelty(nearest([0.0]), np.zeros(1, dtype=bool), 1)
    assert quality([tokens], counts_of(["AC"]), novelty).valid_share == 0
