"""Every Python block of the documents runs, in its order, where the tutorial has been followed."""

from pathlib import Path

import pytest

from tests.conftest import MonkeyPatch
from tests.docs.conftest import Followed
from tests.docs.markdown import DOCUMENTS, ROOT, blocks, of

pytestmark = pytest.mark.thorough  # the tutorial trains a model

# test_alphabets.py runs those that need another model than the tutorial's.
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
