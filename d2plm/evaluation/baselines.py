"""Baselines of a protein model: uniform, n-grams, composition of the protein, and their product.

All are fitted on the training store and scored, exactly and in float64, on the same residues as the
model. The composition baseline ignores the order of residues: only a model below it has learnt
anything about order. Only a model below all baselines has learnt more than counts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import digamma, gammaln

from d2plm.core.alphabet import CANONICAL, CANONICAL_START, is_canonical
from d2plm.data.loader import Sequences
from d2plm.data.store import SequenceStore

ALPHABET = len(CANONICAL)
MAX_ORDER = 5
NGRAMS = ("unigram", *(f"{order}-gram" for order in range(2, MAX_ORDER + 1)))  # by order
COMPOSITION_SEQUENCES = 50_000  # enough for 20 parameters; more only cost time
TUNING_SHARE = 0.1  # of the training clusters, on which the n-grams' smoothing is chosen

Scorer = Callable[[NDArray[np.uint8]], float]


@dataclass(frozen=True)
class Baselines:
    """Fitted baselines.

    Attributes:
        scorers: name → function from residue tokens [L] to −log p in nats.
        unigram: float64 [20], residue frequencies.
        concentration: float64 [20], Dirichlet concentrations of the composition baseline.
    """

    scorers: dict[str, Scorer]
    unigram: NDArray[np.float64]
    concentration: NDArray[np.float64]

    def score(self, tokens: NDArray[np.uint8]) -> dict[str, float]:
        """Nats of one sequence's canonical residues under each baseline."""
        return {name: scorer(tokens) for name, scorer in self.scorers.items()}


def fit_baselines(
    train: SequenceStore, *, max_residues: int, report: Callable[[str], None] = lambda line: None
) -> Baselines:
    """Fit every baseline on the first `max_residues` residues of each training sequence."""
    report("fitting the composition baseline")
    unigram = fit_unigram(train, max_residues)
    concentration = fit_composition(train, max_residues)
    report(f"fitting n-grams up to order {MAX_ORDER}")
    ngram = NGram.fit(train, MAX_ORDER, max_residues)
    scorers: dict[str, Scorer] = {
        "uniform": lambda tokens: float(is_canonical(tokens).sum() * np.log(ALPHABET)),
        "unigram": lambda tokens: float(-counts_of(tokens) @ np.log(unigram)),
        **{
            name: partial(ngram.nats, order=order) for order, name in enumerate(NGRAMS[1:], start=2)
        },
        "composition": lambda tokens: composition_nats(counts_of(tokens), concentration),
        **{
            f"composition × {name}": partial(product_nats, ngram, order, concentration)
            for order, name in enumerate(NGRAMS, start=1)
        },
    }
    return Baselines(scorers, unigram, concentration)


def counts_of(tokens: NDArray[np.uint8]) -> NDArray[np.int64]:
    """int64 [20]: how often each canonical residue occurs."""
    stop = CANONICAL_START + ALPHABET
    return np.bincount(tokens, minlength=stop)[CANONICAL_START:stop]


def fit_unigram(train: SequenceStore, max_residues: int) -> NDArray[np.float64]:
    """float64 [20]: the frequency of each canonical residue, with one pseudo-count."""
    total = np.ones(ALPHABET)
    for tokens in train:
        total += counts_of(tokens[:max_residues])
    return total / total.sum()


def fit_composition(
    train: Sequences, max_residues: int, sequences: int = COMPOSITION_SEQUENCES
) -> NDArray[np.float64]:
    """float64 [20]: Dirichlet concentrations of the compositions of at most `sequences` sequences.

    Minka's fixed point for the Dirichlet-multinomial (Estimating a Dirichlet distribution, 2000,
    eq. 55).
    """
    chosen = np.arange(len(train))
    if len(chosen) > sequences:
        chosen = np.random.default_rng(0).choice(chosen, sequences, replace=False)
    counts = np.array([counts_of(train[int(i)][:max_residues]) for i in chosen], dtype=np.float64)
    totals = counts.sum(axis=1)
    alpha = (counts.sum(axis=0) + 1) / (totals.sum() + ALPHABET) * ALPHABET
    for _ in range(1000):
        numerator = (digamma(counts + alpha) - digamma(alpha)).sum(axis=0)
        denominator = (digamma(totals + alpha.sum()) - digamma(alpha.sum())).sum()
        updated = np.maximum(alpha * numerator / max(denominator, 1e-300), 1e-6)
        converged = np.abs(updated - alpha).max() < 1e-5 * alpha.max()
        alpha = updated
        if converged:
            break
    return alpha


