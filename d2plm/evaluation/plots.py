"""Figures of an evaluation: training curve, likelihoods, calibration, identity, quality, members.

Each function draws one matplotlib axes; `plot` combines them in one PNG, the report in SVGs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import numpy as np

from d2plm.core.estimate import Estimate
from d2plm.core.palette import (
    BLUE,
    DASHES,
    GREEN,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    SERIES,
    SKY,
    legend_above,
    new_figure,
    save_figure,
)
from d2plm.evaluation.findings import judge
from d2plm.evaluation.new_members import NATURAL as NATURAL_MEMBERS
from d2plm.evaluation.quality import LENGTH_BIN
from d2plm.evaluation.result import (
    ALIGNED,
    GENERATED,
    MODEL,
    PROFILE,
    Bounds,
    Evaluation,
    GivenRelatives,
    Quality,
    SequenceSet,
)
from d2plm.evaluation.terms import REFERENCE

ROWS = (  # layout of an evaluation's figure
    ("training", "likelihood"),
    ("calibration", "identity", "relatives"),
    ("residues", "lengths", "novelty"),
)
SMOOTHED_PARTS = 8  # the training curve is a running mean over an eighth of the run
BASELINES = {
    "unigram": (GREY, ":"),
    "5-gram": (SKY, "-."),
    REFERENCE: (ORANGE, "--"),
    f"{REFERENCE} × 5-gram": (INK, ":"),
}
OTHERS = SERIES[2:]  # for other models; not this model's blue or the baseline's orange
TRAINING_COLOUR = GREY
HATCHES = ("", "///", "\\\\\\", "xxx")
MOST_LINEAR = 50  # a larger perplexity needs a logarithmic axis
_OF_MEMBERS: dict[str, dict[str, Any]] = {
    NATURAL_MEMBERS: {"color": GREEN, "marker": "^", "ls": "", "markersize": 5, "alpha": 0.7},
    GENERATED: {"color": BLUE, "marker": "o", "ls": "", "markersize": 5, "alpha": 0.7},
}
_REFERENCES: list[dict[str, Any]] = [
    {"color": colour, "marker": marker, "ls": "", "markersize": 4, "alpha": 0.7, "zorder": 1}
    for colour, marker in ((ORANGE, "D"), (INK, "x"), (GREY, "s"))
]
_LONGEST_NAME = 24  # characters in a label or legend
_LONGEST_LINE = 40
_IDENTITY_STEPS = 2  # number of bins of the stored histogram per bar


def plot(
    evaluation: Evaluation, metrics: Sequence[dict[str, float]], file: Path, title: str
) -> None:
    """Write one PNG with the figures of ROWS that were measured; raises DataError on failure."""
    measured = figures_of(evaluation, metrics, evaluation.quality)
    rows = [[name for name in row if name in measured] for row in ROWS]
    rows = [row for row in rows if row]
    figure = new_figure(12, 4.6 * len(rows))
    parts: Any = figure.subfigures(len(rows), 1)
    parts[0].suptitle(plain(title, _LONGEST_LINE))
    for part, row in zip(parts, rows, strict=True):
        widths = [1.6 if name == "training" else 1 for name in row]
        columns = part.subfigures(1, len(row), width_ratios=widths, squeeze=False)[0]
        for column, name in zip(columns, row, strict=True):
            measured[name](column)
    save_figure(figure, file)


def figures_of(
    evaluation: Evaluation | None, metrics: Sequence[dict[str, float]], quality: Quality | None
) -> dict[str, Callable[[Any], None]]:
    """Name → a function that draws into an empty figure, for the figures that have data."""
    given = evaluation and evaluation.given_relatives
    bins = [one for one in ((evaluation and evaluation.by_identity) or {}).values() if one.residues]
    of_proteins = quality is not None and quality.terms.unit is None  # residues, homology
    figures: dict[str, tuple[object, Callable[..., None], Any]] = {
        "likelihood": (evaluation, plot_likelihoods, evaluation),
        "calibration": (evaluation, plot_calibration, evaluation),
        "identity": (bins, plot_identity, evaluation),
        "relatives": (given, plot_given_relatives, given),
        "lengths": (quality, plot_lengths, quality),
        "residues": (of_proteins, plot_residues, quality),
        "novelty": (of_proteins, plot_novelty, quality),
    }

    def bound(draw: Callable[..., None], of: Any) -> Callable[[Any], None]:
        return lambda figure: draw(figure.subplots(), of)

    drawn = {name: bound(draw, of) for name, (known, draw, of) in figures.items() if known}
    if metrics:
        drawn["training"] = partial(plot_curves, evaluation=evaluation, metrics=metrics)
        drawn["pace"] = partial(plot_pace, metrics=metrics)
    return drawn


def plot_curves(
    figure: Any, evaluation: Evaluation | None, metrics: Sequence[dict[str, float]]
) -> None:
    """Plot the held-out perplexity over the steps with the baselines, and the training curve below.

    The axes are separate because a model given relatives may have a much lower training perplexity.
    """
    trained, validated = _points(metrics, "loss"), _points(metrics, "validation_perplexity")
    held_out = bool(validated) or evaluation is not None
    heights = [2] * held_out + [1] * (bool(trained) or not held_out)
    rows = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    if held_out:
        _plot_held_out(rows[0], evaluation, validated)
    if trained:
        steps, losses = np.array(trained).T
        window = max(len(losses) // SMOOTHED_PARTS, 1)
        smooth = np.exp(np.convolve(losses, np.full(window, 1 / window), "valid"))
        rows[-1].plot(steps[window - 1 :], smooth, color=BLUE, lw=1.2)
        rows[-1].set_ylabel("training")
    rows[-1].set_xlabel("optimizer step")


def _points(metrics: Sequence[dict[str, float]], key: str) -> list[tuple[float, float]]:
    return [(row["step"], row[key]) for row in metrics if key in row]


def _plot_held_out(
    axes: Any, evaluation: Evaluation | None, validated: Sequence[tuple[float, float]]
) -> None:
    """Plot the held-out curve and the baselines; a curve that starts above all of them is cut."""
    shown = [perplexity for _, perplexity in validated]
    if validated:
        axes.plot(*zip(*validated, strict=True), "o-", color=BLUE, label="this model (EMA)")
    if evaluation is not None:
        shown = [*shown[-1:], min([*shown, evaluation.model.perplexity.value])]
        for name, (colour, dashes) in _drawn_baselines(evaluation).items():
            shown.append(evaluation.baselines[name].perplexity.value)
            axes.axhline(shown[-1], color=colour, ls=dashes, label=name)
        room = 0.08 * (max(shown) - min(shown)) + 0.01
        axes.set_ylim(min(shown) - room, max(shown) + room)
    axes.set_ylabel("held-out perplexity")
    legend_above(axes)


def _drawn_baselines(evaluation: Evaluation) -> dict[str, tuple[str, str]]:
    """The style of each baseline to plot: those of BASELINES, and the best of other alphabets."""
    best = judge(evaluation).baseline
    present = {name: style for name, style in BASELINES.items() if name in evaluation.baselines}
    return present if evaluation.terms.unit is None else {best: (INK, ":"), **present}


def plot_pace(figure: Any, metrics: Sequence[dict[str, float]]) -> None:
    both = figure.subplots(2, 1, sharex=True)
    curves = (("learning_rate", "learning rate"), ("tokens_per_second", "tokens/s"))
    for axes, (key, label), colour in zip(both, curves, SERIES[:2], strict=True):
        if points := _points(metrics, key):
            axes.plot(*zip(*points, strict=True), color=colour, lw=1.2)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    both[-1].set_xlabel("optimizer step")


def plot_estimate(
    axes: Any, place: float, estimate: Estimate, vertical: bool = False, **style: Any
) -> None:
    """Plot an estimate at a place on the other axis, with its interval, if any."""
    centre, (low, high) = estimate.value, estimate.ends
    error = [[max(centre - low, 0)], [max(high - centre, 0)]]  # rounding may cross the centre
    x, y = [centre], [place]
    style |= {"capsize": 3, "yerr" if vertical else "xerr": error}
    axes.errorbar(*((y, x) if vertical else (x, y)), **style)


def plot_likelihoods(axes: Any, evaluation: Evaluation) -> None:
    colours = {
        **{name: colour for name, (colour, _) in BASELINES.items()},
        **dict(zip(evaluation.others, OTHERS, strict=False)),
        MODEL: BLUE,
    }
    bounds: Bounds = {**evaluation.baselines, **evaluation.others, MODEL: evaluation.model}
    plot_bounds(axes, bounds, colours, MODEL)


def plot_bounds(axes: Any, bounds: Bounds, colours: Mapping[str, str], model: str) -> None:
    """Plot each perplexity with its interval; that of `model` is a square."""
    for place, (name, bound) in enumerate(bounds.items()):
        form, colour = "s" if name == model else "o", colours.get(name, GREY)
        plot_estimate(axes, place, bound.perplexity, fmt=form, color=colour)
        (_, high), text = bound.perplexity.ends, f"{bound.perplexity.value:.2f}"
        style = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(text, (high, place), **style)
    shown = [bound.perplexity.value for bound in bounds.values()]
    axes.set_yticks(range(len(bounds)), [plain(name) for name in bounds])
    room = 0.15 * (max(shown) - min(shown)) + 0.3
    axes.set(xlabel="perplexity, 95 % interval", xlim=(min(shown) - room, max(shown) + 3 * room))
    if max(shown) > MOST_LINEAR:
        axes.set(xscale="log", xlim=(0.8 * min(shown), 2 * max(shown)))
    axes.set_ylim(len(bounds) - 0.5, -0.5)  # first bound on top


def plot_calibration(axes: Any, evaluation: Evaluation) -> None:
    """Plot cross-entropy against the corrupted fraction, for the model and other models."""
    styles = zip(chain((BLUE, *OTHERS), repeat(GREY)), cycle(MARKERS), strict=False)
    for (name, bins), (colour, marker) in zip(evaluation.calibration.items(), styles, strict=False):
        centres = [(one.low + one.high) / 2 for one in bins]
        values = [one.cross_entropy.value for one in bins]
        bounds = [one.cross_entropy.ends for one in bins]
        axes.plot(centres, values, f"{marker}-", color=colour, label=plain(name))
        axes.fill_between(centres, *np.array(bounds).T, color=colour, alpha=0.2, lw=0)
    unigram = evaluation.baselines["unigram"].nelbo.value
    axes.axhline(unigram, color=GREY, ls=BASELINES["unigram"][1], label="unigram")
    terms = evaluation.terms
    corrupted = "masked" if evaluation.model.perplexity_mlm15 else "replaced"
    axes.set(
        xlabel=f"fraction of the {terms.token}s {corrupted}",
        ylabel=f"cross-entropy, nats/{terms.token}",
        xlim=(0, 1),
    )
    legend_above(axes)


def plot_identity(axes: Any, evaluation: Evaluation) -> None:
    """Plot perplexity by identity to the nearest training protein, for bins that have proteins."""
    rows = {name: one for name, one in (evaluation.by_identity or {}).items() if one.residues}
    model, reference = (
        [getattr(one, of) for one in rows.values()] for of in ("model", "reference")
    )
    series = (-0.1, MODEL, model, BLUE, "s"), (0.1, REFERENCE, reference, ORANGE, "o")
    for offset, name, bounds, colour, form in series:
        for place, bound in enumerate(bounds):
            style = {"fmt": form, "color": colour, "label": None if place else name}
            plot_estimate(axes, place + offset, bound.perplexity, vertical=True, **style)
    labels = [f"{name}\n({one.sequences:,})" for name, one in rows.items()]
    axes.set_xticks(range(len(rows)), labels)
    axes.set(
        xlabel="identity to the nearest training protein (proteins)",
        ylabel="perplexity, 95 % interval",
        xlim=(-0.5, len(rows) - 0.5),
    )
    legend_above(axes)


def plot_given_relatives(axes: Any, given: GivenRelatives) -> None:
    """Plot perplexity given ever closer relatives, of the model and of profile HMMs."""
    rows = given.below[::-1]
    bounds: list[Bounds] = [{MODEL: given.alone}, *({MODEL: r.model, **r.baselines} for r in rows)]
    series = ((MODEL, BLUE, "s"), (PROFILE, ORANGE, "o"), (ALIGNED, GREEN, "^"))
    for offset, (name, colour, form) in enumerate(series):
        for place, of in enumerate(bounds):
            if name in of:
                style = {"fmt": form, "color": colour, "label": name if place == 1 else None}
                at = place + 0.12 * (offset - 1)
                plot_estimate(axes, at, of[name].perplexity, vertical=True, **style)
    axes.set_xticks(range(len(bounds)), ["none", *(f"below {row.identity:.0%}" for row in rows)])
    axes.set(
        xlabel="identity of the relatives that are given",
        ylabel="perplexity, 95 % interval",
        ylim=(0, None),
    )
    legend_above(axes)


def plot_residues(axes: Any, quality: Quality) -> None:
    """Plot residue frequencies: the training proteins as bars, the sets as points."""
    sets, expected = quality.sets, quality.training_frequencies
    letters = sorted(expected, key=expected.__getitem__, reverse=True)
    places = np.arange(len(letters))
    bars = [100 * expected[letter] for letter in letters]
    axes.bar(places, bars, color=TRAINING_COLOUR, alpha=0.5, label="training")
    for number, ((name, figures), colour, marker) in enumerate(
        zip(sets.items(), cycle(SERIES), cycle(MARKERS), strict=False)
    ):
        shares = [100 * figures.residue_frequencies[letter] for letter in letters]
        shift = 0.6 * ((number + 0.5) / len(sets) - 0.5)
        axes.plot(places + shift, shares, marker, markersize=4, color=colour, label=name)
    axes.set_xticks(places, letters)
    axes.set(xlabel="residue", ylabel="% of residues")
    legend_above(axes)


def plot_lengths(axes: Any, quality: Quality) -> None:
    """Plot the lengths' distribution functions, which stay readable for few proteins."""
    terms, histograms = quality.terms, {"training": np.array(quality.training_lengths)}
    histograms |= {name: np.array(one.length_histogram) for name, one in quality.sets.items()}
    histograms.pop(terms.reference, None)  # same lengths as the generated proteins
    bins = max(map(len, histograms.values()))
    styles = zip(
        (TRAINING_COLOUR, *SERIES), chain([2.5], repeat(1.4)), ("-", *DASHES), strict=False
    )
    for (name, counts), (colour, width, dashes) in zip(histograms.items(), styles, strict=False):
        shares = 100 * np.pad(counts, (0, bins - len(counts))).cumsum() / counts.sum()
        ends = LENGTH_BIN * np.arange(bins + 1)
        axes.plot(ends, [0, *shares], color=colour, ls=dashes, lw=width, label=name)
    axes.set(xlabel=f"length in {terms.token}s", ylabel=f"% of {terms.sequence}s up to it")
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)
    legend_above(axes)


