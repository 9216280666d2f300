"""Run both demos, and update the figures and pictures of README.md.

    make results                          # or: python docs/results.py [folder]

The folder (runs/results) must not exist, so that only the prepared data are reused, which
both paradigms share. Figures are written between `<!-- results: figures -->` and `<!-- end -->`.
The pictures of the report need Chromium: Debian's, or the one that CHROMIUM names.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import ViewportSize, sync_playwright
from screenshots import BROWSER, IMAGES, chromium, picture

from d2plm.core.machine import machine
from d2plm.core.table import Cell, Number, Table
from d2plm.evaluation.findings import judge
from d2plm.evaluation.result import Evaluation, read_evaluation
from d2plm.evaluation.tables import relatives_table

ROOT = Path(__file__).parents[1]
PARADIGMS = ("diffusion", "flow_matching")
SHOWN = ("unigram", "5-gram", "composition")  # of the baselines, before the best
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- results: figures -->\n", "<!-- end -->"
REPORT: ViewportSize = {"width": 1280, "height": 1640}


def run_demo(paradigm: str, folder: str) -> float:
    """Run the pipeline; returns its minutes."""
    command = [sys.executable, "-m", "d2plm", "pipeline", "run", "experiment=demo"]
    began = time.monotonic()
    overrides = [f"paradigm={paradigm}", f"work_dir={folder}"]
    if subprocess.run([*command, *overrides], cwd=ROOT).returncode:
        raise SystemExit(f"the demo failed: paradigm={paradigm}")
    return (time.monotonic() - began) / 60


def results_table(evaluations: dict[str, Evaluation]) -> str:
    """Table of the baselines and both models, in Markdown."""
    first = evaluations["diffusion"]
    best = judge(first).baseline
    rows: list[list[Cell]] = [
        [name, Number(first.baselines[name].perplexity, ".3f"), ""] for name in (*SHOWN, best)
    ]
    for paradigm, found in evaluations.items():
        perplexity = Number(found.model.perplexity, ".3f")
        difference = Number(found.baselines[best].difference, "+.4f")
        rows.append([f"**{paradigm.replace('_', ' ')}**", perplexity, difference])
    heads = ["", "perplexity [95 % interval]", f"against {best}, nats/residue"]
    return Table(heads, rows).markdown()


def circumstances(evaluation: Evaluation, minutes: dict[str, float]) -> str:
    """Sentence about the machine, the time and the evaluated proteins."""
    here = machine()
    return (
        f"Measured by `make results` on {here['usable_cores']} cores of {here['processor']} "
        f"({here['cpu_capability']}), one run of each paradigm: {minutes['diffusion']:.1f} minutes "
        f"for diffusion, including the preparation of the data, {minutes['flow_matching']:.1f} for "
        f"flow matching on the prepared data. {evaluation.residues:,} residues of "
        f"{evaluation.sequences:,} held-out proteins in {evaluation.clusters} clusters."
    )


def filled(figures: str) -> str:
    """Text of the page with the figures between its marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE}: has no mark {BEGIN.strip()} with an {END} after it")
    return f"{before}{BEGIN}{figures}\n{END}{after}"


def main(folder: str = "runs/results") -> None:
    """Run both demos and write the results and pictures."""
    root = ROOT / folder
    if root.exists():
        raise SystemExit(f"{root}: exists; remove it, or name another folder")
    filled("")
    with sync_playwright() as playwright:  # fails before the runs if Chromium is missing
        playwright.chromium.launch(executable_path=chromium(), args=BROWSER).close()
    minutes = {paradigm: run_demo(paradigm, folder) for paradigm in PARADIGMS}
    evaluations = {}
    for paradigm in PARADIGMS:
        found = read_evaluation(root / paradigm)
        assert found is not None
        evaluations[paradigm] = found
    measured = circumstances(evaluations["diffusion"], minutes)
    given = evaluations["diffusion"].given_relatives
    assert given is not None
    of_relatives = (
        f"Given up to {given.most} relatives of each protein, on {given.proteins:,} of the "
        f"held-out proteins (diffusion):\n\n{relatives_table(given).markdown()}"
    )
    tables = f"{results_table(evaluations)}\n\n{of_relatives}"
    PAGE.write_text(filled(f"{measured}\n\n{tables}"))
    shutil.copy(root / "diffusion/evaluation.png", IMAGES / "demo.png")
    shutil.copy(root / "diffusion/generated.members.png", IMAGES / "members.png")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=BROWSER)
        view = browser.new_page(viewport=REPORT)
        view.goto((root / "diffusion/report.html").as_uri())
        picture(view, IMAGES / "report.png")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
