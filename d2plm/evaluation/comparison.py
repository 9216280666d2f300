"""Several arms, each trained with several seeds, compared on the same held-out proteins.

An arm's figure is computed from its nats averaged over the seeds. There are two sources of chance:
the choice of held-out proteins, whose interval resamples homology clusters, and the training seed,
whose interval is Student's t over the seeds' differences. A difference is considered shown if both
intervals exclude zero; with one seed no difference is shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import sem
from scipy.stats import t as student_t

from d2plm.core.errors import ConfigError
from d2plm.core.number_text import interval_text
from d2plm.core.palette import BLUE, GREY, ORANGE, new_figure, save_figure
from d2plm.evaluation.findings import against, judge
from d2plm.evaluation.likelihood import CONFIDENCE, corpus_estimate, paired_difference
from d2plm.evaluation.plots import plot_perplexity
from d2plm.evaluation.terms import terms_of

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Run:
    """One arm's evaluation with one seed.

    Attributes:
        evaluation: as `summarise` returned it.
        nats: float64 [N]; `residues`, `clusters`: integer [N].
    """

    evaluation: dict[str, Any]
    nats: NDArray[np.float64]
    residues: NDArray[np.int64]
    clusters: NDArray[np.int64]


def compare(runs: Mapping[str, Mapping[int, Run]]) -> dict[str, Any]:
    """The arms compared with the first of them and with the best baseline.

    Args:
        runs: arm → seed → run; the same seeds in every arm.

    Returns:
        JSON content: `arms` with perplexity, interval and each seed's; `paired`, the differences
        from the first arm in nats per residue (below zero: better than the first).

    Raises:
        ConfigError: if the runs were not evaluated on the same proteins.
    """
    first_arm, *other_arms = runs
    first = next(iter(runs[first_arm].values()))
    for arm, seeds in runs.items():
        for seed, run in seeds.items():
            if not _same_residues(run, first):
                raise ConfigError(
                    f"arm {arm}, seed {seed}: was evaluated on other residues than {first_arm}; "
                    "compare arms on one split, with one limit on the length"
                )
    best = judge(first.evaluation).baseline
    return {
        "format_version": FORMAT_VERSION,
        **{key: value for key, value in first.evaluation.items() if key == "terms"},
        "proteins": first.evaluation["sequences"],
        "residues": int(first.residues.sum()),
        "clusters": first.evaluation["clusters"],
        "baseline": {best: first.evaluation["baselines"][best]},
        "arms": {arm: _arm(seeds, best) for arm, seeds in runs.items()},
        "against": first_arm,
        "paired": {arm: _paired(runs[arm], runs[first_arm]) for arm in other_arms},
    }


def _same_residues(run: Run, other: Run) -> bool:
    ours, theirs = run.evaluation, other.evaluation
    return (
        ours["digests"]["validation"] == theirs["digests"]["validation"]
        and ours["settings"].get("split") == theirs["settings"].get("split")
        and np.array_equal(run.residues, other.residues)
        and np.array_equal(run.clusters, other.clusters)
    )


def _arm(seeds: Mapping[int, Run], baseline: str) -> dict[str, Any]:
    any_run = next(iter(seeds.values()))
    estimate = corpus_estimate(_mean_nats(seeds), any_run.residues, any_run.clusters).exp()
    outcomes = [against(run.evaluation, baseline)[2] for run in seeds.values()]
    return {
        "estimator": any_run.evaluation["model"]["estimator"],
        "perplexity": estimate.value,
        "perplexity_interval": estimate.interval,
        "seeds": {seed: run.evaluation["model"]["perplexity"] for seed, run in seeds.items()},
        "better_than_baseline": outcomes.count("better"),
    }


def _paired(ours: Mapping[int, Run], theirs: Mapping[int, Run]) -> dict[str, Any]:
    any_run = next(iter(ours.values()))
    paired = paired_difference(
        _mean_nats(ours), _mean_nats(theirs), any_run.residues, any_run.clusters
    )
    by_seed = {
        seed: float((run.nats - theirs[seed].nats).sum() / run.residues.sum())
        for seed, run in ours.items()
    }
    over_seeds = seed_interval([*by_seed.values()])
    shown = all(i is not None and i[0] * i[1] > 0 for i in (paired["interval"], over_seeds))
    return {**paired, "seeds": by_seed, "seed_interval": over_seeds, "shown": shown}


def seed_interval(differences: list[float]) -> list[float] | None:
    """The 95 % interval of the mean difference over seeds, by Student's t; None for one seed."""
    count = len(differences)
    if count < 2:
        return None
    low, high = student_t.interval(
        CONFIDENCE, count - 1, loc=np.mean(differences), scale=sem(differences)
    )
    return [float(low), float(high)]


