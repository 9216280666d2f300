"""The scaling law of a grid of runs: the held-out bound as a function of size, data and compute.

L(N, D) = E + A/N^α + B/D^β is fitted as in Hoffmann et al. (arXiv:2203.15556, approach 3). Its five
constants are strongly correlated, and a few small runs may not determine all of them; the result
names those whose intervals are too wide.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls
from scipy.special import huber
from scipy.stats import gmean, linregress

from d2plm.core.errors import ConfigError
from d2plm.core.estimate import interval_text
from d2plm.core.palette import GREY, SERIES, new_figure, save_figure
from d2plm.core.table import Table
from d2plm.evaluation.terms import terms_of

HUBER = 1e-3  # residual of log L at which the loss becomes linear, as in the paper
CONSTANTS = 5
LEAST_POINTS = CONSTANTS + 1
LEAST_VALUES = 3  # distinct values of N and of D: a power law with an offset needs three
EXPONENTS = (0.01, 4.0)  # bounds of α and β
STARTS = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)  # initial values of α and β
SMALLEST_TERM = 1e-6  # relative to the mean loss; lower bound of A, B and E
MOST_ITERATIONS = 200
POLISHED = 3  # number of starts that are optimised
RESAMPLES = 200
CONFIDENCE = 0.95
FRONTIER_ROWS = 4
# A constant with an interval wider than this factor is undetermined.
WIDEST = {"irreducible": 1.1, "alpha": 2.0, "beta": 2.0}
NAMES = {"irreducible": "E", "alpha": "α", "beta": "β"}
COLOURS = (*SERIES, GREY)

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A run.

    Attributes:
        parameters: N, matrix parameters applied to every token.
        tokens: D, training tokens.
        flops: C, training FLOPs.
        loss: bound on held-out proteins, nats per residue.
        interval: interval of the loss over held-out clusters, if known.
    """

    size: str
    parameters: int
    tokens: int
    flops: float
    loss: float
    interval: Sequence[float] | None = None


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A/N^α + B/D^β, nats per residue.

    Attributes:
        irreducible: E.
        size_coefficient, alpha: A, α.
        data_coefficient, beta: B, β.
    """

    irreducible: float
    size_coefficient: float
    alpha: float
    data_coefficient: float
    beta: float

    def size_term(self, parameters: Any) -> Any:
        """A/N^α."""
        return self.size_coefficient * np.asarray(parameters, np.float64) ** -self.alpha

    def data_term(self, tokens: Any) -> Any:
        """B/D^β."""
        return self.data_coefficient * np.asarray(tokens, np.float64) ** -self.beta

    def loss(self, parameters: Any, tokens: Any) -> Any:
        """L(N, D); arrays broadcast."""
        return self.irreducible + self.size_term(parameters) + self.data_term(tokens)


@dataclass(frozen=True)
class Power:
    """y = coefficient · x^exponent, with the standard error of the exponent."""

    coefficient: float
    exponent: float
    standard_error: float = 0.0


def fit_law(parameters: Any, tokens: Any, losses: Any) -> Law:
    """Fit the law that minimises the Huber loss of log L(N, D) − log L.

    The optimizer continues from the best points of a grid of α and β with non-negative least
    squares for E, A and B.

    Args:
        parameters, tokens, losses: [P], N, D and L of each run.

    Raises:
        ConfigError: if the runs cannot determine five constants.
    """
    n, d, y = _checked(parameters, tokens, losses)
    units = gmean(n), gmean(d)  # decorrelates the constants
    log_n, log_d, log_y = np.log(n / units[0]), np.log(d / units[1]), np.log(y)

    def terms(x: Numbers) -> tuple[Numbers, Numbers, float]:
        log_a, log_b, log_e, alpha, beta = x
        return np.exp(log_a - alpha * log_n), np.exp(log_b - beta * log_d), math.exp(log_e)

    def residuals(x: Numbers) -> Numbers:
        size, data, rest = terms(x)
        return np.asarray(np.log(size + data + rest) - log_y)

    def jacobian(x: Numbers) -> Numbers:
        size, data, rest = terms(x)
        columns = [size, data, np.full_like(size, rest), -size * log_n, -data * log_d]
        return np.stack(columns, axis=1) / (size + data + rest)[:, None]

    middle = math.log(y.mean())
    low = np.array([middle + math.log(SMALLEST_TERM)] * 3 + [EXPONENTS[0]] * 2)
    high = np.array([middle + math.log(10)] * 3 + [EXPONENTS[1]] * 2)
    starts = [_start(log_n, log_d, y, *exponents) for exponents in product(STARTS, repeat=2)]
    starts.sort(key=lambda start: float(huber(HUBER, residuals(start)).sum()))
    options = {"loss": "huber", "f_scale": HUBER, "max_nfev": MOST_ITERATIONS}
    tolerances = {"ftol": 1e-10, "xtol": 1e-10, "gtol": 1e-14}
    fits = [
        least_squares(residuals, start, jacobian, (low, high), **options, **tolerances)
        for start in starts[:POLISHED]
    ]
    log_a, log_b, log_e, alpha, beta = min(fits, key=lambda fit: float(fit.cost)).x
    return Law(
        irreducible=math.exp(log_e),
        size_coefficient=math.exp(log_a) * units[0] ** alpha,
        alpha=float(alpha),
        data_coefficient=math.exp(log_b) * units[1] ** beta,
        beta=float(beta),
    )


def _checked(parameters: Any, tokens: Any, losses: Any) -> list[Numbers]:
    values = [np.asarray(one, dtype=np.float64) for one in (parameters, tokens, losses)]
    problem = next(_problems(*values), None)
    if problem is not None:
        raise ConfigError(f"scaling law: {problem}")
    return values


def _problems(n: Numbers, d: Numbers, y: Numbers) -> Iterator[str]:
    if not (n.shape == d.shape == y.shape and n.ndim == 1):
        yield f"{n.shape} sizes, {d.shape} budgets and {y.shape} losses"
    if len(y) < LEAST_POINTS:
        yield f"{len(y)} runs for {CONSTANTS} constants; at least {LEAST_POINTS} are needed"
    if np.ptp(y) == 0:
        yield f"all {len(y)} losses are {y[0]:g}; nothing scales"
    for what, values in {"size": n, "number of tokens": d, "loss": y}.items():
        if not (np.isfinite(values).all() and (values > 0).all()):
            yield f"a {what} is not a positive number: {values.tolist()}"
    for what, values in {"sizes": n, "budgets": d}.items():
        if (number := len(np.unique(values))) < LEAST_VALUES:
            yield f"{number} different {what}; at least {LEAST_VALUES} are needed"


def _start(log_n: Numbers, log_d: Numbers, y: Numbers, alpha: float, beta: float) -> Numbers:
    """[log A', log B', log E, α, β], with A' and B' in the units of the logarithms of N and D."""
    columns = [np.exp(-alpha * log_n), np.exp(-beta * log_d), np.ones_like(y)]
    terms, _ = nnls(np.stack(columns, axis=1), y)
    return np.array([*np.log(np.maximum(terms, 1e-3 * y.mean())), alpha, beta])


def resampled_laws(
    law: Law, parameters: Any, tokens: Any, losses: Any, resamples: int = RESAMPLES
) -> list[Law]:
    """A residual bootstrap of the law.

    Residuals of log L are resampled, scaled by √(P/(P − 5)) for the five fitted constants, and
    added to the law. Runs are not resampled: few resamples of nine runs would determine a law.
    """
    fitted, runs = np.log(law.loss(parameters, tokens)), len(losses)
    residuals = (np.log(losses) - fitted) * math.sqrt(runs / (runs - CONSTANTS))
    random = np.random.default_rng(0)
    return [
        fit_law(parameters, tokens, np.exp(fitted + random.choice(residuals, runs)))
        for _ in range(resamples)
    ]


def fit_power(x: Any, y: Any) -> Power:
    """Fit y as a power of x, by least squares of the logarithms."""
    fit = linregress(np.log(x), np.log(y))
    return Power(math.exp(fit.intercept), float(fit.slope), float(fit.stderr))


def optimum(law: Law, cost: Power, flops: Any) -> tuple[Any, Any]:
    """(N, D) with the smallest L(N, D) for this compute, given c·N^s·D = C.

    N^(α + sβ) = αA/(sβB) · (C/c)^β; with c = 6 and s = 1 it is equation 4 of the paper.

    Args:
        cost: FLOPs per token = c·N^s. The matrices need 6·N; attention makes small models more
            expensive, so s is below 1.
        flops: C; arrays broadcast.
    """
    alpha, slope = law.alpha, cost.exponent * law.beta
    ratio = alpha * law.size_coefficient / (slope * law.data_coefficient)
    budget = np.asarray(flops, np.float64) / cost.coefficient
    size = (ratio * budget**law.beta) ** (1 / (alpha + slope))
    return size, budget / size**cost.exponent


def analyse(points: Sequence[Point], *, resamples: int = RESAMPLES) -> dict[str, Any]:
    """The law, its undetermined constants, the frontier and each size's power law, as JSON content.

    Raises:
        ConfigError: if the runs cannot determine a law.
    """
    n, d, y = np.array([(point.parameters, point.tokens, point.loss) for point in points], float).T
    law = fit_law(n, d, y)
    laws = resampled_laws(law, n, d, y, resamples=resamples)
    squares = np.square(np.log(y) - np.log(law.loss(n, d))).sum()
    noise = math.sqrt(squares / (len(y) - CONSTANTS))
    intervals = {key: _interval([getattr(one, key) for one in laws]) for key in asdict(law)}
    effects = {
        "size": _interval([one.size_term(n.min()) - one.size_term(n.max()) for one in laws]),
        "data": _interval([one.data_term(d.min()) - one.data_term(d.max()) for one in laws]),
    }
    cost = fit_power(n, [point.flops / point.tokens for point in points])
    sizes = {
        size: fit_power([point.flops for point in runs], [point.loss for point in runs])
        for size, runs in _by_size(points).items()
    }
    return {
        "points": [asdict(point) for point in points],
        "law": asdict(law),
        "intervals": intervals,
        "relative_residual": noise,
        "undetermined": _undetermined(intervals, effects, noise * y.mean()),
        "cost": asdict(cost),
        "frontier": _frontier(law, laws, cost, points),
        "power_laws": {size: asdict(power) for size, power in sizes.items()},
    }


def _interval(values: Sequence[float]) -> list[float]:
    tail = (1 - CONFIDENCE) / 2
    return [float(bound) for bound in np.quantile(values, [tail, 1 - tail])]


def _undetermined(
    intervals: dict[str, list[float]], effects: dict[str, list[float]], noise: float
) -> list[str]:
    """A sentence for each quantity that the runs do not determine.

    `effects` are intervals of the law's decrease from the smallest to the largest size or data;
    `noise` is the residual of a run's loss, nats per residue.
    """
    sentences = [
        f"{NAMES[key]} is not determined: its interval spans a factor of "
        f"{intervals[key][1] / intervals[key][0]:.3g}."
        for key, widest in WIDEST.items()
        if intervals[key][1] > widest * intervals[key][0]
    ]
    for what, (low, _) in effects.items():
        if low < noise:
            sentences.append(
                f"An effect of the {what} is not shown: from the least to the greatest the law may "
                f"fall by no more than a run varies ({noise:.2g} nats)."
            )
    return sentences


def _frontier(
    law: Law, laws: Sequence[Law], cost: Power, points: Sequence[Point]
) -> dict[str, Any]:
    """The best size at several budgets in the range of the runs, and the exponent of its growth."""
    least, greatest = (f(point.parameters for point in points) for f in (min, max))
    budgets = [point.flops for point in points]
    rows = []
    for flops in np.geomspace(min(budgets), max(budgets), FRONTIER_ROWS).tolist():
        size, tokens = map(float, optimum(law, cost, flops))
        row = {"flops": flops, "parameters": size, "tokens": tokens}
        row["loss"] = float(law.loss(size, tokens))
        rows.append({**row, "extrapolated": not least <= size <= greatest})
    exponent, *others = (one.beta / (one.alpha + cost.exponent * one.beta) for one in (law, *laws))
    return {"exponent": exponent, "exponent_interval": _interval(others), "rows": rows}


def _by_size(points: Sequence[Point]) -> dict[str, list[Point]]:
    ordered = sorted(points, key=lambda point: (point.parameters, point.flops))
    return {
        size: [point for point in ordered if point.size == size]
        for size in dict.fromkeys(point.size for point in ordered)
    }


def scaling_table(results: dict[str, Any]) -> str:
    law, intervals, frontier = results["law"], results["intervals"], results["frontier"]
    terms = terms_of(results)
    fitted = Law(**law)
    points = [Point(**point) for point in results["points"]]
    runs: list[list[str]] = [
        [
            *(point.size, f"{point.parameters:,}", f"{point.tokens:,}", f"{point.flops:.3g}"),
            f"{point.loss:.4f} {interval_text(point.interval, '.4f')}",
            f"{fitted.loss(point.parameters, point.tokens):.4f}",
        ]
        for point in points
    ]
    bound = f"NELBO, nats/{terms.token} [over {terms.sequence}s]"
    shown = {key: f"{law[key]:.3g} {interval_text(intervals[key], '.3g')}" for key in law}
    law_text = [
        f"L(N, D) = E + A/N^α + B/D^β: E = {shown['irreducible']}, "
        f"A = {shown['size_coefficient']}, α = {shown['alpha']}, "
        f"B = {shown['data_coefficient']}, β = {shown['beta']}; "
        f"a loss is off by {100 * results['relative_residual']:.2g} %.",
        *results["undetermined"],
    ]
    sizes, best = [point.parameters for point in points], list[list[str]]()
    for row in frontier["rows"]:
        n, d = row["parameters"], row["tokens"]
        cells = [f"{n:.3g}", f"{d:.3g}", f"{d / n:.3g}", f"{row['loss']:.4f}"]
        if row["extrapolated"]:
            beyond = f"below {min(sizes):,}" if n < min(sizes) else f"above {max(sizes):,}"
            cells = [f"{beyond}, the sizes that were trained", "", "", ""]
        best.append([f"{row['flops']:.3g}", *cells])
    powers = "; ".join(
        f"{size} γ = {-fit['exponent']:.4f} ± {fit['standard_error']:.4f}"
        for size, fit in results["power_laws"].items()
    )
    grows = [
        f"The best N grows as C^{frontier['exponent']:.2f} "
        f"{interval_text(frontier['exponent_interval'], '.2f')}. "
        "Intervals of the law are of 95 %, by resampled residuals.",
        f"L(C) ∝ C^(−γ) for each size: {powers}.",
    ]
    heads = ["FLOPs", "best N", "D", "tokens per parameter", "law"]
    trained = Table(["size", "N", "D", "FLOPs", bound, "law"], runs, notes=law_text)
    return f"{trained.markdown()}\n\n{Table(heads, best, notes=grows).markdown()}"


def plot_scaling(results: dict[str, Any], file: Path) -> None:
    """Write a PNG of loss against FLOPs: each size's runs, law and power law, and the frontier."""
    points = [Point(**point) for point in results["points"]]
    law, cost, terms = Law(**results["law"]), Power(**results["cost"]), terms_of(results)
    figure = new_figure(8, 5)
    axes = figure.subplots()
    for colour, (size, runs) in zip(COLOURS * len(points), _by_size(points).items(), strict=False):
        flops, losses = [run.flops for run in runs], [run.loss for run in runs]
        axes.plot(flops, losses, "o", color=colour, label=f"{size}: N = {runs[0].parameters:,}")
        along = np.geomspace(min(flops) / 1.5, max(flops) * 1.5, 100)
        per_token = runs[0].flops / runs[0].tokens
        axes.plot(along, law.loss(runs[0].parameters, along / per_token), color=colour)
        power = results["power_laws"][size]
        axes.plot(along, power["coefficient"] * along ** power["exponent"], ":", color=colour)
    sizes, budgets = zip(*((point.parameters, point.flops) for point in points), strict=True)
    along = np.geomspace(min(budgets), max(budgets), 100)
    best, tokens = optimum(law, cost, along)
    trained = (best >= min(sizes)) & (best <= max(sizes))
    if trained.any():
        frontier = law.loss(best, tokens)[trained]
        axes.plot(along[trained], frontier, "k--", lw=1, label="compute-optimal")
    axes.set(
        xscale="log",
        xlabel="training FLOPs",
        ylabel=f"NELBO on held-out {terms.sequence}s, nats/{terms.token}",
        title="lines: E + A/N^α + B/D^β; dotted: a power of C for each size",
    )
    figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, file)
