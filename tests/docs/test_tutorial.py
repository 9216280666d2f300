"""A new user's way, followed literally: each block of docs/tutorial.md, in order, in one shell."""

import csv
import json
import re

import pytest

from tests.docs.conftest import TUTORIAL, Followed, runs
from tests.docs.markdown import blocks

pytestmark = pytest.mark.thorough  # the tutorial trains a model


def test_every_block_succeeds_and_leaves_a_trained_evaluated_registered_model(
    followed: Followed,
) -> None:
    assert followed.exit_code == 0, followed.output[-3000:]
    assert followed.left == 0, "the server has ended"
    left_out = [b for b in blocks(TUTORIAL) if not runs(b.language, b.needs)]
    assert [block.text.strip() for block in left_out] == ["make setup && . .venv/bin/activate"]
    output = followed.folder / "runs" / "mine" / "diffusion"
    evaluation = json.loads((output / "evaluation.json").read_text())
    assert evaluation["model"]["perplexity"]["value"] > 1
    assert (output / "model" / "model.safetensors").is_file()
    assert (output / "checkpoints" / "step-00000040").is_dir()
    assert "registered d2plm-diffusion version 1 as champion" in followed.output
    assert "<html" in (output / "report.html").read_text()


def test_it_leaves_proteins_that_keep_the_scaffold(followed: Followed) -> None:
    folder = followed.folder / "runs" / "mine"
    generated = re.findall(r"^[A-Z]+$", (folder / "generated.fasta").read_text(), re.M)
    assert generated
    records = (folder / "designs.fasta").read_text().split(">")[1:]
    designs = ["".join(record.splitlines()[1:]) for record in records]
    assert len(designs) == 4
    scaffold = re.compile(r"MKTAYIAKQR[A-Z]{12}VKSHFSRQLEERLGLIEVQ")
    assert all(map(scaffold.fullmatch, designs))
    with (folder / "scores.csv").open() as stream:
        scores = list(csv.DictReader(stream))
    assert len(scores) == 4 and all(float(row["nats"]) > 0 for row in scores)


def test_its_server_scores_generates_and_fills_in(followed: Followed) -> None:
    found = re.findall(r'\{"predictions": ?.*?\]\}', followed.output)
    answers = [json.loads(text) for text in found]
    scored, generated, filled = (answer["predictions"] for answer in answers)
    assert scored[0]["residues"] == 22
    assert [row["length"] for row in generated] == [60, 60]
    assert re.fullmatch(r"MKTAYIAK[A-Z]{6}SFVKSHFSRQ", filled[0]["sequence"])
