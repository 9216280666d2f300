"""Baselines and evaluations of other alphabets: sparse n-grams, bits, and words."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.core.estimate import Verdict
from d2plm.core.vocabulary import DNA, PROTEIN, Bytes, Codons, Tokens, Vocabulary, encode
from d2plm.data.store import SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter
from d2plm.evaluation.baselines import NGram, fit_baselines, sparse_counts, token_ranks
from d2plm.evaluation.findings import judge
from d2plm.evaluation.likelihood import corpus_estimate
from d2plm.evaluation.quality import compare_texts
from d2plm.evaluation.result import read_evaluation
from d2plm.evaluation.summary import HeldOut
from d2plm.evaluation.tables import as_markdown, as_text
from d2plm.evaluation.terms import SUITES, terms_for
from d2plm.export.exported_model import ExportedModel
from d2plm.export.model_evaluation import evaluate, generated_quality
from d2plm.export.report_content import Sources
from d2plm.export.report_page import write_report
from d2plm.generation.lengths import LengthHistogram
from d2plm.generation.sampler_settings import Sampling
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from tests.conftest import DiTFactory
from tests.evaluations import invented_scores, summary

BYTES = Bytes()
STRENGTHS = [5.0, 3.0, 2.0, 1.0]
TEXTS = ["the cat sat on the mat", "a cat and a dog", "zz", "on the mat, the dog"]


def tokens_of(texts: list[str], vocabulary: Vocabulary = BYTES) -> list[Tokens]:
    return [vocabulary.encode(text, "test") for text in texts]


def store_of(path: Path, sequences: list[Tokens], vocabulary: Vocabulary) -> SequenceStore:
    with SequenceStoreWriter(path, kind="train", vocabulary=vocabulary) as writer:
        names = [b"document%d" % number for number in range(len(sequences))]
        writer.extend(names, [tokens.tobytes() for tokens in sequences])
        writer.set_clusters([*range(len(sequences))])
    return SequenceStore(path)


def text_of(seed: int, length: int) -> str:
    random = np.random.default_rng(seed)
    return " ".join(random.choice(["in", "the", "beginning", "was", "word", "light"], length))


def test_sparse_counts_give_the_figures_of_dense_ones_to_the_bit() -> None:
    random = np.random.default_rng(0)
    proteins = [random.integers(4, 26, 200, dtype=np.uint8) for _ in range(20)]
    dense = NGram(NGram._count(iter(proteins), 4), STRENGTHS)
    few = NGram(sparse_counts(proteins, 4, token_ranks(proteins, PROTEIN)), STRENGTHS)
    for tokens in (*proteins[:3], encode("WWWWXMKVL"), random.integers(4, 26, 99, dtype=np.uint8)):
        assert few.nats_by_order(tokens, 4) == dense.nats_by_order(tokens, 4)


def test_sparse_counts_add_up_and_leave_out_orders_that_int64_cannot_number() -> None:
    ranks = token_ranks(every := tokens_of(TEXTS), BYTES)
    parts = (sparse_counts(part, 3, ranks) for part in (every, every[:2], every[2:]))
    for both, one, other in zip(*parts, strict=True):
        np.testing.assert_array_equal((one + other).codes, both.codes)
        np.testing.assert_array_equal((one + other).counts, both.counts)
    every = [np.arange(4, 260, dtype=np.uint16)]
    assert len(sparse_counts(every, 9, token_ranks(every, BYTES))) == 7


@pytest.mark.parametrize("texts", [["in the beginning"], ["a", "b", "c", "abcdef"]])
def test_ngrams_of_a_few_texts_are_finite(texts: list[str], tmp_path: Path) -> None:
    # The part on which they are tuned has all texts, or orders that the other part has not.
    model = NGram.fit(store_of(tmp_path / "t", tokens_of(texts), BYTES), 5, 1000)
    assert all(map(math.isfinite, model.nats_by_order(BYTES.encode("in a", "test"), 5)))


def test_a_fitted_text_is_a_distribution_that_longer_contexts_improve(tmp_path: Path) -> None:
    store = store_of(tmp_path / "t", tokens_of([text_of(i, 60) for i in range(30)]), BYTES)
    baselines = fit_baselines(store, max_residues=1000)
    assert baselines.concentration is None
    assert not any("composition" in name for name in baselines.scorers)
    fresh = BYTES.encode(text_of(99, 60), "test")
    nats = baselines.score(fresh)
    assert nats["6-gram"] < nats["3-gram"] < nats["unigram"] < nats["uniform"]
    assert nats["3-gram"] == baselines.scorers["3-gram"](fresh)
    context = BYTES.encode("in the beg", "test")
    longer = (np.append(context, np.uint16(token)) for token in range(4, 260))
    nats_of = partial(baselines.ngram.nats, order=5)
    after = np.array([*map(nats_of, longer)])
    assert np.exp(nats_of(context) - after).sum() == pytest.approx(1, rel=1e-10)


@pytest.mark.parametrize("vocabulary", [DNA, Codons()])
def test_nucleotides_have_composition(tmp_path: Path, vocabulary: Vocabulary) -> None:
    text = "ACGTTGCAATTCGGA" * 9
    store = store_of(tmp_path / "t", tokens_of([text, text[3:], text[6:]], vocabulary), vocabulary)
    baselines, suite = fit_baselines(store, max_residues=1000), SUITES[vocabulary.name]
    longest = f"{max(suite.orders)}-gram"
    assert {"composition", f"composition × {longest}"} <= set(baselines.scorers)
    nats = baselines.score(store[0])
    assert all(np.isfinite(value) for value in nats.values())
    scored = vocabulary.is_predicted(store[0]).sum()
    assert nats["uniform"] == pytest.approx(scored * math.log(vocabulary.predicted))


def test_bits_per_byte_are_those_of_a_hand_computation() -> None:
    tokens, units, clusters = np.array([10, 30, 20]), np.array([40, 90, 70]), np.arange(3)
    scores, unigram = invented_scores(tokens, 2.0, noise=0), {"unigram": tokens * 3.0}
    held_out = HeldOut(tokens, clusters, unigram, units=units, terms=terms_for(BYTES))
    found = summary(scores, held_out)
    assert found.model.bits is not None
    assert found.model.bits.value == pytest.approx(120 / math.log(2) / 200)
    expected = corpus_estimate(scores.nats / math.log(2), units, clusters)
    assert found.model.bits.interval == expected.interval
    finding = judge(found)
    assert (finding.baseline, finding.difference.verdict) == ("unigram", Verdict.BETTER)
    assert "nats/byte" in finding.headline
    assert "bits/byte" in as_markdown(found) and "bits/byte" in as_text(found)


def test_a_model_of_bytes_is_evaluated_as_of_texts(tmp_path: Path, tiny_dit: DiTFactory) -> None:
    model: Any = tiny_dit(0, vocab_size=BYTES.size)
    paradigm = AbsorbingDiffusion()
    paradigm.vocabulary = BYTES
    lengths = LengthHistogram.of(np.array([20, 30]), 126)
    provenance = {"d2plm_version": "0", "paradigm": "d"}
    exported = ExportedModel(tmp_path / "model", model, paradigm, lengths, provenance)
    exported.folder.mkdir()
    texts = tokens_of([text_of(i, 8) + " é" for i in range(24)])
    train = store_of(tmp_path / "train", texts[:18], BYTES)
    arguments = exported, train, store_of(tmp_path / "validation", texts[18:], BYTES)
    baselines = fit_baselines(train, max_residues=126)
    words = *arguments, 4, tmp_path, Sampling(steps=2)
    quality = partial(generated_quality, *words, baselines=baselines)
    found = evaluate(*arguments, masks_per_sequence=2, baselines=baselines, quality=quality)
    assert read_evaluation(tmp_path / "model") == found
    assert found.model.bits is not None and found.baselines["unigram"].bits is not None
    assert found.model.bits.value == pytest.approx(found.model.nelbo.value / math.log(2))
    assert found.residues == sum(len(tokens) for tokens in texts[18:])
    assert f"{found.residues:,} bytes of 6 texts in 6 clusters" in as_text(found)
    card = (tmp_path / "model/README.md").read_text()
    assert "texts" in card and "protein" not in card and "residue" not in card
    page = write_report(Sources(tmp_path / "model", tmp_path / "model", tmp_path)).read_text()
    assert "bits/byte" in page and "exact copies of training" in page


def test_exact_copies_repetitions_and_ngrams_of_text_are_found(tmp_path: Path) -> None:
    texts = tokens_of([text_of(i, 40) for i in range(6)])
    train = store_of(tmp_path / "train", texts, BYTES)
    fresh = BYTES.encode("0123456789" * 12, "test")
    pasted = np.concatenate([texts[0][20:90], BYTES.encode("#" * 70, "test")])
    terms = terms_for(BYTES)
    sets = {"fresh": [fresh], "pasted": [pasted, pasted], "whole": [texts[1]]}
    found = compare_texts(sets, train, 1000, terms).sets
    assert found["whole"].in_training_share == 1 and found["pasted"].in_training_share == 0
    assert found["pasted"].duplicate_share == 0.5
    assert found["pasted"].longest_run_max == 70
    assert found["fresh"].repeated_share == pytest.approx(1 - 10 / 113)
    assert found["fresh"].distinct == {"1": 10 / 120, "2": 10 / 119, "3": 10 / 118}
    assert found["fresh"].ngram_js["1"] == pytest.approx(math.log(2))
    assert found["whole"].ngram_js["2"] < 0.1
