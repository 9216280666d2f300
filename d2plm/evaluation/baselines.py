"""Baselines: uniform, n-grams, composition of the sequence, and their product.

All are exact likelihoods, fitted on the training store and scored in float64 on the same tokens as
the model. Composition ignores the order of tokens, so a model must beat it to have learnt anything
about order; the unigram replaces it for large alphabets.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import digamma, gammaln

from d2plm.core.vocabulary import FIRST, PROTEIN, Tokens, Vocabulary
from d2plm.data.loader import Sequences
from d2plm.data.store import SequenceStore
from d2plm.evaluation.terms import REFERENCE, SUITES

COMPOSITION_SEQUENCES = 50_000  # enough for 20 parameters
TUNING_SHARE = 0.1  # share of the training clusters used to tune the n-grams' smoothing
TUNING_TOKENS = 8_000_000  # maximum number of tokens of those clusters
DENSE_CELLS = 1 << 23  # maximum size of a table with a cell for every n-gram
COUNTED_TOKENS = 10_000_000  # tokens sampled for sparse counts
MAX_CODE = 1 << 62  # n-grams are numbered with int64

Scorer = Callable[[Tokens], float]


@dataclass(frozen=True)
class Baselines:
    """Fitted baselines.

    Attributes:
        scorers: name → function from tokens [L] to −log p in nats.
        ngram: shared by the scorers of all orders.
        unigram: float64 [K], token frequencies.
        concentration: float64 [K], Dirichlet concentrations of the composition baseline, if any.
    """

    scorers: dict[str, Scorer]
    ngram: "NGram"
    unigram: NDArray[np.float64]
    concentration: NDArray[np.float64] | None

    def score(self, tokens: Tokens) -> dict[str, float]:
        """Nats of one sequence's predicted tokens under each baseline."""
        orders = enumerate(self.ngram.nats_by_order(tokens, self.ngram.order), start=1)
        known = {ngram_name(order): nats for order, nats in orders if order > 1}
        return {
            name: known[name] if name in known else scorer(tokens)
            for name, scorer in self.scorers.items()
        }


def ngram_name(order: int) -> str:
    return "unigram" if order == 1 else f"{order}-gram"


def fit_baselines(
    train: SequenceStore, *, max_residues: int, report: Callable[[str], None] = lambda line: None
) -> Baselines:
    """Fit all baselines on the first `max_residues` tokens of each training sequence."""
    vocabulary = train.vocabulary
    suite, unigram = SUITES[vocabulary.name], fit_unigram(train, max_residues)
    concentration: NDArray[np.float64] | None = None
    if suite.reference == REFERENCE:
        report("fitting the composition baseline")
        concentration = fit_composition(train, max_residues)
    report(f"fitting n-grams up to order {max(suite.orders)}")
    ngram = NGram.fit(train, max(suite.orders), max_residues)
    orders = [order for order in suite.orders if order <= ngram.order]
    scorers: dict[str, Scorer] = {
        "uniform": lambda tokens: float(
            vocabulary.is_predicted(tokens).sum() * np.log(vocabulary.predicted)
        ),
        "unigram": lambda tokens: float(-counts_of(tokens, vocabulary) @ np.log(unigram)),
        **{ngram_name(n): partial(ngram.nats, order=n) for n in orders if n > 1},
    }
    if concentration is not None:
        alpha = concentration
        scorers["composition"] = lambda tokens: composition_nats(
            counts_of(tokens, vocabulary), alpha
        )
        scorers |= {
            f"composition × {ngram_name(n)}": partial(product_nats, ngram, n, alpha) for n in orders
        }
    return Baselines(scorers, ngram, unigram, concentration)


def sampled(train: SequenceStore, tokens: int, max_residues: int) -> NDArray[np.int64]:
    """Ascending indices of random sequences with about `tokens` tokens in total, or of all."""
    lengths = np.minimum(np.asarray(train.lengths), max_residues).astype(np.int64)
    if lengths.sum() <= tokens:
        return np.arange(len(train))
    order = np.random.default_rng(0).permutation(len(train))
    return np.sort(order[: np.searchsorted(lengths[order].cumsum(), tokens) + 1])


def counts_of(tokens: Tokens, vocabulary: Vocabulary = PROTEIN) -> NDArray[np.int64]:
    """int64 [K]: number of occurrences of each predicted token."""
    return np.bincount(tokens, minlength=vocabulary.stop)[FIRST : vocabulary.stop]


def fit_unigram(
    train: Sequences, max_residues: int, sequences: int | None = None
) -> NDArray[np.float64]:
    """float64 [K]: token frequencies in at most `sequences` random ones, with one pseudo-count."""
    total = np.ones(train.vocabulary.predicted)
    for row in joined(train[i][:max_residues] for i in some_of(train, sequences)):
        total += counts_of(row, train.vocabulary)
    return total / total.sum()


