"""Baselines: proper distributions, naive counting, and parameters recovered from simulation."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize

from d2plm.core.vocabulary import CANONICAL, encode
from d2plm.data.store import SequenceStore
from d2plm.evaluation import baselines
from d2plm.evaluation.baselines import NGram, composition_nats, counts_of, fit_composition
from tests.conftest import Tokens
from tests.evaluations import BASELINES

StoreFactory = Callable[[list[Tokens]], SequenceStore]
RANDOM_TEXTS = ["MKVLAMKVL", "ACDXACDACD", "WWWWW", "GAVLIMKV", "MKVMKVXMKV", "L"]
STRENGTHS = [5.0, 3.0, 2.0, 1.0, 0.5]


def ngram(texts: list[str], order: int = 5) -> NGram:
    return NGram(NGram._count(iter([encode(t) for t in texts]), order), STRENGTHS[:order])


def naive_probability(texts: list[str], context: str, letter: str) -> float:
    """(n(c, x) + β·p′) / (n(c) + β) from the uniform distribution up, by counting substrings."""
    probability = 1 / 20
    for m in range(len(context) + 1):
        suffix = context[len(context) - m :]
        followed = Counter(
            text[i + m]
            for text in texts
            for i in range(len(text) - m)
            if text[i : i + m] == suffix and text[i + m] in CANONICAL
        )
        beta = STRENGTHS[m]
        probability = (followed[letter] + beta * probability) / (followed.total() + beta)
    return probability


def in_context(text: str, order: int) -> Iterator[tuple[int, str, str]]:
    """Each canonical letter: its place, itself, and the letters before it that an n-gram sees."""
    for i, letter in enumerate(text):
        if letter in CANONICAL:
            run = text[:i][max(0, i - order + 1) :]
            yield i, letter, run[max(run.rfind("X"), run.rfind("B")) + 1 :]


@pytest.mark.parametrize("order", [1, 2, 5])
@pytest.mark.parametrize("text", ["ACDACDWMKV", "MKXVLB", "X"])
def test_ngrams_equal_naive_counting(text: str, order: int) -> None:
    expected = 0.0
    for _, letter, context in in_context(text, order):
        expected -= math.log(naive_probability(RANDOM_TEXTS, context, letter))
    assert ngram(RANDOM_TEXTS).nats(encode(text), order) == pytest.approx(expected, rel=1e-10)


def test_fitted_ngrams_find_a_markov_chain(make_store: StoreFactory) -> None:
    """Strengths tuned on sequences that were counted would let the trigram overfit."""
    random = np.random.default_rng(1)
    transition = random.dirichlet(np.full(20, 0.2), size=20)

    def chain(length: int) -> Tokens:
        states = [0]
        while len(states) <= length:
            states.append(int(random.choice(20, p=transition[states[-1]])))
        return np.array(states[1:], dtype=np.uint8) + np.uint8(4)

    model, fresh = NGram.fit(make_store([chain(150) for _ in range(60)]), 3, 1000), chain(4000)
    states = fresh.astype(int) - 4
    entropy = -np.log(transition[states[:-1], states[1:]]).mean()
    unigram, bigram, trigram = (model.nats(fresh, order) / 4000 for order in (1, 2, 3))
    assert bigram == pytest.approx(entropy, abs=0.05)
    assert bigram < unigram - 0.3
    assert trigram < bigram + 0.05


def test_joining_sequences_makes_no_new_ngrams() -> None:
    parts = [encode("MK"), encode("VL")]
    model = NGram(NGram._count(iter(parts), 2), STRENGTHS[:2])
    apart = sum(model.nats(part, 2) for part in parts)
    together = sum(model.nats(row, 2) for row in baselines.joined(parts))
    assert together == pytest.approx(apart, rel=1e-12)
    assert len(list(baselines.joined([encode("MKV")] * 10, size=6))) == 5


def test_composition_is_polyas_urn() -> None:
    """p(x) = Π (α_x + times seen) / (Σα + residues seen), the chain rule of the mixture."""
    alpha = np.linspace(0.5, 3, 20)
    tokens = encode("MKVMMKAXM")
    seen, expected = np.zeros(20), 0.0
    for residue in (int(t) - 4 for t in tokens if t < 24):
        expected -= math.log((alpha[residue] + seen[residue]) / (alpha.sum() + seen.sum()))
        seen[residue] += 1
    assert composition_nats(counts_of(tokens), alpha) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("order", [1, 5])
@pytest.mark.parametrize("text", ["MKXVLBMKV", "X", "WWWWW"])
def test_composition_times_an_ngram_is_their_normalised_product(order: int, text: str) -> None:
    model, alpha = ngram(RANDOM_TEXTS), np.linspace(0.5, 3, 20)
    expected = 0.0
    for i, letter, context in in_context(text, order):
        seen = Counter(x for x in text[:i] if x in CANONICAL)
        weights = {
            x: naive_probability(RANDOM_TEXTS, context, x)
            * ((a + seen[x]) / (alpha.sum() + seen.total()))
            / (a / alpha.sum())
            for x, a in zip(CANONICAL, alpha, strict=True)
        }
        expected -= math.log(weights[letter] / sum(weights.values()))
    found = baselines.product_nats(model, order, alpha, encode(text))
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("order", [1, 5])
def test_distributions_are_what_nats_sums(order: int) -> None:
    model, tokens = ngram(RANDOM_TEXTS), encode("MKVXLACDBWMKV")
    canonical = np.array([t in range(4, 24) for t in tokens])
    rows = model.distributions(tokens, order)[canonical]
    np.testing.assert_allclose(rows.sum(axis=1), 1, rtol=1e-12)
    chosen = rows[np.arange(len(rows)), tokens[canonical].astype(int) - 4]
    assert -np.log(chosen).sum() == pytest.approx(model.nats(tokens, order), rel=1e-12)


def simulated(alpha: NDArray[np.float64], number: int, length: int, seed: int) -> list[Tokens]:
    random = np.random.default_rng(seed)
    return [
        (random.choice(20, size=length, p=random.dirichlet(alpha)) + 4).astype(np.uint8)
        for _ in range(number)
    ]


def test_the_fixed_point_is_the_likelihoods_maximum(make_store: StoreFactory) -> None:
    sequences = simulated(np.linspace(0.5, 4, 20), 40, 80, 1)
    counts = [counts_of(tokens) for tokens in sequences]

    def loss(log_alpha: NDArray[np.float64]) -> float:
        return sum(composition_nats(c, np.exp(log_alpha)) for c in counts)

    fitted = fit_composition(make_store(sequences), 1000)
    better = minimize(loss, np.log(fitted), method="L-BFGS-B", options={"maxiter": 20})
    assert loss(np.log(fitted)) - better.fun < 1e-2


def test_composition_beats_unigram_where_compositions_vary(make_store: StoreFactory) -> None:
    alpha = np.linspace(0.5, 3, 20)
    store = make_store(simulated(alpha, 100, 150, 2))
    fitted = baselines.fit_baselines(store, max_residues=150)
    assert set(fitted.scorers) == set(BASELINES)
    scores = [fitted.score(tokens) for tokens in simulated(alpha, 30, 150, 3)]
    mean = {name: np.mean([s[name] for s in scores]) / 150 for name in scores[0]}
    assert mean["uniform"] == pytest.approx(math.log(20))
    assert mean["composition"] < mean["unigram"] - 0.1 < mean["uniform"]


def test_the_unigram_counts_canonical_residues_of_the_first_part(make_store: StoreFactory) -> None:
    store = make_store([encode("MMKXX"), encode("MAAAA")])
    expected = np.ones(20)
    for letter in "MMK" + "MAA":
        expected[CANONICAL.index(letter)] += 1
    np.testing.assert_allclose(baselines.fit_unigram(store, 3), expected / 26)