def plot_novelty(axes: Any, quality: Quality) -> None:
    """Plot identities to the nearest training protein as bars, with one bar for "no hit"."""
    sets = quality.sets
    width = 0.8 / len(sets)
    for number, ((name, figures), colour, hatch) in enumerate(
        zip(sets.items(), cycle(SERIES), cycle(HATCHES), strict=False)
    ):
        shares = identity_shares(figures)
        places = np.arange(len(shares)) + (number - (len(sets) - 1) / 2) * width
        axes.bar(
            places, shares, width, color=colour, hatch=hatch, edgecolor=INK, lw=0.4, label=name
        )
    labels = ["none", *(f"{low}–{low + 10}" for low in range(0, 100, 10))]
    axes.set_xticks(range(len(labels)), labels, rotation=60)
    axes.set(xlabel="identity to the nearest training protein, %", ylabel="% of proteins")
    legend_above(axes)


def identity_shares(figures: SequenceSet) -> list[float]:
    """Percent of a set's proteins without a hit, then in each tenth of identity."""
    tenths = np.reshape(figures.identity_histogram, (-1, _IDENTITY_STEPS)).sum(axis=1)
    # Proteins without a hit have identity 0, which is in the first bin.
    missed = round((1 - (figures.hit_share or 0)) * figures.sequences)
    tenths[0] -= missed
    return [float(share) for share in 100 * np.array([missed, *tenths]) / figures.sequences]


