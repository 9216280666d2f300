"""Every block of docs/data.md with a language runs, in its order, in a copy of the tree."""

import json

import pytest

from tests.docs.conftest import copy_of_the_tree, follow
from tests.docs.markdown import ROOT, Block, blocks

PAGE = ROOT / "docs" / "data.md"


@pytest.mark.thorough
def test_every_block_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = copy_of_the_tree(tmp_path_factory.mktemp("alphabets") / "d2plm")
    followed = follow("".join(as_bash(block) for block in blocks(PAGE) if block.language), folder)
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
