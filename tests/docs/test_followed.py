"""The tutorial, docs/data.md and all Python blocks run, each in its order, as a new user would."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests.conftest import MonkeyPatch
from tests.docs.conftest import TUTORIAL, Followed, copy_of_the_tree, follow, runs
from tests.docs.markdown import DOCUMENTS, ROOT, Block, blocks, of
from tests.integration.conftest import FORKED_STEPS

pytestmark = pytest.mark.thorough  # models are trained


def test_every_block_succeeds_and_leaves_a_registered_model(followed: Followed) -> None:
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
    assert re.findall(r"^[A-Z]+$", (folder / "generated.fasta").read_text(), re.M)
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


# Blocks that need another model than the tutorial's are those of docs/data.md.
WITH_PYTHON = [
    document
    for document in DOCUMENTS
    if any(b.language == "python" and b.needs is None for b in blocks(document))
]


@pytest.mark.parametrize("document", WITH_PYTHON, ids=of)
def test_python_blocks_run(document: Path, followed: Followed, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(followed.folder)
    if not Path("examples").exists():  # the README's reader is in the clone
        Path("examples").symlink_to(ROOT / "examples")
    names = {"__name__": "__main__"}
    for block in blocks(document):
        if block.language == "python" and block.needs is None:
            # As many empty lines before it as make the numbers of a traceback the document's.
            code = compile("\n" * block.line + block.text, str(document), "exec")
            exec(code, names)  # noqa: S102  # it is ours


PAGE = ROOT / "docs" / "data.md"


def test_every_block_of_the_page_on_data_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = copy_of_the_tree(tmp_path_factory.mktemp("alphabets") / "d2plm")
    forking = folder.parent / "forking.py"  # imports once for all of a pipeline's steps
    preload = "import sys\nif 'pipeline' in sys.argv: import tests.preload\n"
    forking.write_text(preload + FORKED_STEPS)
    script = "".join(as_bash(block) for block in blocks(PAGE) if block.language)
    followed = follow(script, folder, str(forking))
    assert followed["exit_code"] == 0, followed["output"]
    assert followed["left"] == 0
    filled = [json.loads(line) for line in (folder / "filled.jsonl").read_text().splitlines()]
    assert filled
    assert all(one["text"].startswith("And God said,") for one in filled)
    assert all(one["text"].endswith(" and there was light.") for one in filled)
    assert (folder / "runs" / "dna" / "report.html").exists()


def as_bash(block: Block) -> str:
    assert block.language in ("bash", "python"), block.place
    return block.text if block.language == "bash" else f"python - <<'END'\n{block.text}END\n"
