"""Run both demos, and update the figures and pictures of README.md and docs/demo.md.

    make results                          # or: python docs/results.py [folder]

The folder (runs/results) must not exist, so that only the prepared data are reused, which
both paradigms share. Figures are written between `<!-- results: NAME -->` and `<!-- end -->`. The
pictures of the report need Chromium: Debian's, or the one that CHROMIUM names.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import ViewportSize, sync_playwright
from screenshots import BROWSER, IMAGES, chromium, picture

from d2plm.core.machine import machine
from d2plm.core.number_text import interval_text
from d2plm.evaluation.findings import against, best_profile, judge

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


def results_table(evaluations: dict[str, Any]) -> str:
    """Table of the baselines and both models, in Markdown."""
    first = evaluations["diffusion"]
    best = judge(first).baseline
    lines = [
        f"| | perplexity | 95 % interval | against {best}, nats/residue |",
        "|---|---|---|---|",
    ]
    for name in (*SHOWN, best):
        values = first["baselines"][name]
        interval = interval_text(values["perplexity_interval"], ".3f")
        lines.append(f"| {name} | {values['perplexity']:.3f} | {interval} | |")
    for paradigm in PARADIGMS:
        name = paradigm.replace("_", " ")
        values = evaluations[paradigm]["model"]
        interval = interval_text(values["perplexity_interval"], ".3f")
        difference, around, _ = against(evaluations[paradigm], best)
        lines.append(
            f"| **{name}** | **{values['perplexity']:.3f}** | {interval} | "
            f"{difference:+.4f} {interval_text(around, '+.4f')} |"
        )
    return "\n".join(lines)


def given_relatives_table(evaluation: dict[str, Any]) -> str:
    """Table of the bound given relatives and the better profile HMM, in Markdown."""
    given = evaluation["given_relatives"]
    lines = [
        f"Given up to {given['choice']['most']} relatives of each protein, on "
        f"{given['choice']['proteins']:,} of the held-out proteins (diffusion):",
        "",
        "| relatives below | proteins with any | perplexity | best profile HMM of these relatives "
        "| difference, nats/residue |",
        "|---|---|---|---|---|",
    ]
    for row in given["below"]:
        best = best_profile(row)
        model, paired = row["model"], row["paired"][best]
        lines.append(
            f"| {100 * row['identity']:.0f} % identity | {row['with_relatives']:,} | "
            f"**{model['perplexity']:.3f}** {interval_text(model['perplexity_interval'], '.3f')} | "
            f"{row[best]['perplexity']:.3f} | {paired['nelbo_difference']:+.4f} "
            f"{interval_text(paired['interval'], '+.4f')} |"
        )
    lines.append(f"| none | | {given['alone']['perplexity']:.3f} | | |")
    return "\n".join(lines)


def circumstances(evaluation: dict[str, Any], minutes: dict[str, float]) -> str:
    """Sentence about the machine, the time and the evaluated proteins."""
    here = machine()
    return (
        f"Measured by `make results` on {here['usable_cores']} cores of {here['processor']} "
        f"({here['cpu_capability']}), one run of each paradigm: {minutes['diffusion']:.1f} minutes "
        f"for diffusion, including the preparation of the data, {minutes['flow_matching']:.1f} for "
        f"flow matching on the prepared data. {evaluation['residues']:,} residues of "
        f"{evaluation['sequences']:,} held-out proteins in {evaluation['clusters']} clusters."
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
    evaluations = {
        paradigm: json.loads((root / paradigm / "evaluation.json").read_text())
        for paradigm in PARADIGMS
    }
    output, _, _ = ran["diffusion"][0].partition("\nfinished in")
    output = output.rstrip().replace(folder, "runs/demo")  # as make demo prints it
    measured = circumstances(evaluations["diffusion"], minutes)
    tables = f"{results_table(evaluations)}\n\n{given_relatives_table(evaluations['diffusion'])}"
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