def composition_nats(counts: NDArray[np.int64], alpha: NDArray[np.float64]) -> float:
    """−log of the Dirichlet-multinomial probability of one ordered sequence with these counts."""
    log_p = gammaln(alpha.sum()) - gammaln(alpha.sum() + counts.sum())
    return float(-(log_p + (gammaln(alpha + counts) - gammaln(alpha)).sum()))


def product_nats(
    ngram: "NGram", order: int, alpha: NDArray[np.float64], tokens: NDArray[np.uint8]
) -> float:
    """−log p of a sequence's canonical residues under composition × n-gram, in nats.

    From left to right, p(x) ∝ p_ngram(x | before) · p_composition(x | before)/p_composition(x),
    normalised over the twenty. The n-gram depends on the preceding residues, the running
    composition (α + counts)/(Σα + residues) on the whole protein so far; division by its prior
    α/Σα removes what both know. This product of experts has no parameter to tune.
    """
    canonical = is_canonical(tokens)
    residues = tokens[canonical].astype(np.int64) - CANONICAL_START
    rows = np.arange(len(residues))
    seen = np.zeros((len(residues) + 1, ALPHABET))
    seen[rows + 1, residues] = 1
    seen = seen.cumsum(axis=0)[:-1]
    # (α + seen)/α: what the residues before have in common cancels in the normalisation.
    weights = ngram.distributions(tokens, order)[canonical] * (1 + seen / alpha)
    return float(-np.log(weights[rows, residues] / weights.sum(axis=1)).sum())


def sample_composition(
    concentration: NDArray[np.float64], lengths: Sequence[int], seed: int
) -> list[NDArray[np.uint8]]:
    """Sequences of the composition baseline, which have no order.

    Args:
        concentration: float64 [20], as `Baselines` has it.
        lengths: residues of each sequence, N of them.
        seed: equal seeds draw equal sequences.

    Returns:
        N arrays of residue tokens, uint8 [L]: a composition from the Dirichlet distribution for
        each, then its residues independently.
    """
    random = np.random.default_rng(seed)
    compositions = random.dirichlet(concentration, size=len(lengths))
    return [
        (CANONICAL_START + random.choice(ALPHABET, size=length, p=composition)).astype(np.uint8)
        for length, composition in zip(lengths, compositions, strict=True)
    ]


