"""The messages that docs/troubleshooting.md quotes exist in the code."""

import ast
import re
from pathlib import Path

from tests.docs.markdown import ROOT

DOCUMENT = ROOT / "docs" / "troubleshooting.md"
LEAST = 4  # characters of a fragment: less occurs anywhere


def messages(folder: Path) -> list[str]:
    """Every text in the code, `…` where a value is put in, as one line."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append(" ".join("".join(map(str, parts)).split()))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(" ".join(re.sub(r"%[sdg]", "…", node.value).split()))
    return found


def quoted() -> list[str]:
    """The messages that begin a row: in backticks, and a sentence rather than a setting."""
    rows = re.findall(r"^\| `([^`]+)`", DOCUMENT.read_text(), re.M)
    return [row.replace("\\|", "|") for row in rows if " " in row and "'d2plm'" not in row]


def fragments(message: str) -> list[str]:
    return [part.strip() for part in message.split("…") if len(part.strip()) >= LEAST]


def test_every_quoted_message_is_the_code_s_own() -> None:
    known = [*messages(ROOT / "d2plm"), *messages(ROOT / "pipelines")]
    known.append((ROOT / "Makefile").read_text())
    shells = ("command not found",)
    unknown = [
        message
        for message in quoted()
        if not message.startswith(shells)
        and not any(all(part in text for part in fragments(message)) for text in known)
    ]
    assert len(quoted()) > 40
    assert not unknown, "\n".join(unknown)
