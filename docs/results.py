"""Run both demos, and update the figures and pictures of README.md and docs/demo.md.

    make results                          # or: python docs/results.py [folder]

The folder (runs/results) must not exist, so that only the prepared data are reused, which
both paradigms share. Figures are written between `<!-- results: NAME -->` and `<!-- end -->`. The
pictures of the report need Chromium: Debian's, or the one that CHROMIUM names.
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
MARKED = {"README.md": ("figures",), "docs/demo.md": ("figures", "output")}
REPORT: ViewportSize = {"width": 1280, "height": 1640}


def run_demo(paradigm: str, folder: str) -> tuple[str, float]:
    """Run the pipeline; returns its final output and its minutes."""
    command = [sys.executable, "-m", "d2plm", "pipeline", "run", "experiment=demo"]
    began = time.monotonic()
    shown = ""
    with subprocess.Popen(
        [*command, f"paradigm={paradigm}", f"work_dir={folder}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            shown += line
    if process.returncode:
        raise SystemExit(f"the demo failed: paradigm={paradigm}")
    return shown[shown.index("── result:") :], (time.monotonic() - began) / 60


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


def filled(page: str, contents: dict[str, str]) -> str:
    """Text of the page with each of `contents` between its marks."""
    text = (ROOT / page).read_text()
    for name in MARKED[page]:
        begin, end = f"<!-- results: {name} -->\n", "<!-- end -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{page}: has no mark {begin.strip()} with an {end} after it")
        text = f"{before}{begin}{contents[name]}\n{end}{after}"
    return text


def main(folder: str = "runs/results") -> None:
    """Run both demos and write the results and pictures."""
    root = ROOT / folder
    if root.exists():
        raise SystemExit(f"{root}: exists; remove it, or name another folder")
    for page in MARKED:
        filled(page, dict.fromkeys(MARKED[page], ""))
    with sync_playwright() as playwright:  # fails before the runs if Chromium is missing
        playwright.chromium.launch(executable_path=chromium(), args=BROWSER).close()
    ran = {paradigm: run_demo(paradigm, folder) for paradigm in PARADIGMS}
    minutes = {paradigm: taken for paradigm, (_, taken) in ran.items()}
    evaluations = {}
    for paradigm in PARADIGMS:
        found = read_evaluation(root / paradigm)
        assert found is not None
        evaluations[paradigm] = found
    output, _, _ = ran["diffusion"][0].partition("\nfinished in")
    output = output.rstrip().replace(folder, "runs/demo")  # as make demo prints it
    measured = circumstances(evaluations["diffusion"], minutes)
    given = evaluations["diffusion"].given_relatives
    assert given is not None
    of_relatives = (
        f"Given up to {given.most} relatives of each protein, on {given.proteins:,} of the "
        f"held-out proteins (diffusion):\n\n{relatives_table(given).markdown()}"
    )
    tables = f"{results_table(evaluations)}\n\n{of_relatives}"
    contents = {
        "figures": f"{measured}\n\n{tables}",
        "output": f"```text\n{output}\n```",
    }
    for page in MARKED:
        (ROOT / page).write_text(filled(page, contents))
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
