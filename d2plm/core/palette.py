"""Colours and markers of every figure, and saving figures.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish; markers and
dashes repeat the distinction for readers without colours.
"""

from pathlib import Path
from typing import Any

from d2plm.core.files import written_beside

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, GREY = "#56B4E9", "#D55E00", "#999999"
INK, LINE = "#111111", "#BBBBBB"  # text, and axes
SERIES = (BLUE, ORANGE, GREEN, PINK, VERMILION)
MARKERS = "os^Dv"
DASHES = ("-", "--", "-.", ":")
DPI = 120
# Class of side chain → residues; other letters are not coloured.
CLASSES = {
    "hydrophobic": "AVLIM",
    "aromatic": "FWY",
    "polar": "STNQ",
    "positive": "KRH",
    "negative": "DE",
    "special": "CGP",
}
CLASS_OF = {letter: name for name, letters in CLASSES.items() for letter in letters}


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, size in inches, which needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def legend_above(axes: Any) -> None:
    """Place a legend above the axes, in two columns if they are wide enough."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    for columns in (2, 1) if len(labels) > 2 else (1,):
        room = {"handlelength": 1.4, "columnspacing": 1, "borderaxespad": 0.3, "frameon": False}
        legend = axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, **room)
        if legend.get_window_extent().width <= axes.get_window_extent().width:
            return


def save_figure(figure: Any, file: Path, dpi: int = DPI) -> None:
    """Write a figure atomically, in the format of the file's suffix.

    Raises `DataError` if the file cannot be written.
    """
    with written_beside(file) as partial:
        figure.savefig(partial, dpi=dpi)
