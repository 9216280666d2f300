"""Update the shipped model, and the figures and pictures of README.md, from `make pretrained`.

    make results                          # or: python docs/results.py [folder]

The folder (runs/pretrained) has a run for each seed, seed0, seed1, …; the figures of those that are
not here are in examples/pretrained/seeds.json. The model of seed 0 is shipped. README's figures are
written between `<!-- results: figures -->` and `<!-- end -->`; the pictures of the
report need Chromium: Debian's, or the one that CHROMIUM names.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from d2plm.core.table import Cell, Number, Table
from d2plm.evaluation.findings import judge
from d2plm.evaluation.result import Evaluation, read_evaluation

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
SHIPPED = ROOT / "examples/pretrained"
SEEDS = SHIPPED / "seeds.json"
PAGE = ROOT / "README.md"
BEGIN, END = "<!-- results: figures -->\n", "<!-- end -->"
BROWSER = ("--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,1640")
COLOURS = 128


def figures(evaluation: Evaluation) -> dict[str, float]:
    """The perplexities alone and given relatives."""
    given = evaluation.given_relatives
    assert given is not None
    return {
        "alone": round(evaluation.model.perplexity.value, 3),
        **{f"{row.identity:.0%}": round(row.model.perplexity.value, 3) for row in given.below},
    }


def table(evaluation: Evaluation, seeds: dict[str, dict[str, float]]) -> str:
    """The shipped model beside the best baselines, and the other seeds if any, in Markdown."""
    given, best = evaluation.given_relatives, judge(evaluation).baseline
    assert given is not None
    its, others = evaluation.baselines[best], [own for seed, own in seeds.items() if seed != "0"]
    perplexity = Number(evaluation.model.perplexity, ".3f")
    compared = f"{best}: {its.perplexity.value:.3f}", Number(its.difference, "+.4f")
    first: list[Cell] = [f"none, {evaluation.sequences:,} proteins", perplexity, *compared]
    own = Number(given.alone.perplexity, ".3f")
    rows = {"alone": first, "": [f"none, {given.proteins} of them", own, "", ""]}
    for row in given.below:
        key, best = f"{row.identity:.0%}", f"profile HMM: {row.best.perplexity.value:.3f}"
        own, difference = Number(row.model.perplexity, ".3f"), Number(row.best.difference, "+.4f")
        rows[key] = [f"below {key}; {row.with_relatives} have any", own, best, difference]
    heads = ["relatives given", "perplexity", "best baseline", "difference, nats"]
    if others:
        heads.append("other seeds")
        for key, cells in rows.items():
            cells.append(", ".join(f"{one[key]:.3f}" for one in others if key))
    return Table(heads, [*rows.values()]).markdown()


def filled(text: str) -> str:
    """Text of the page with the figures between its marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE}: has no mark {BEGIN.strip()} with an {END} after it")
    return f"{before}{BEGIN}{text}\n{END}{after}"


def main(folder: str = "runs/pretrained") -> None:
    """Write the model, the results and the pictures."""
    runs = {run.parent.name: run for run in sorted((ROOT / folder).glob("seed*/diffusion"))}
    if not runs:
        raise SystemExit(f"{ROOT / folder}: has no runs; make pretrained makes the first")
    seeds: dict[str, Any] = json.loads(SEEDS.read_text()) if SEEDS.exists() else {}
    for name, run in runs.items():
        if (found := read_evaluation(run)) is not None:
            seeds[name.removeprefix("seed")] = figures(found)
    if (first := runs.get("seed0")) is not None:
        if read_evaluation(first / "model") is None:
            raise SystemExit(f"{first / 'model'}: is not evaluated; finish make pretrained")
        chromium, page = os.environ.get("CHROMIUM", "chromium"), (first / "report.html").as_uri()
        picture = f"--screenshot={IMAGES / 'report.png'}"
        subprocess.run([chromium, *BROWSER, picture, page], check=True)
        report = Image.open(IMAGES / "report.png").convert("RGB").quantize(COLOURS)
        report.save(IMAGES / "report.png", optimize=True)
        shutil.rmtree(SHIPPED, ignore_errors=True)
        shutil.copytree(first / "model", SHIPPED)
        shutil.copy(first / "evaluation.png", IMAGES / "demo.png")
        shutil.copy(first / "generated.members.png", IMAGES / "members.png")
    SEEDS.write_text(json.dumps(seeds, indent=2) + "\n")
    shipped = read_evaluation(SHIPPED)
    assert shipped is not None
    PAGE.write_text(filled(table(shipped, seeds)))


if __name__ == "__main__":
    main(*sys.argv[1:])