def some_of(sequences: Sequences, most: int | None, seed: int = 0) -> list[int]:
    """Indices of `most` random sequences; all in order if there are no more or `most` is None."""
    if most is None or len(sequences) <= most:
        return list(range(len(sequences)))
    return np.random.default_rng(seed).choice(len(sequences), most, replace=False).tolist()


def fit_composition(
    train: Sequences, max_residues: int, sequences: int = COMPOSITION_SEQUENCES
) -> NDArray[np.float64]:
    """float64 [K]: Dirichlet concentrations of the compositions of at most `sequences` sequences.

    Minka's fixed point for the Dirichlet-multinomial (Estimating a Dirichlet distribution, 2000,
    eq. 55).
    """
    vocabulary = train.vocabulary
    rows = [counts_of(train[i][:max_residues], vocabulary) for i in some_of(train, sequences)]
    counts, size = np.array(rows, dtype=np.float64), vocabulary.predicted
    totals = counts.sum(axis=1)
    alpha = (counts.sum(axis=0) + 1) / (totals.sum() + size) * size
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


def product_nats(ngram: "NGram", order: int, alpha: NDArray[np.float64], tokens: Tokens) -> float:
    """−log p of a sequence's predicted tokens under composition × n-gram, in nats.

    From left to right, p(x) ∝ p_ngram(x | before) · p_composition(x | before)/p_composition(x),
    normalised over the K tokens. The n-gram depends on the preceding residues, the running
    composition (α + counts)/(Σα + residues) on the whole prefix; dividing by its prior α/Σα removes
    what both know. This product of experts has no parameter to tune.
    """
    predicted = ngram.vocabulary.is_predicted(tokens)
    residues = tokens[predicted].astype(np.int64) - FIRST
    rows = np.arange(len(residues))
    seen = np.zeros((len(residues) + 1, len(alpha)))
    seen[rows + 1, residues] = 1
    seen = seen.cumsum(axis=0)[:-1]
    # (α + seen)/α: factors common to all residues cancel in the normalisation.
    weights = ngram.distributions(tokens, order)[predicted] * (1 + seen / alpha)
    return float(-np.log(weights[rows, residues] / weights.sum(axis=1)).sum())


def sample_composition(
    concentration: NDArray[np.float64], lengths: Sequence[int], seed: int
) -> list[Tokens]:
    """Sample a Dirichlet composition for each sequence, then its tokens, uint8 [L]."""
    random = np.random.default_rng(seed)
    compositions = random.dirichlet(concentration, size=len(lengths))
    return [
        (FIRST + random.choice(len(composition), size=length, p=composition)).astype(np.uint8)
        for length, composition in zip(lengths, compositions, strict=True)
    ]


def sample_reference(baselines: Baselines, lengths: Sequence[int], seed: int) -> list[Tokens]:
    """Sample the best baseline that ignores order; arguments as for `sample_composition`."""
    if baselines.concentration is not None:
        return sample_composition(baselines.concentration, lengths, seed)
    random, dtype = np.random.default_rng(seed), baselines.ngram.vocabulary.dtype
    size = len(baselines.unigram)
    drawn = random.choice(size, size=sum(lengths), p=baselines.unigram)
    return np.split((FIRST + drawn).astype(dtype), np.cumsum(lengths)[:-1])


