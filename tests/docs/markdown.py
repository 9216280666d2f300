"""Contents of the documents: code blocks, inline code, command lines, links and anchors."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.M | re.S
)
_COMMENT = re.compile(r"<!-- (?P<text>[^>]*?) -->\s*\Z")
_INLINE = re.compile(r"(`+)(?P<text>.+?)\1", re.S)
_LINK = re.compile(r"!?\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*\]\((?P<target>[^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(?P<title>.+?) *$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block, its line, and what `<!-- needs: … -->` above it says that it needs."""

    document: Path
    line: int
    language: str
    text: str
    needs: str | None

    @property
    def place(self) -> str:
        """Document and line, for messages."""
        return f"{of(self.document)}:{self.line}"


def of(document: Path) -> str:
    """Its path in the repository."""
    return str(document.relative_to(ROOT))


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document, in order."""
    text = document.read_text()
    found = []
    for match in _FENCE.finditer(text):
        comment = _COMMENT.search(text[: match.start()])
        said = comment["text"] if comment else ""
        needs = said.removeprefix("needs: ") if said.startswith("needs: ") else None
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(document, line, match["language"], match["text"], needs))
    return found


def prose(document: Path) -> str:
    """A document without its fenced blocks and comments."""
    text = _FENCE.sub("", document.read_text())
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def inline_code(document: Path) -> list[str]:
    """Text between backticks in sentences and tables, each in one line."""
    codes = (match["text"] for match in _INLINE.finditer(prose(document)))
    return [" ".join(code.replace("\\|", "|").split()) for code in codes]


def command_lines(text: str) -> Iterator[str]:
    """The lines of a shell's text, continued ones joined, without comments and here-documents."""
    end = None
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if end is not None:
            end = None if line.strip() == end else end
            continue
        heredoc = re.search(r"<<-?\s*['\"]?(\w+)", line)
        end = heredoc[1] if heredoc else None
        stripped = re.sub(r"(^|\s)#.*$", "", line).strip().removeprefix("$ ")
        if stripped:
            yield stripped


def links(document: Path) -> list[str]:
    """The targets of a document's links and pictures."""
    text = _INLINE.sub("", prose(document))
    return [match["target"] for match in _LINK.finditer(text)]


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: set[str] = set()
    for match in _HEADING.finditer(_FENCE.sub("", document.read_text())):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match["title"]).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        number, unique = 1, slug
        while unique in found:
            unique = f"{slug}-{number}"
            number += 1
        found.add(unique)
    return found
