"""Update the shipped model, and the figures and pictures of README.md, from `make pretrained`.

    make results

README's figures are written between `<!-- results: figures -->` and `<!-- end -->`; the pictures of
the report need Chromium: Debian's, or the one that CHROMIUM names.
"""

import os
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import ViewportSize, sync_playwright

from d2plm.core.table import Cell, Number, Table
from d2plm.evaluation.findings import judge
from d2plm.evaluation.result import Evaluation, read_evaluation

ROOT = Path(__file__).parents[1]
RUN, SHIPPED = ROOT / "runs/pretrained/diffusion", ROOT / "examples/pretrained"
IMAGES, PAGE = ROOT / "docs/images", ROOT / "README.md"
BEGIN, END = "<!-- results: figures -->\n", "<!-- end -->"
BROWSER = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
REPORT: ViewportSize = {"width": 1280, "height": 1640}
COLOURS = 128


def table(evaluation: Evaluation) -> str:
    """The model beside the best baselines, in Markdown."""
    given, best = evaluation.given_relatives, judge(evaluation).baseline
    assert given is not None
    its, perplexity = evaluation.baselines[best], Number(evaluation.model.perplexity, ".3f")
    compared = f"{best}: {its.perplexity.value:.3f}", Number(its.difference, "+.4f")
    alone = Number(given.alone.perplexity, ".3f")
    rows: list[list[Cell]] = [
        [f"none, {evaluation.sequences:,} proteins", perplexity, *compared],
        [f"none, {given.proteins} of them", alone, "", ""],
    ]
    for row in given.below:
        own, difference = Number(row.model.perplexity, ".3f"), Number(row.best.difference, "+.4f")
        best = f"profile HMM: {row.best.perplexity.value:.3f}"
        rows.append(
            [f"below {row.identity:.0%}; {row.with_relatives} have any", own, best, difference]
        )
    return Table(
        ["relatives given", "perplexity", "best baseline", "difference, nats"], rows
    ).markdown()


def main() -> None:
    """Write the model, the results and the pictures."""
    evaluation = read_evaluation(RUN / "model")
    if evaluation is None:
        raise SystemExit(f"{RUN / 'model'}: is not an evaluated model; make pretrained makes it")
    with sync_playwright() as playwright:
        program = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=BROWSER)
        view = browser.new_page(viewport=REPORT)
        view.goto((RUN / "report.html").as_uri())
        view.screenshot(path=IMAGES / "report.png")
        browser.close()
    report = Image.open(IMAGES / "report.png").convert("RGB").quantize(COLOURS)
    report.save(IMAGES / "report.png", optimize=True)
    shutil.rmtree(SHIPPED, ignore_errors=True)
    shutil.copytree(RUN / "model", SHIPPED)
    shutil.copy(RUN / "evaluation.png", IMAGES / "demo.png")
    shutil.copy(RUN / "generated.members.png", IMAGES / "members.png")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table(evaluation)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
