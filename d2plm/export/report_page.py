"""The page: what `content` gathers and `figures` draws, in one file that needs no other.

Every text goes through the template's escaping, for names come out of other people's files; only
the figures, which matplotlib escapes, and our own style sheet and script are put in as they are.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from d2plm.core.files import write_text
from d2plm.evaluation.document import MODEL, REFERENCE
from d2plm.evaluation.plots import measured_bins
from d2plm.export import report_figures as figures
from d2plm.export.report_content import SHOWN, Sources, gather

REPORT = "report.html"
SECTIONS = {
    "bound": "The bound against the baselines",
    "training": "Training",
    "calibration": "Calibration by the fraction masked",
    "identity": "By identity to the training proteins",
    "quality": "Generated against natural proteins",
    "proteins": "Generated proteins",
    "data": "Data",
    "settings": "Settings and versions",
}

_FOLDER = Path(__file__).parent


def write_report(sources: Sources) -> Path:
    """Write `report.html` into the output folder, from what lies there; gives the file.

    Raises:
        DataError: there is nothing to report on, or a file is damaged or cannot be written.
    """
    file = sources.output_dir / REPORT
    write_text(file, render(gather(sources)))
    return file


def render(content: dict[str, Any]) -> str:
    """The page as HTML, of what `gather` gives."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        content,
        figures=draw(content),
        sections=SECTIONS,
        ours=MODEL,
        reference=REFERENCE,
        shown=SHOWN,
        style=(_FOLDER / "page.css").read_text(),
        script=(_FOLDER / "page.js").read_text(),
    )


def draw(content: dict[str, Any]) -> dict[str, str]:
    """The figures that there are data for, as SVG elements by name."""
    evaluation, metrics, quality = (content[key] for key in ("evaluation", "metrics", "quality"))
    drawn = {}
    if metrics:
        drawn["training"] = figures.training_figure(metrics, evaluation)
        drawn["pace"] = figures.pace_figure(metrics)
    if evaluation is not None:
        drawn["likelihood"] = figures.likelihood_figure(evaluation)
        drawn["calibration"] = figures.calibration_figure(evaluation)
        if measured_bins(evaluation["by_identity"]):
            drawn["identity"] = figures.identity_figure(evaluation)
    if quality is not None:
        drawn["residues"] = figures.residue_figure(quality)
        drawn["lengths"] = figures.length_figure(quality)
        drawn["novelty"] = figures.novelty_figure(quality)
    return drawn