class NGram:
    """Interpolated n-grams: p_m(x|c) = (n(c, x) + β_m·p_{m−1}(x|c′)) / (n(c) + β_m).

    Hierarchical Dirichlet smoothing (MacKay & Peto, 1995). A context never crosses the sequence's
    start or a non-canonical letter; the lower order is used there.
    """

    def __init__(self, counts: list[NDArray[np.int64]], strengths: list[float]) -> None:
        self._counts = counts
        self._totals = [table.sum(axis=1) for table in counts]
        self._strengths = strengths

    @classmethod
    def fit(cls, train: SequenceStore, order: int, max_residues: int) -> "NGram":
        """Count up to `order`-grams; the β are chosen on a tenth of the training clusters.

        By cluster, because homologs on both sides would favour long contexts.
        """
        clusters = np.arange(len(train)) if train.clusters is None else np.asarray(train.clusters)
        names = np.unique(clusters)
        chosen = np.random.default_rng(0).choice(
            names, max(round(len(names) * TUNING_SHARE), 1), replace=False
        )
        held_out = np.isin(clusters, chosen)

        def read(indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
            return (train[int(i)][:max_residues] for i in indices)

        fitted = cls._count(read(np.flatnonzero(~held_out)), order)
        tuning = list(read(np.flatnonzero(held_out)))
        strengths: list[float] = []
        for length in range(order):

            def loss(log_strength: float, length: int = length) -> float:
                model = cls(fitted[: length + 1], [*strengths, float(np.exp(log_strength))])
                return sum(model.nats(tokens, length + 1) for tokens in joined(tuning))

            best = minimize_scalar(loss, bounds=(0, 12), method="bounded", options={"xatol": 0.1})
            strengths.append(float(np.exp(best.x)))
        counts = zip(fitted, cls._count(iter(tuning), order), strict=True)
        return cls([one + other for one, other in counts], strengths)

    @staticmethod
    def _count(sequences: Iterator[NDArray[np.uint8]], order: int) -> list[NDArray[np.int64]]:
        """Table m: int64 [20^m, 20], how often each residue follows each context of m residues."""
        return [table.reshape(-1, ALPHABET) for table in kmer_counts(sequences, order)]

    def nats(self, tokens: NDArray[np.uint8], order: int) -> float:
        """−log p of the canonical residues of `tokens`, nats, with contexts of `order` − 1."""
        probability = np.full(len(tokens), 1 / ALPHABET)
        for m in range(order):
            codes, ends = _windows(tokens, m + 1)
            contexts, residues = np.divmod(codes, ALPHABET)
            strength = self._strengths[m]
            probability[ends] = (
                self._counts[m][contexts, residues] + strength * probability[ends]
            ) / (self._totals[m][contexts] + strength)
        return float(-np.log(probability[is_canonical(tokens)]).sum())

    def distributions(self, tokens: NDArray[np.uint8], order: int) -> NDArray[np.float64]:
        """float64 [L, 20]: of every residue given those before, at the canonical positions."""
        probability = np.full((len(tokens), ALPHABET), 1 / ALPHABET)
        for m in range(order):
            codes, ends = _windows(tokens, m + 1)
            contexts, strength = codes // ALPHABET, self._strengths[m]
            probability[ends] = (self._counts[m][contexts] + strength * probability[ends]) / (
                self._totals[m][contexts] + strength
            )[:, None]
        return probability


def kmer_counts(sequences: Iterable[NDArray[np.uint8]], longest: int) -> list[NDArray[np.int64]]:
    """How often each run of k canonical residues occurs, for k = 1 … `longest`.

    Args:
        sequences: residue tokens, uint8 [L] each; taken one at a time.
        longest: the largest k; its counts are 20^k.

    Returns:
        For each k int64 [20^k], the index being the run's residues (0 … 19) read in base 20.
    """
    counts = [np.zeros(ALPHABET**k, dtype=np.int64) for k in range(1, longest + 1)]
    for tokens in joined(sequences):
        for k, table in enumerate(counts, 1):
            codes, _ = _windows(tokens, k)
            table += np.bincount(codes, minlength=len(table))
    return counts


def joined(
    sequences: Iterable[NDArray[np.uint8]], size: int = 1 << 20
) -> Iterator[NDArray[np.uint8]]:
    """The sequences in long rows, separated by a token that no n-gram crosses, for fewer calls."""
    row: list[NDArray[np.uint8]] = []
    held = 0
    gap = np.zeros(1, dtype=np.uint8)
    for tokens in sequences:
        row += [tokens, gap]
        held += len(tokens)
        if held >= size:
            yield np.concatenate(row)
            row, held = [], 0
    if row:
        yield np.concatenate(row)


def _windows(tokens: NDArray[np.uint8], width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(code of each run of `width` canonical residues in base 20, position of its last residue)."""
    canonical = is_canonical(tokens)
    digits = tokens.astype(np.int64) - CANONICAL_START
    count = max(len(tokens) - width + 1, 0)
    codes, whole = np.zeros(count, dtype=np.int64), np.ones(count, dtype=bool)
    for offset in range(width):
        codes = codes * ALPHABET + digits[offset : offset + count]
        whole &= canonical[offset : offset + count]
    return codes[whole], np.flatnonzero(whole) + width - 1
