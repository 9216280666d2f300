"""Links and pictures point to existing files and headings."""

from pathlib import Path

import pytest

from tests.docs.markdown import DOCUMENTS, ROOT, anchors, links, of


@pytest.mark.parametrize("document", DOCUMENTS, ids=of)
def test_every_relative_link_and_anchor_resolves(document: Path) -> None:
    broken = []
    for target in links(document):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_the_index_of_documents_names_each_of_them() -> None:
    index = ROOT / "docs" / "README.md"
    named = {target.partition("#")[0] for target in links(index)}
    assert named >= {file.name for file in (ROOT / "docs").glob("*.md")} - {"README.md"}
