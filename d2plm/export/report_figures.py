"""The report's figures: SVG whose text is text and whose colours are the page's variables.

matplotlib draws them; what it writes is stripped of all that a page does not need, which leaves no
address of anything outside. Each is drawn at the width of a phone, where it is shown as it is.
"""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, cycle, repeat
from typing import Any

import numpy as np

from d2plm.evaluation.document import REFERENCE
from d2plm.evaluation.plots import (
    measured_bins,
    plot_calibration,
    plot_curve,
    plot_identity,
    plot_likelihoods,
)
from d2plm.evaluation.quality import COLOURS, LENGTH_BIN, TRAINING_COLOUR, plot_residues

WIDTH, HEIGHT = 5.0, 3.3  # inches
FONT_SIZE = 9
# What stands for a colour of matplotlib's → the variable that the page's style sheet sets.
VARIABLES = {
    "#0072b2": "--blue",
    "#e69f00": "--orange",
    "#56b4e9": "--sky",
    "#009e73": "--green",
    "#cc79a7": "--pink",
    "#d55e00": "--vermilion",
    "#999999": "--grey",
    "#111111": "--ink",
    "#bbbbbb": "--line",
}
_INK, _LINE = "#111111", "#bbbbbb"
_DASHES = ("-", "--", "-.", ":")
_IDENTITY_STEPS = 2  # of the kept histogram's bins make one bar
_NAMESPACE = re.compile(r"\{[^}]*\}")


def training_figure(metrics: Sequence[dict[str, float]], evaluation: dict[str, Any] | None) -> str:
    """Perplexity in training and held out over the steps, beside the baselines."""
    return _drawn(
        "perplexity over the training steps",
        lambda figure: plot_curve(figure.subplots(), evaluation, metrics, ""),
    )


def pace_figure(metrics: Sequence[dict[str, float]]) -> str:
    """Learning rate, and tokens per second."""

    def draw(figure: Any) -> None:
        for axes, key, colour, label in zip(
            figure.subplots(2, 1, sharex=True),
            ("learning_rate", "tokens_per_second"),
            COLOURS,
            ("learning rate", "tokens/s"),
            strict=False,
        ):
            points = [(row["step"], row[key]) for row in metrics if key in row]
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, lw=1.2)
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
        axes.set_xlabel("optimizer step")

    return _drawn("learning rate and throughput over the training steps", draw)


def likelihood_figure(evaluation: dict[str, Any]) -> str:
    """The bound of the model and of others beside the baselines, with intervals."""
    return _drawn(
        "perplexity of the model and of the baselines, with intervals",
        lambda figure: plot_likelihoods(figure.subplots(), evaluation),
    )


def calibration_figure(evaluation: dict[str, Any]) -> str:
    """The cross-entropy by the share of the residues that is masked."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        plot_calibration(axes, evaluation)
        axes.set_title("")

    return _drawn("cross-entropy against the corrupted fraction", draw)


def identity_figure(evaluation: dict[str, Any]) -> str:
    """The bound by identity to the nearest training protein."""
    return _drawn(
        "perplexity by identity to the nearest training protein",
        lambda figure: plot_identity(figure.subplots(), measured_bins(evaluation["by_identity"])),
    )


def residue_figure(quality: dict[str, Any]) -> str:
    """Amino-acid composition of the sets and of the training proteins."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        plot_residues(axes, quality["training"], quality["sets"])
        axes.legend(fontsize=8)

    return _drawn("amino-acid composition", draw)


