"""The evaluation as pictures: the training curve, the likelihoods, calibration, and quality."""

from collections.abc import Sequence
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import numpy as np

from d2plm.evaluation.document import MODEL, REFERENCE
from d2plm.evaluation.quality import plot_quality

SMOOTHED_PARTS = 8  # the training curve is a running mean over this share of the run
BLUE, ORANGE, SKY, GREY = "#0072B2", "#E69F00", "#56B4E9", "#999999"  # of Okabe and Ito
BASELINES = {"unigram": (GREY, ":"), "5-gram": (SKY, "-."), REFERENCE: (ORANGE, "--")}
OTHERS = ("#009E73", "#CC79A7", "#D55E00")
MARKERS = "os^Dv"  # with the colours, so that lines can be told apart without them
DPI = 120
_LONGEST_NAME = 40  # characters


def plot(
    evaluation: dict[str, Any], metrics: Sequence[dict[str, float]], file: Path, title: str
) -> None:
    """Write one PNG: curve and likelihoods, calibration and identity, and quality where measured.

    Args:
        evaluation: what `summarise` gave.
        metrics: the rows that training logged; may be empty.
        file: the picture.
        title: of the training curve.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = 2 + (evaluation["quality"] is not None)
    figure = pyplot.figure(figsize=(12, 4.2 * rows), layout="constrained")
    parts: Any = figure.subfigures(rows, 1)
    curve, bars = parts[0].subplots(1, 2, width_ratios=(1.6, 1))
    plot_curve(curve, evaluation, metrics, title)
    plot_likelihoods(bars, evaluation)
    by_identity = measured_bins(evaluation["by_identity"])
    second = iter(parts[1].subplots(1, 1 + bool(by_identity), squeeze=False)[0])
    plot_calibration(next(second), evaluation)
    if by_identity:
        plot_identity(next(second), by_identity)
    if evaluation["quality"] is not None:
        plot_quality(evaluation["quality"], parts[2].subplots(1, 3))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)
    pyplot.close(figure)


def plot_curve(
    axes: Any, evaluation: dict[str, Any] | None, metrics: Sequence[dict[str, float]], title: str
) -> None:
    """Draw perplexity over the steps, in training and held out, and the baselines' where known."""
    trained = [(m["step"], m["loss"]) for m in metrics if "loss" in m]
    validated = [
        (m["step"], m["validation_perplexity"]) for m in metrics if "validation_perplexity" in m
    ]
    shown = []
    if trained:
        steps, losses = np.array(trained).T
        window = max(len(losses) // SMOOTHED_PARTS, 1)
        smooth = np.exp(np.convolve(losses, np.full(window, 1 / window), "valid"))
        shown.append(smooth.min())
        axes.plot(
            steps[window - 1 :],
            smooth,
            color=BLUE,
            alpha=0.35,
            label="training (running mean)",
        )
    if validated:
        axes.plot(*zip(*validated, strict=True), "o-", color=BLUE, label="held-out subset (EMA)")
    axes.set(xlabel="optimizer step", ylabel="perplexity", title=plain(title))
    if evaluation is not None:
        for name, (colour, dashes) in BASELINES.items():
            perplexity = evaluation["baselines"][name]["perplexity"]
            axes.axhline(perplexity, color=colour, ls=dashes, label=name)
        shown += [evaluation["baselines"][name]["perplexity"] for name in BASELINES]
        shown.append(evaluation["model"]["perplexity"])
        axes.set_ylim(min(shown) - 0.3, max(*shown, 20) + 0.2)
    axes.legend(fontsize=8)


def plot_likelihoods(axes: Any, evaluation: dict[str, Any]) -> None:
    """Draw each perplexity with its interval: the baselines, other models, the model."""
    rows = {**evaluation["baselines"], **evaluation["others"], MODEL: evaluation["model"]}
    colours = {
        **{name: colour for name, (colour, _) in BASELINES.items()},
        **dict(zip(evaluation["others"], OTHERS, strict=False)),
        MODEL: BLUE,
    }
    for place, (name, values) in enumerate(rows.items()):
        centre = values["perplexity"]
        low, high = values["perplexity_interval"] or (centre, centre)
        axes.errorbar(
            [centre],
            [place],
            xerr=[[centre - low], [high - centre]],
            fmt="s" if name == MODEL else "o",
            color=colours.get(name, GREY),
            capsize=3,
        )
        axes.annotate(
            f"{centre:.2f}",
            (centre, place),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    shown = [values["perplexity"] for values in rows.values()]
    axes.set_yticks(range(len(rows)), [plain(name) for name in rows])
    axes.set(
        xlabel="perplexity on held-out proteins (95 % interval)",
        xlim=(min(shown) - 0.5, max(shown) + 0.4),
    )
    axes.set_ylim(len(rows) - 0.5, -0.8)  # the first on top, with room for its figure


def plot_calibration(axes: Any, evaluation: dict[str, Any]) -> None:
    """Draw the cross-entropy against the corrupted fraction, of the model and of other models."""
    styles = zip(chain((BLUE, *OTHERS), repeat(GREY)), cycle(MARKERS), strict=False)
    for (name, rows), (colour, marker) in zip(
        evaluation["calibration"].items(), styles, strict=False
    ):
        centres = [sum(row["fraction"]) / 2 for row in rows]
        values = [row["cross_entropy"] for row in rows]
        bounds = [row["interval"] or [row["cross_entropy"]] * 2 for row in rows]
        axes.plot(centres, values, f"{marker}-", color=colour, label=plain(name))
        axes.fill_between(centres, *np.array(bounds).T, color=colour, alpha=0.2, lw=0)
    unigram = evaluation["baselines"]["unigram"]["nelbo"]
    axes.axhline(unigram, color=GREY, ls=BASELINES["unigram"][1], label="unigram")
    corrupted = "masked" if evaluation["model"]["perplexity_mlm15"] else "replaced"
    axes.set(
        xlabel=f"fraction of the residues {corrupted}",
        ylabel="cross-entropy, nats/residue",
        title="calibration",
        xlim=(0, 1),
    )
    axes.legend(fontsize=8)


def measured_bins(by_identity: dict[str, Any] | None) -> dict[str, Any]:
    """The bins that hold a protein."""
    return {name: row for name, row in (by_identity or {}).items() if row["residues"]}


def plot_identity(axes: Any, rows: dict[str, Any]) -> None:
    """Draw the perplexity by identity to the nearest training protein, of `measured_bins`."""
    for offset, key, colour, form in ((-0.1, "model", BLUE, "s"), (0.1, REFERENCE, ORANGE, "o")):
        for place, row in enumerate(rows.values()):
            centre = row[key]["perplexity"]
            low, high = row[key]["perplexity_interval"] or (centre, centre)
            axes.errorbar(
                [place + offset],
                [centre],
                yerr=[[centre - low], [high - centre]],
                fmt=form,
                color=colour,
                capsize=3,
                label=None if place else (MODEL if key == "model" else key),
            )
    labels = [f"{name}\n{row['sequences']:,} proteins" for name, row in rows.items()]
    axes.set_xticks(range(len(rows)), labels)
    axes.set(
        xlabel="identity to the nearest training protein",
        ylabel="perplexity (95 % interval)",
        xlim=(-0.5, len(rows) - 0.5),
    )
    axes.legend(fontsize=8)


def plain(name: str) -> str:
    """A name that may be a folder's, short enough for a figure, its $ no beginning of a formula."""
    short = name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"
    return short.replace("$", r"\$")