class NGram:
    """Interpolated n-grams: p_m(x|c) = (n(c, x) + β_m·p_{m−1}(x|c′)) / (n(c) + β_m).

    Hierarchical Dirichlet smoothing (MacKay & Peto, 1995). A context never crosses the start of the
    sequence or a token that is not predicted; the lower order is used there.

    Args:
        counts: a table of n(c, x) for each order m: int64 [K^(m−1), K], or a `SparseCounts`.
        strengths: β of each order.
    """

    def __init__(
        self,
        counts: Sequence["NDArray[np.int64] | SparseCounts"],
        strengths: list[float],
        vocabulary: Vocabulary = PROTEIN,
    ) -> None:
        self.vocabulary = vocabulary
        self.order = len(counts)
        self._counts = counts
        self._totals = [table.sum(axis=1) for table in counts]
        self._strengths = strengths

    @classmethod
    def fit(cls, train: SequenceStore, order: int, max_residues: int) -> "NGram":
        """Count n-grams up to `order`; the β are chosen on a tenth of the training clusters.

        The split is by cluster because homologs on both sides would favour long contexts. If a
        table of all n-grams would be too large, they are counted in a sample of COUNTED_TOKENS, up
        to the order whose n-grams fit in int64.
        """
        vocabulary = train.vocabulary
        dense = vocabulary.predicted**order <= DENSE_CELLS
        among = np.arange(len(train)) if dense else sampled(train, COUNTED_TOKENS, max_residues)
        clusters = among if train.clusters is None else np.asarray(train.clusters)[among]
        names = np.unique(clusters)
        chosen = np.random.default_rng(0).choice(
            names, max(round(len(names) * TUNING_SHARE), 1), replace=False
        )
        held_out = np.isin(clusters, chosen)

        def read(indices: NDArray[np.int64]) -> Iterator[Tokens]:
            return (train[int(i)][:max_residues] for i in indices)

        def count(indices: NDArray[np.int64]) -> list[Any]:
            if dense:
                return cls._count(read(indices), order, vocabulary)
            return sparse_counts(joined(read(indices)), order, ranks)

        if not dense:
            ranks = token_ranks(joined(read(among)), vocabulary)
        fitted = count(among[~held_out])
        tuning: list[Tokens] = []
        for row in joined(read(among[held_out])):
            tuning.append(row)
            if sum(map(len, tuning)) >= TUNING_TOKENS:
                break
        strengths: list[float] = []
        model = cls(fitted, strengths, vocabulary)
        probabilities = [np.full(len(row), 1 / vocabulary.predicted) for row in tuning]
        predicted = [vocabulary.is_predicted(row) for row in tuning]
        for m in range(len(fitted)):
            seen = [model._seen(m, digits) for digits in map(model._digits, tuning)]
            best = minimize_scalar(
                _tuning_nats,
                args=(probabilities, seen, predicted),
                bounds=(0, 12),
                method="bounded",
                options={"xatol": 0.1},
            )
            strengths.append(float(np.exp(best.x)))
            probabilities = [*map(_interpolated, probabilities, seen, repeat(strengths[-1]))]
        counts = zip(fitted, count(among[held_out]), strict=True)
        return cls([one + other for one, other in counts], strengths, vocabulary)

    @staticmethod
    def _count(
        sequences: Iterator[Tokens], order: int, vocabulary: Vocabulary = PROTEIN
    ) -> list[NDArray[np.int64]]:
        """Table m: int64 [K^m, K], counts of each token after each context of m tokens."""
        tables = kmer_counts(sequences, order, vocabulary)
        return [table.reshape(-1, vocabulary.predicted) for table in tables]

    def nats(self, tokens: Tokens, order: int) -> float:
        """−log p of the predicted tokens, nats, with contexts of `order` − 1 tokens."""
        *_, nats = self.nats_by_order(tokens, order)
        return nats

    def nats_by_order(self, tokens: Tokens, order: int) -> list[float]:
        """`nats` for each order up to `order`."""
        probability = np.full(len(tokens), 1 / self.vocabulary.predicted)
        predicted, digits = self.vocabulary.is_predicted(tokens), self._digits(tokens)
        nats = []
        for m in range(order):
            probability = _interpolated(probability, self._seen(m, digits), self._strengths[m])
            nats.append(float(-np.log(probability[predicted]).sum()))
        return nats

    def _digits(self, tokens: Tokens) -> NDArray[np.int64]:
        table = self._counts[0]
        if isinstance(table, SparseCounts):
            return table.ranks[tokens]
        return digits_of(tokens, self.vocabulary)

    def _seen(self, m: int, digits: NDArray[np.int64]) -> "Seen":
        table, totals = self._counts[m], self._totals[m]
        if isinstance(table, SparseCounts):
            codes, ends = _windows(digits, m + 1, table.base)
            return table[codes], totals[codes // table.base], ends
        codes, ends = _windows(digits, m + 1, table.shape[1])
        contexts, residues = np.divmod(codes, table.shape[1])
        return table[contexts, residues], totals[contexts], ends

    def distributions(self, tokens: Tokens, order: int) -> NDArray[np.float64]:
        """float64 [L, K]: distribution of every token given those before; for dense tables only."""
        size = self.vocabulary.predicted
        probability, digits = np.full((len(tokens), size), 1 / size), self._digits(tokens)
        for m in range(order):
            codes, ends = _windows(digits, m + 1, size)
            contexts, strength = codes // size, self._strengths[m]
            probability[ends] = (self._counts[m][contexts] + strength * probability[ends]) / (
                self._totals[m][contexts] + strength
            )[:, None]
        return probability


Seen = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # n(c, x), n(c), positions


def _interpolated(
    probability: NDArray[np.float64], seen: Seen, strength: float
) -> NDArray[np.float64]:
    """The next order's probabilities [L]; positions without its context keep the lower order's."""
    runs, contexts, ends = seen
    mixed = probability.copy()
    mixed[ends] = (runs + strength * probability[ends]) / (contexts + strength)
    return mixed


def _tuning_nats(
    log_strength: float,
    probabilities: Sequence[NDArray[np.float64]],
    seen: Sequence[Seen],
    predicted: Sequence[NDArray[np.bool_]],
) -> float:
    """−log p of all predicted tokens, nats, at a strength of the highest order."""
    mixed = map(_interpolated, probabilities, seen, repeat(float(np.exp(log_strength))))
    return sum(
        float(-np.log(row[where]).sum()) for row, where in zip(mixed, predicted, strict=True)
    )


@dataclass(frozen=True)
class SparseCounts:
    """Counts of the runs of m tokens that occur.

    Attributes:
        codes: int64 [n], ascending: the runs' ranks read as digits in base `base`.
        counts: int64 [n].
        ranks: int64 [V]: 0 … base − 2 for tokens that occur, base − 1 for other predicted tokens,
            −1 for tokens that are not predicted.
    """

    codes: NDArray[np.int64]
    counts: NDArray[np.int64]
    ranks: NDArray[np.int64]
    base: int

    def __getitem__(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The count of each run, 0 if it does not occur."""
        if not len(self.codes):
            return np.zeros_like(codes)
        places = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        return np.where(self.codes[places] == codes, self.counts[places], 0)

    def __add__(self, other: "SparseCounts") -> "SparseCounts":
        return self._of(
            np.concatenate([self.codes, other.codes]), np.concatenate([self.counts, other.counts])
        )

    def sum(self, axis: int) -> "SparseCounts":
        """Counts of the contexts; `axis` is that of the last token, as in a dense table."""
        assert axis == 1
        return self._of(self.codes // self.base, self.counts)

    def _of(self, codes: NDArray[np.int64], counts: NDArray[np.int64]) -> "SparseCounts":
        order = np.argsort(codes, kind="stable")  # a merge, as both parts are sorted
        codes, counts = codes[order], counts[order]
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
        return SparseCounts(codes[starts], np.add.reduceat(counts, starts), self.ranks, self.base)


def token_ranks(rows: Iterable[Tokens], vocabulary: Vocabulary) -> NDArray[np.int64]:
    """int64 [V]: see `SparseCounts`."""
    occur = np.zeros(vocabulary.size, dtype=np.bool_)
    for row in rows:
        occur[row] = True
    predicted = np.zeros_like(occur)
    predicted[FIRST : vocabulary.stop] = True
    occur &= predicted
    ranks = np.where(predicted, occur.sum(), -1)
    ranks[occur] = np.arange(occur.sum())
    return ranks


def sparse_counts(
    rows: Iterable[Tokens], order: int, ranks: NDArray[np.int64]
) -> list[SparseCounts]:
    """Counts of runs of 1 … `order` tokens, or fewer if longer ones do not fit in int64."""
    held, base = list(rows), int(ranks.max()) + 1
    tables = []
    for m in range(1, order + 1):
        if base**m > MAX_CODE:
            break
        codes = [_windows(ranks[row], m, base)[0] for row in held]
        none = np.empty(0, dtype=np.int64)  # if there are no rows
        distinct, counts = np.unique(np.concatenate([none, *codes]), return_counts=True)
        tables.append(SparseCounts(distinct, counts, ranks, base))
    return tables


def kmer_counts(
    sequences: Iterable[Tokens], longest: int, vocabulary: Vocabulary = PROTEIN
) -> list[NDArray[np.int64]]:
    """Counts of each run of k predicted tokens, for k = 1 … `longest`.

    Returns:
        int64 [K^k] for each k; the index is the run's tokens (0 … K − 1) read in base K.
    """
    size = vocabulary.predicted
    counts = [np.zeros(size**k, dtype=np.int64) for k in range(1, longest + 1)]
    for tokens in joined(sequences):
        digits = digits_of(tokens, vocabulary)
        for k, table in enumerate(counts, 1):
            codes, _ = _windows(digits, k, size)
            table += np.bincount(codes, minlength=len(table))
    return counts


def joined(sequences: Iterable[Tokens], size: int = 1 << 20) -> Iterator[Tokens]:
    """Concatenate sequences into long rows, separated by a token that no n-gram crosses."""
    row: list[Tokens] = []
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


def digits_of(tokens: Tokens, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """int64 [L]: 0 … K − 1, and −1 for tokens that are not predicted."""
    return np.where(vocabulary.is_predicted(tokens), tokens.astype(np.int64) - FIRST, -1)


def _windows(
    digits: NDArray[np.int64], width: int, base: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(code of each run of `width` predicted tokens in `base`, position of its last token)."""
    count = max(len(digits) - width + 1, 0)
    codes, whole = np.zeros(count, dtype=np.int64), np.ones(count, dtype=bool)
    for offset in range(width):
        codes = codes * base + digits[offset : offset + count]
        whole &= digits[offset : offset + count] >= 0
    return codes[whole], np.flatnonzero(whole) + width - 1