def plot_new_members(members: Mapping[str, Any], file: Path) -> None:
    """Write one PNG of the result of `Judge.describe`; raises DataError if it cannot be written."""
    figure = new_figure(12, 5.2)
    plane, membership = figure.subplots(1, 2)
    plot_plane(plane, members)
    plot_membership(membership, members)
    save_figure(figure, file)


def plot_plane(axes: Any, members: Mapping[str, Any]) -> None:
    """Plot designs and natural members by two principal components of the aligned columns."""
    for name, style in _OF_MEMBERS.items():
        if places := [one["plane"] for one in members["sets"][name]["proteins"]]:
            axes.plot(*np.transpose(places), label=f"{name} ({len(places)})", **style)
    axes.set(xlabel="first principal component", ylabel="second")
    legend_above(axes)


def plot_membership(axes: Any, members: Mapping[str, Any]) -> None:
    """Plot each protein's score under the family's HMM against identity to the nearest member."""
    references = iter(_REFERENCES)
    for name, own in members["sets"].items():
        if proteins := own["proteins"]:
            across = [100 * one["identity"] for one in proteins]
            style = _OF_MEMBERS.get(name) or next(references)
            scores = [one["bits"] for one in proteins]
            axes.plot(across, scores, label=name, **style)
    axes.axhline(members["threshold_bits"], color=GREY, ls=":", label="a member from here")
    axes.set(xlabel="identity to the nearest given member, %", ylabel="score by the HMM, bits")
    axes.set_xlim(right=102)
    legend_above(axes)


def plain(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name shortened for a figure, with `$` escaped so that it does not start a formula."""
    short = name if len(name) <= longest else f"…{name[1 - longest :]}"
    return short.replace("$", r"\$")
