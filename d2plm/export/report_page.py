"""The report page: the collected content and its figures in one self-contained HTML file.

The template escapes all text, because names come from other people's files. Only the figures, which
matplotlib escapes, and our own style sheet and script are inserted unescaped.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from d2plm.core.files import write_text
from d2plm.core.number_text import short_number
from d2plm.evaluation.result import GENERATED, NATURAL
from d2plm.export.model_card import covered
from d2plm.export.report_content import SHOWN, Sources, gather
from d2plm.export.report_figures import draw

REPORT = "report.html"
FEW = 50  # with fewer generated proteins, the statistics carry a warning
SECTIONS = {  # (heading, part of the content that it requires)
    "bound": ("Likelihood bound and baselines", "evaluation"),
    "relatives": ("Likelihood bound given relatives", "relatives"),
    "training": ("Training", "metrics"),
    "calibration": ("Cross-entropy by masked fraction", "evaluation"),
    "identity": ("Likelihood bound by identity to the training {}s", "identity"),
    "quality": ("Generated and natural {}s", "quality"),
    "members": ("New members of a family", "members"),
    "proteins": ("Generated {}s", "designs"),
    "data": ("Data", "manifest"),
    "settings": ("Settings and versions", "versions"),
}

_FOLDER = Path(__file__).parent


def write_report(sources: Sources) -> Path:
    """Write `report.html` into the output folder and return its path; see `gather`."""
    file = sources.output_dir / REPORT
    write_text(file, render(gather(sources)))
    return file


def render(content: dict[str, Any]) -> str:
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
        sections={
            key: heading.format(content["terms"].sequence)
            for key, (heading, part) in SECTIONS.items()
            if content[part]
        },
        set_names={
            NATURAL: f"natural, held-out {content['terms'].sequence}s",
            content["terms"].reference: f"samples of the {content['terms'].reference} baseline",
        },
        generated=GENERATED,
        few=FEW,
        shown=SHOWN,
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        script=(_FOLDER / "page.js").read_text(encoding="utf-8"),
    )
