"""The guard of .ci/run on lines and words."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT


@pytest.mark.parametrize(("words", "outcome"), [(40_000, 0), (40_001, 1)])
def test_more_words_than_the_budget_fail(words: int, outcome: int, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "budgets", tmp_path / ".ci")
    for file in ("a.py", "tests/test_a.py", "a.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("word " * words if file == "a.md" else "")
    subprocess.run("git init --quiet && git add .", shell=True, cwd=tmp_path, check=True)  # noqa: S602, S607
    ran = subprocess.run([tmp_path / ".ci" / "budgets"], stdout=subprocess.PIPE, text=True)
    assert (ran.returncode, "BEYOND" in ran.stdout) == (outcome, bool(outcome))
