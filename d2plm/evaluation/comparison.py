"""Comparison of several arms, each trained with several seeds, on the same held-out proteins.

An arm's figure is computed from its nats averaged over the seeds. There are two sources of
uncertainty: the choice of held-out proteins (interval by resampling homology clusters) and the
training seed (Student's t interval over the seeds' differences). A difference is significant if
both intervals exclude zero; with one seed, none is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import sem
from scipy.stats import t as student_t

from d2plm.core.errors import ConfigError
from d2plm.core.estimate import Estimate, Interval, Verdict, interval_text, verdict
from d2plm.core.palette import BLUE, GREY, ORANGE, legend_above, new_figure, save_figure
from d2plm.core.table import Cell, Number, Table
from d2plm.evaluation.findings import judge
from d2plm.evaluation.likelihood import CONFIDENCE, corpus_estimate
from d2plm.evaluation.plots import plain, plot_estimate
from d2plm.evaluation.result import Evaluation
from d2plm.evaluation.terms import Terms


@dataclass(frozen=True)
class Run:
    """One arm's evaluation with one seed; nats float64 [N], residues and clusters integer [N]."""

    evaluation: Evaluation
    nats: NDArray[np.float64]
    residues: NDArray[np.int64]
    clusters: NDArray[np.int64]


@dataclass(frozen=True)
class Arm:
    """The figures of an arm; the first arm has no difference.

    Attributes:
        seeds: seed → perplexity.
        better_than_baseline: number of seeds that beat the best baseline.
        difference: this arm minus the first, nats per residue, with the interval over clusters.
        seed_interval: interval of the mean difference over seeds.
        verdict: from both intervals.
    """

    perplexity: Estimate
    seeds: dict[int, float]
    better_than_baseline: int
    difference: Estimate | None = None
    seed_differences: dict[int, float] = field(default_factory=dict)
    seed_interval: Interval | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Comparison:
    terms: Terms
    baseline: str
    baseline_perplexity: Estimate
    arms: dict[str, Arm]


def compare(runs: Mapping[str, Mapping[int, Run]]) -> Comparison:
    """Compare the arms with the first of them and with the best baseline.

    Args:
        runs: arm → seed → run; every arm has the same seeds.

    Raises:
        ConfigError: if the runs were not evaluated on the same proteins.
    """
    first_arm = next(iter(runs))
    first = next(iter(runs[first_arm].values()))
    for arm, seeds in runs.items():
        for seed, run in seeds.items():
            if not _same_residues(run, first):
                raise ConfigError(
                    f"arm {arm}, seed {seed}: was evaluated on other residues than {first_arm}; "
                    "compare arms on one split, with one limit on the length"
                )
    best = judge(first.evaluation).baseline
    arms = {
        arm: _arm(seeds, best, None if arm == first_arm else runs[first_arm])
        for arm, seeds in runs.items()
    }
    evaluation = first.evaluation
    return Comparison(evaluation.terms, best, evaluation.baselines[best].perplexity, arms)


def _same_residues(run: Run, other: Run) -> bool:
    ours, theirs = run.evaluation, other.evaluation
    return (
        ours.digests["validation"] == theirs.digests["validation"]
        and ours.settings.get("split") == theirs.settings.get("split")
        and np.array_equal(run.residues, other.residues)
        and np.array_equal(run.clusters, other.clusters)
    )


def _arm(seeds: Mapping[int, Run], baseline: str, first: Mapping[int, Run] | None) -> Arm:
    any_run = next(iter(seeds.values()))
    nats, within = _mean_nats(seeds), (any_run.residues, any_run.clusters)
    against = [run.evaluation.baselines[baseline].difference for run in seeds.values()]
    arm = Arm(
        corpus_estimate(nats, *within).exp(),
        {seed: run.evaluation.model.perplexity.value for seed, run in seeds.items()},
        sum(one.verdict is Verdict.BETTER for one in against),
    )
    if first is None:
        return arm
    difference = corpus_estimate(nats - _mean_nats(first), *within)
    by_seed = {
        seed: float((run.nats - first[seed].nats).sum() / run.residues.sum())
        for seed, run in seeds.items()
    }
    over_seeds = seed_interval([*by_seed.values()])
    both = verdict(difference.interval, over_seeds)
    return replace(
        arm, difference=difference, seed_differences=by_seed, seed_interval=over_seeds, verdict=both
    )


def seed_interval(differences: list[float]) -> Interval | None:
    """The 95 % interval of the mean difference, by Student's t; None for one seed."""
    count = len(differences)
    if count < 2:
        return None
    low, high = student_t.interval(
        CONFIDENCE, count - 1, loc=np.mean(differences), scale=sem(differences)
    )
    return float(low), float(high)


def _mean_nats(seeds: Mapping[int, Run]) -> NDArray[np.float64]:
    return np.mean([run.nats for run in seeds.values()], axis=0)


def comparison_table(comparison: Comparison) -> Table:
    terms, first = comparison.terms, next(iter(comparison.arms))
    over = f"[over {terms.sequence}s]"
    rows: list[list[Cell]] = []
    for arm, figures in comparison.arms.items():
        seeds = ", ".join(f"{value:.3f}" for value in figures.seeds.values())
        row: list[Cell] = [arm, Number(figures.perplexity, ".3f"), seeds]
        if figures.difference is None:
            rows.append([*row, "", "", "(the others are compared with it)"])
            continue
        interval = figures.seed_interval and interval_text(figures.seed_interval, "+.4f")
        by_seed = ", ".join(f"{value:+.4f}" for value in figures.seed_differences.values())
        difference = f"{figures.difference:+.4f} {interval or ''}".rstrip()
        rows.append([*row, difference, by_seed, f"{figures.verdict} {first}"])
    baseline = Number(comparison.baseline_perplexity, ".3f")
    rows.append([f"{comparison.baseline} baseline", baseline, "", "", "", ""])
    counts = ", ".join(
        f"{arm} {figures.better_than_baseline} of {len(figures.seeds)}"
        for arm, figures in comparison.arms.items()
    )
    heads = ["arm", f"perplexity {over}", "each seed"]
    heads += [f"difference, nats/{terms.token} {over} [over seeds]", "each seed", "verdict"]
    return Table(
        heads,
        rows,
        notes=[
            "All intervals are of 95 %.",
            f"Seeds {Verdict.BETTER} the {comparison.baseline} baseline, paired: {counts}.",
        ],
    )


def plot_comparison(comparison: Comparison, file: Path) -> None:
    """Plot each arm's perplexity and seeds to a PNG; raises DataError if it cannot be written."""
    arms = comparison.arms
    figure = new_figure(8, 1.5 + 0.6 * len(arms))
    axes = figure.subplots()
    for place, figures in enumerate(arms.values()):
        plot_estimate(axes, place, figures.perplexity, fmt="o", color=BLUE)
        seeds = [*figures.seeds.values()]
        axes.plot(seeds, [place + 0.2] * len(seeds), "|", color=GREY, markersize=10)
    value = comparison.baseline_perplexity.value
    axes.axvline(value, color=ORANGE, ls="--", label=comparison.baseline)
    axes.set_yticks(range(len(arms)), map(plain, arms))
    held_out = f"held-out {comparison.terms.sequence}s"
    axes.set(xlabel=f"perplexity on {held_out} (95 % interval; ticks below: each seed)")
    axes.set_ylim(len(arms) - 0.5, -0.5)  # first arm on top
    legend_above(axes)
    save_figure(figure, file)
