"""Likelihood: intervals against an independent bootstrap, scores whatever the batching."""

import math
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from d2plm.core.errors import ModelError
from d2plm.core.vocabulary import MASK, RESIDUES, encode
from d2plm.evaluation.likelihood import FRACTION_BINS, corpus_estimate, score_sequences
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from tests.conftest import Tokens
from tests.evaluations import context_model, uniform_model

EITHER = pytest.mark.parametrize("paradigm", [AbsorbingDiffusion(), MaskFlowMatching()])


@EITHER
def test_a_uniform_model_gives_log_20(paradigm: Paradigm, proteins: list[Tokens]) -> None:
    sequences = [*proteins[:10], encode("MKXXBVLU"), encode("A")]
    scores = score_sequences(uniform_model, paradigm, sequences, max_length=100)
    canonical = [sum(4 <= t < 24 for t in s[:98].tolist()) for s in sequences]
    assert scores.residues.tolist() == canonical
    np.testing.assert_allclose(scores.nats, np.array(canonical) * math.log(20), rtol=1e-6)
    share = [min(max(round(0.15 * n), 1), n) for n in canonical]
    assert scores.mlm15 is not None
    assert scores.mlm15.residues.tolist() == share
    np.testing.assert_allclose(scores.mlm15.nats, np.array(share) * math.log(20), rtol=1e-6)
    assert scores.mlm15.perplexity == pytest.approx(20)
    told: list[Tensor] = []

    def model(*given: Any) -> Tensor:
        told.append(given[3])
        return uniform_model(*given)

    score_sequences(model, paradigm, [encode("MKVLAAGG")], masks_per_sequence=1)
    share = paradigm.corrupted_fraction(told[-1].double())[0]
    assert float(share) == pytest.approx(1 / 8, abs=1e-6)  # of MLM-15, the last pass


@EITHER
def test_scores_do_not_depend_on_the_packing(paradigm: Paradigm, proteins: list[Tokens]) -> None:
    sequences = proteins[:12]
    settings: dict[str, Any] = {"max_length": 200, "masks_per_sequence": 3, "seed": 4}
    one = score_sequences(context_model, paradigm, sequences, token_budget=200, **settings)
    other = score_sequences(context_model, paradigm, sequences, token_budget=5000, **settings)
    np.testing.assert_allclose(one.nats, other.nats, rtol=1e-12)
    assert one.mlm15 is not None and other.mlm15 is not None
    np.testing.assert_allclose(one.mlm15.nats, other.mlm15.nats, rtol=1e-12)
    assert one.masks_digest == other.masks_digest
    shares = [
        score_sequences(context_model, paradigm, sequences, **settings, rank=rank, world_size=4)
        for rank in range(4)  # of which some have no batch
    ]
    np.testing.assert_allclose(sum(share.nats for share in shares), one.nats, rtol=1e-12)
    fewer = score_sequences(context_model, paradigm, sequences[:5], token_budget=900, **settings)
    np.testing.assert_allclose(fewer.nats, one.nats[:5], rtol=1e-12)


def test_a_draw_counts_in_the_bin_of_its_masked_share() -> None:
    counts, expected = list[int](), [0] * FRACTION_BINS

    def model(tokens: Tensor, *more: Any) -> Tensor:
        counts.append(int((tokens == MASK).sum()))
        expected[-(-counts[-1] * FRACTION_BINS // 20) - 1] += counts[-1]
        return uniform_model(tokens, *more)

    settings: Any = {"masks_per_sequence": 20, "with_mlm15": False}
    found = score_sequences(model, AbsorbingDiffusion(), [encode(RESIDUES)], **settings)
    assert found.calibration.residues[0].tolist() == expected and {*counts} == {*range(1, 21)}


def test_other_masks_have_another_digest() -> None:
    def digest(**changes: Any) -> str:
        settings: dict[str, Any] = {"masks_per_sequence": 1, "max_length": 16, "seed": 0, **changes}
        arguments = uniform_model, AbsorbingDiffusion(), [encode("MK")]
        return score_sequences(*arguments, **settings).masks_digest

    others = {"seed": 1, "masks_per_sequence": 2, "max_length": 17, "data_digest": "x"}
    assert len({digest(), *(digest(**{key: value}) for key, value in others.items())}) == 5
    assert digest() == digest()


def test_a_diverged_model_is_a_model_error() -> None:
    def model(*given: Any) -> Tensor:
        return uniform_model(*given) * math.nan

    with pytest.raises(ModelError, match="sequence 0"):
        score_sequences(model, AbsorbingDiffusion(), [encode("MKV")], max_length=16)


def test_the_interval_is_that_of_resampling_whole_clusters() -> None:
    random = np.random.default_rng(3)
    clusters = random.integers(0, 60, 400) * 7
    residues = random.integers(20, 500, 400)
    effect = random.normal(2.8, 0.15, 60 * 7)[clusters]
    nats = residues * (effect + random.normal(0, 0.02, 400))
    estimate = corpus_estimate(nats, residues, clusters)
    assert estimate.value == pytest.approx(nats.sum() / residues.sum(), rel=1e-12)

    names = sorted(set(clusters.tolist()))
    totals = [(nats[clusters == name].sum(), residues[clusters == name].sum()) for name in names]
    ratios = []
    for _ in range(4000):
        drawn = [totals[i] for i in random.integers(0, len(names), len(names))]
        ratios.append(sum(n for n, _ in drawn) / sum(r for _, r in drawn))
    low, high = np.quantile(ratios, [0.025, 0.975])
    width = high - low
    assert estimate.interval == pytest.approx((low, high), abs=0.1 * width)
    low, high = corpus_estimate(nats, residues, np.arange(400)).ends
    assert high - low < 0.7 * width  # ignoring homology is overconfident


def test_a_constant_rate_has_no_width_and_exp_is_the_perplexity() -> None:
    residues = np.array([10, 20, 30])
    estimate = corpus_estimate(residues * math.log(17.0), residues, np.array([5, 9, 9]))
    assert estimate.exp().value == pytest.approx(17)
    assert estimate.exp().interval == pytest.approx((17, 17))
    one_cluster = corpus_estimate(np.array([3.0, 5.0]), np.array([1, 3]), np.array([2, 2]))
    assert (one_cluster.value, one_cluster.interval) == (2, None)
