"""The bound given relatives: its baseline, its controls and its rows."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
from pyhmmer.easel import Alphabet
from pyhmmer.plan7 import Background

from d2plm.core.errors import ConfigError
from d2plm.core.table import Number
from d2plm.core.vocabulary import encode
from d2plm.data.relatives import RelativesIndex
from d2plm.evaluation import given_relatives
from d2plm.evaluation.given_relatives import evaluate_given_relatives, unrelated_of_same_length
from d2plm.evaluation.likelihood import CrossEntropy, SequenceScores
from d2plm.evaluation.result import ALIGNED, MODEL, PROFILE, GivenRelatives, typed
from d2plm.evaluation.tables import relatives_table
from d2plm.families.profile_hmm import mixture_nats
from d2plm.settings.evaluation import EvaluationSettings
from tests.conftest import Tokens


def changed(tokens: Tokens, share: float, seed: int) -> Tokens:
    random = np.random.default_rng(seed)
    return np.where(random.random(len(tokens)) < share, random.permutation(tokens), tokens)


def background_nats(letters: str) -> float:
    alphabet = Alphabet.amino()
    frequencies = Background(alphabet).residue_frequencies
    return -sum(math.log(frequencies[alphabet.symbols.index(letter)]) for letter in letters)


def test_the_mixture_is_the_mean_of_the_relatives_and_a_share_of_the_background() -> None:
    targets = [encode("MKVLAAGIT"), encode("WWXBCW"), encode("GGGG")]
    ratios = {(0, 5): 7.0, (0, 6): 3.0, (2, 5): -math.inf}
    found = mixture_nats(targets, [[5, 6], [], [5, 9]], ratios)
    mean = (math.exp(7.0) + math.exp(3.0)) / 2
    gained = [math.log(0.98 * mean + 0.02), 0, math.log(0.98 * 0.5 + 0.02)]
    background = map(background_nats, ("MKVLAAGIT", "WWCW", "GGGG"))
    expected = [nats - gain for nats, gain in zip(background, gained, strict=True)]
    assert found == pytest.approx(expected, abs=1e-5)


def index_of(pairs: dict[int, list[tuple[int, float]]], count: int) -> RelativesIndex:
    hits = [(q, t, i) for q, own in pairs.items() for t, i in own]
    queries, targets, identities = (np.array(column) for column in zip(*hits, strict=True))
    return RelativesIndex.of_hits(count, queries, targets, identities, 100)


def test_unrelated_proteins_are_of_the_nearest_lengths_and_of_another_cluster() -> None:
    lengths = [100, 101, 102, 103, 200, 99]
    sequences = [np.full(n, 5, dtype=np.uint8) for n in lengths]
    index = index_of({0: [(1, 0.8), (5, 0.3)]}, 6)
    clusters = np.array([0, 0, 0, 1, 2, 0])
    found = unrelated_of_same_length([0, 3], [[1, 5], []], index, sequences, clusters)
    assert found == [[3, 4], []]  # 2 is of its cluster


class Scores:
    """Scores of a model for which each relative saves 10 nats, in whatever order."""

    def __init__(self) -> None:
        self.given: dict[str, list[list[Tokens]]] = {}

    def __call__(
        self, name: str, proteins: Sequence[Tokens], relatives: Sequence[Sequence[Tokens]]
    ) -> SequenceScores:
        self.given[name] = [list(own) for own in relatives]
        nats = [3.0 * len(t) - 10 * len(own) for t, own in zip(proteins, relatives, strict=True)]
        residues = np.array([len(tokens) for tokens in proteins])
        empty = CrossEntropy(np.zeros(1), np.zeros(1))
        return SequenceScores(np.array(nats)[:, None], residues, None, empty, "test", "")


def test_each_identity_has_a_row_beside_the_same_relatives_hmms(proteins: list[Tokens]) -> None:
    base = [tokens[:120] for tokens in proteins[:40] if len(tokens) > 120][:6]
    sequences = [*base[:4], changed(base[0], 0.2, 1), changed(base[0], 0.5, 2)]
    index = index_of({0: [(4, 0.8), (5, 0.5)], 4: [(0, 0.8)], 5: [(0, 0.5), (4, 0.6)]}, 6)
    settings = {"relatives_below": [0.9, 0.55], "max_relatives": 1, "relatives_depths": [1, 5]}
    score, choice = Scores(), EvaluationSettings(**settings)  # type: ignore[arg-type]
    clusters = np.array([0, 1, 2, 3, 0, 0])
    found = evaluate_given_relatives(score, sequences, clusters, index, choice)
    assert [row.with_relatives for row in found.below] == [3, 2]
    nelbos = [row.model.nelbo.value for row in found.below]
    assert nelbos == pytest.approx([3 - 30 / 720, 3 - 20 / 720])
    assert found.alone.nelbo.value == pytest.approx(3.0)
    by_depth = {depth: bound.nelbo.value for depth, bound in found.by_depth.items()}
    assert by_depth == pytest.approx({1: 3 - 30 / 720, 5: 3 - 50 / 720})
    nearest = [own[0] for own in score.given["at most 1 relatives"] if own]
    assert [*map(bytes, nearest)] == [bytes(sequences[i]) for i in (4, 0, 0)]
    for baseline in (PROFILE, ALIGNED):
        wide, narrow = (row.baselines[baseline].nelbo.value for row in found.below)
        assert wide < narrow < 2.95
    # Of one relative both are the same HMM.
    both = [[row.baselines[name].nelbo.value for row in found.below] for name in (PROFILE, ALIGNED)]
    assert both[0] == pytest.approx(both[1], abs=1e-6)
    # The model of this test takes any relative for its own.
    unrelated = found.unrelated.difference.value
    assert unrelated == pytest.approx(-30 / 720)
    assert found.order_difference is None
    rows = {str(row[0]): row[2] for row in relatives_table(found).rows}
    assert rows[f"at most 5 below 90%: {MODEL}"] == Number(found.by_depth[5].nelbo.value, ".4f")
    assert rows[f"none: {MODEL}"] == Number(found.alone.nelbo.value, ".4f")
    assert typed(GivenRelatives, json.loads(json.dumps(asdict(found)))) == found
    with pytest.raises(ConfigError, match="relatives_below"):  # the first is the widest
        EvaluationSettings(relatives_below=[0.5, 0.9])


def test_evenly_spaced_proteins_are_given_any_of_all(proteins: list[Tokens]) -> None:
    base = [tokens[:120] for tokens in proteins[:40] if len(tokens) > 120][:3]
    sequences = [changed(one, 0.3, 1) for one in base] + base
    index = index_of({n: [((n + 3) % 6, 0.6)] for n in range(6)}, 6)
    score, choice = Scores(), EvaluationSettings(relatives_below=[0.9], relatives_proteins=2)
    found = evaluate_given_relatives(score, sequences, np.arange(6), index, choice, longest=100)
    assert given_relatives.evenly_spaced(6, 2) == [0, 3]
    assert given_relatives.evenly_spaced(1, 2) == [0]
    assert found.proteins == found.below[0].with_relatives == 2
    assert found.below[0].model.nelbo.value == pytest.approx(3 - 20 / 200)
