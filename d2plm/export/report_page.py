"""The report page: the gathered content and its figures in one self-contained HTML file.

The template escapes every text, because names come from other people's files; only the figures,
which matplotlib escapes, and our own style sheet and script are inserted unescaped.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from d2plm.core.files import write_text
from d2plm.core.number_text import short_number
from d2plm.evaluation.findings import ALIGNED, MODEL, PROFILE, REFERENCE
from d2plm.evaluation.quality import GENERATED, NATURAL
from d2plm.export.model_card import covered
from d2plm.export.report_content import SHOWN, Sources, gather
from d2plm.export.report_figures import draw

REPORT = "report.html"
FEW = 50  # generated proteins; statistics of fewer carry a warning
SECTIONS = {  # (heading, part of the content without which it is left out)
    "bound": ("The bound against the baselines", "evaluation"),
    "relatives": ("Given relatives", "relatives"),
    "training": ("Training", "metrics"),
    "calibration": ("Calibration by the fraction masked", "evaluation"),
    "identity": ("By identity to the training proteins", "identity"),
    "quality": ("Generated against natural proteins", "quality"),
    "members": ("New members of a family", "members"),
    "proteins": ("Generated proteins", "designs"),
    "data": ("Data", "manifest"),
    "settings": ("Settings and versions", "versions"),
}

_FOLDER = Path(__file__).parent


def write_report(sources: Sources) -> Path:
    """Write `report.html` into the output folder, from the files there, and return its path.

    Raises:
        DataError: there is nothing to report on, or a file is damaged or cannot be written.
    """
    file = sources.output_dir / REPORT
    write_text(file, render(gather(sources)))
    return file


def render(content: dict[str, Any]) -> str:
    """The page as HTML, of what `gather` returned."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short_number
    return environment.get_template("page.html.jinja").render(
        content,
        covered=covered,
        figures=draw(
            content["evaluation"], content["metrics"], content["quality"], content["members"]
        ),
        sections={key: heading for key, (heading, part) in SECTIONS.items() if content[part]},
        ours=MODEL,
        profiles=(PROFILE, ALIGNED),
        set_names={
            NATURAL: "natural, held-out ones",
            REFERENCE: "samples of the composition baseline",
        },
        generated=GENERATED,
        few=FEW,
        reference=REFERENCE,
        shown=SHOWN,
        style=(_FOLDER / "page.css").read_text(),
        script=(_FOLDER / "page.js").read_text(),
    )
