"""The report's figures: inline SVG with selectable text and the colours of the page's theme.

matplotlib draws them; everything that a page does not need, including external addresses, is
stripped from its output. Figures have a size at which their text is as large as the page's.
"""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from typing import Any

from d2plm.core import palette
from d2plm.evaluation import plots
from d2plm.evaluation.result import Evaluation, Quality

WIDTH, HEIGHT = 5.4, 4.4  # inches; page.css shows 26rem of it
TALL = 5.4  # inches, for a figure with two panels or a legend
ROW = 0.4  # inches per row of the figure of likelihoods
FONT_SIZE = 13
# Colour of the palette → variable of the page's style sheet.
COLOURS = ("blue", "orange", "sky", "green", "pink", "vermilion", "grey", "ink", "line")
VARIABLES = {getattr(palette, colour.upper()): f"--{colour}" for colour in COLOURS}
DESCRIPTIONS = {
    "training": "held-out and training perplexity over the training steps",
    "pace": "learning rate and throughput over the training steps",
    "likelihood": "perplexity of the model and of the baselines, with intervals",
    "calibration": "cross-entropy against the corrupted fraction",
    "identity": "perplexity by identity to the nearest training protein",
    "relatives": "perplexity by the identity of the relatives that are given",
    "residues": "amino-acid composition",
    "lengths": "distribution of the lengths",
    "novelty": "identity to the nearest training protein",
    "plane": "designs and natural members by two principal components of the aligned columns",
    "members": "score under the family's HMM against identity to the nearest given member",
}
_NAMESPACE = re.compile(r"\{[^}]*\}")


def draw(
    evaluation: Evaluation | None,
    metrics: Sequence[dict[str, float]],
    quality: Quality | None,
    members: dict[str, Any] | None,
) -> dict[str, str]:
    """Draw the figures that have data, as SVG elements by name."""
    figures = plots.figures_of(evaluation, metrics, quality)
    if members is not None:
        figures["plane"] = lambda figure: plots.plot_plane(figure.subplots(), members)
        figures["members"] = lambda figure: plots.plot_membership(figure.subplots(), members)
    height = HEIGHT if evaluation is None else ROW * (2 + len(evaluation.bounds))
    heights = {"likelihood": height, "training": TALL, "pace": TALL, "members": TALL}
    return {name: _svg(name, plot, heights.get(name, HEIGHT)) for name, plot in figures.items()}


def _svg(name: str, plot: Callable[[Any], None], height: float) -> str:
    """Draw a figure with `plot` as an SVG element with a description for screen readers."""
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": DESCRIPTIONS[name],  # ids unique within the page
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": FONT_SIZE,
        "hatch.color": palette.INK,
        "hatch.linewidth": 0.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "axes.edgecolor": palette.LINE,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor"), palette.INK),
        **dict.fromkeys(("ytick.labelcolor", "axes.titlecolor"), palette.INK),
        **dict.fromkeys(("xtick.color", "ytick.color"), palette.LINE),
    }
    content = io.StringIO()
    with matplotlib.rc_context(settings):
        figure = palette.new_figure(WIDTH, height)
        plot(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(content, format="svg", transparent=True, metadata=nothing)
    return _inline(content.getvalue(), DESCRIPTIONS[name])


def _inline(svg: str, what: str) -> str:
    """Convert an SVG file to an element of a page, without namespaces, sizes and unused ids."""
    root = ElementTree.fromstring(svg)  # noqa: S314  # matplotlib's own
    for definitions in root.findall("{*}defs"):
        for style in definitions.findall("{*}style"):
            definitions.remove(style)  # would apply to the whole page
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