def length_figure(quality: dict[str, Any]) -> str:
    """Distribution functions of the lengths, which few proteins give as well as many."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        # The composition baseline's have the lengths of the generated ones.
        sets = {"training": quality["training"], **quality["sets"]}
        sets.pop(REFERENCE, None)
        histograms = {name: np.array(one["length_histogram"]) for name, one in sets.items()}
        bins = max(map(len, histograms.values()))
        widths = chain([2.5], repeat(1.4))
        for (name, counts), colour, width, dashes in zip(
            histograms.items(), (TRAINING_COLOUR, *COLOURS), widths, ("-", *_DASHES), strict=False
        ):
            shares = 100 * np.pad(counts, (0, bins - len(counts))).cumsum() / counts.sum()
            ends = LENGTH_BIN * np.arange(bins + 1)
            axes.plot(ends, [0, *shares], color=colour, ls=dashes, lw=width, label=name)
        axes.set(xlabel="length in residues", ylabel="% of proteins up to it", ylim=(0, 102))
        axes.set_xlim(left=0)
        axes.legend(fontsize=8)

    return _drawn("distribution of the lengths", draw)


def novelty_figure(quality: dict[str, Any]) -> str:
    """Histogram of the identities to the nearest training protein; none found stands apart."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        sets = quality["sets"]
        width = 0.8 / len(sets)
        hatches = cycle(("", "///", "\\\\\\", "xxx"))
        for number, ((name, figures), colour, hatch) in enumerate(
            zip(sets.items(), cycle(COLOURS), hatches, strict=False)
        ):
            shares = identity_shares(figures)
            places = np.arange(len(shares)) + (number - (len(sets) - 1) / 2) * width
            axes.bar(
                places, shares, width, color=colour, hatch=hatch, edgecolor=_INK, lw=0.4, label=name
            )
        labels = ["none\nfound", *(f"{low}–{low + 10}" for low in range(0, 100, 10))]
        axes.set_xticks(range(len(labels)), labels, fontsize=7)
        axes.set(xlabel="identity to the nearest training protein, %", ylabel="% of proteins")
        axes.legend(fontsize=8)

    return _drawn("identity to the nearest training protein", draw)


def identity_shares(figures: Mapping[str, Any]) -> list[float]:
    """Percent of a set's proteins without a hit, then in each tenth of identity."""
    counts = np.array(figures["identity_histogram"])
    tenths = counts.reshape(-1, _IDENTITY_STEPS).sum(axis=1)
    # What was not found has identity 0, in the first bin.
    missed = round((1 - figures["hit_share"]) * figures["sequences"])
    tenths[0] -= missed
    return [float(share) for share in 100 * np.array([missed, *tenths]) / figures["sequences"]]


def _drawn(what: str, draw: Callable[[Any], None]) -> str:
    """The figure that `draw` draws, as an SVG element that says to readers aloud `what` it is."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": what,  # ids that no other figure of the page has
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": FONT_SIZE,
        "hatch.color": _INK,
        "hatch.linewidth": 0.5,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "axes.edgecolor": _LINE,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor"), _INK),
        **dict.fromkeys(("ytick.labelcolor", "axes.titlecolor"), _INK),
        **dict.fromkeys(("xtick.color", "ytick.color"), _LINE),
    }
    content = io.StringIO()
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        draw(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(content, format="svg", transparent=True, metadata=nothing)
    return _inline(content.getvalue(), what)


def _inline(svg: str, what: str) -> str:
    """A whole SVG file as an element of a page: no namespaces, sizes or ids that nothing names."""
    root = ElementTree.fromstring(svg)  # noqa: S314  # matplotlib's own
    for definitions in root.findall("{*}defs"):
        for style in definitions.findall("{*}style"):
            definitions.remove(style)  # it would hold for the whole page, whose own says the same
    for element in root.iter():
        element.tag = _NAMESPACE.sub("", element.tag)
        for name, value in list(element.attrib.items()):
            del element.attrib[name]
            element.attrib[_NAMESPACE.sub("", name)] = value
    named = set(
        re.findall(r"#([\w-]+)", " ".join(v for e in root.iter() for v in e.attrib.values()))
    )
    for element in root.iter():
        if element.get("id") not in named:
            element.attrib.pop("id", None)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", what)
    text = ElementTree.tostring(root, encoding="unicode")
    text = text.replace("'DejaVu Sans', sans-serif", "system-ui, sans-serif")
    for colour, variable in VARIABLES.items():
        text = re.sub(colour, f"var({variable})", text, flags=re.IGNORECASE)
    return text