def _mean_nats(seeds: Mapping[int, Run]) -> NDArray[np.float64]:
    return np.mean([run.nats for run in seeds.values()], axis=0)


def comparison_table(comparison: dict[str, Any]) -> str:
    """The comparison as a Markdown table."""
    terms = terms_of(comparison)
    over = f"[over {terms.sequence}s]"
    lines = [
        f"| arm | perplexity {over} | each seed | difference, nats/{terms.token} {over}"
        " [over seeds] | each seed |",
        "|---|---|---|---|---|",
    ]
    for arm, figures in comparison["arms"].items():
        seeds = ", ".join(f"{value:.3f}" for value in figures["seeds"].values())
        paired = comparison["paired"].get(arm)
        difference = "| (the others are compared with it) | "
        if paired is not None:
            by_seed = ", ".join(f"{value:+.4f}" for value in paired["seeds"].values())
            verdict = "" if paired["shown"] else " (not shown to differ)"
            difference = (
                f"| {paired['nelbo_difference']:+.4f} {_interval(paired['interval'], '+.4f')}"
                f" {_interval(paired['seed_interval'], '+.4f')}{verdict} | {by_seed} "
            )
        lines.append(
            f"| {arm} | {figures['perplexity']:.3f} "
            f"{_interval(figures['perplexity_interval'], '.3f')} | {seeds} {difference}|"
        )
    ((baseline, values),) = comparison["baseline"].items()
    lines.append(
        f"| {baseline} baseline | {values['perplexity']:.3f} "
        f"{_interval(values['perplexity_interval'], '.3f')} | | | |"
    )
    lines += ["", "All intervals are of 95 %."]
    counts = ", ".join(
        f"{arm} {figures['better_than_baseline']} of {len(figures['seeds'])}"
        for arm, figures in comparison["arms"].items()
    )
    lines += [f"Seeds below the {baseline} baseline, paired interval: {counts}."]
    return "\n".join(lines)


def _interval(interval: list[float] | None, form: str) -> str:
    return "" if interval is None else interval_text(interval, form)


def plot_comparison(comparison: dict[str, Any], file: Path) -> None:
    """Write a PNG: each arm's perplexity, interval and seeds, and the best baseline.

    Raises:
        DataError: if the file cannot be written.
    """
    arms = comparison["arms"]
    figure = new_figure(8, 1.5 + 0.6 * len(arms))
    axes = figure.subplots()
    for place, figures in enumerate(arms.values()):
        plot_perplexity(axes, place, figures, fmt="o", color=BLUE)
        seeds = list(figures["seeds"].values())
        axes.plot(seeds, [place + 0.2] * len(seeds), "|", color=GREY, markersize=10)
    ((baseline, values),) = comparison["baseline"].items()
    axes.axvline(values["perplexity"], color=ORANGE, ls="--", label=baseline)
    axes.set_yticks(range(len(arms)), list(arms))
    held_out = f"held-out {terms_of(comparison).sequence}s"
    axes.set(xlabel=f"perplexity on {held_out} (95 % interval; ticks below: each seed)")
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    save_figure(figure, file)
