"""Reading plain-text documents in blocks of bounded memory; long documents come in parts."""

from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from d2plm.core.errors import DataError
from d2plm.data.compressed import InputFile, open_input
from d2plm.data.records import RawRecords

# Maximum size of a document read at once: tokenizers use 100 times the memory of their text.
_PART_BYTES, _WHOLE_BYTES = 1 << 20, 4 << 20
_BLOCK_BYTES = 1 << 20


class Document(NamedTuple):
    """A document, or part number `part` of one, and the line where it begins."""

    name: bytes
    text: bytes
    line: int
    part: int | None = None


def read_documents(
    path: Path, in_parts: bool, ends: Callable[[bytes], bool] | None = None
) -> Iterator[RawRecords]:
    """The documents of a plain text, named FILE:LINE, without the line breaks at their ends.

    Raises `DataError` (when iterated) if the file is missing, unreadable, damaged or empty, or a
    document is too long.

    Args:
        in_parts: whether a document of many megabytes may come in parts.
        ends: whether a document ends with a line; None for a single document, named FILE.
    """
    with open_input(path) as source:
        if not source.content.peek(1):
            raise DataError(f"{path}: is empty; give a text")
        yield from in_blocks(_documents(source, in_parts, ends), source, partial(_line, path))


def in_blocks(
    documents: Iterable[Document], source: InputFile, place: Callable[[Document, int | None], str]
) -> Iterator[RawRecords]:
    """Blocks of documents; `place` describes an offset in a document in words."""

    def block(own: list[Document]) -> RawRecords:
        return RawRecords(
            names=[one.name for one in own],
            sequences=[one.text for one in own],
            where=lambda record, offset: place(own[record], offset),
            done=source.done(),
            part=own[0].part,
        )

    held: list[Document] = []
    size = 0
    for one in documents:
        if held and (size >= _BLOCK_BYTES or one.part is not None):
            yield block(held)
            held, size = [], 0
        held.append(one)
        size += len(one.text) if one.part is None else _BLOCK_BYTES
    if held:
        yield block(held)


def skip_byte_order_mark(content: Any) -> None:
    if content.peek(3)[:3] == BOM_UTF8:
        content.read(3)


def _documents(
    source: InputFile, in_parts: bool, ends: Callable[[bytes], bool] | None
) -> Iterator[Document]:
    part, first = None, 1
    most = _PART_BYTES if in_parts else _WHOLE_BYTES
    for text, line, ended in _parts(source.content, ends, most):
        if part is None:
            first = line
        if not ended and not in_parts:
            raise DataError(
                f"{source.path}, line {first}: a record of more than {most:,} bytes; cut "
                "it with window when ingesting, without max_residues, or see format=lines and "
                "paragraphs"
            )
        if not ended or part is not None:
            part = 0 if part is None else part + 1
        name = source.path.name
        if ends is not None:
            name = f"{name}:{first}"
            text = text.rstrip(b"\r\n") if ended else text
        if text.strip() or (text and part is not None):
            yield Document(name.encode("utf-8", "replace"), text, line, part)
        if ended:
            part = None


def _parts(
    content: Any, ends: Callable[[bytes], bool] | None, most: int
) -> Iterator[tuple[bytes, int, bool]]:
    """(text, line where it begins, whether a document ends with it), for all of the content."""
    skip_byte_order_mark(content)
    lines: list[bytes] = []
    size, first, number = 0, 1, 1
    for line in _lines(content, most):
        lines.append(line)
        size += len(line)
        number += line.endswith(b"\n")
        ended = ends is not None and ends(line)
        if ended or size >= most:
            yield b"".join(lines), first, ended
            lines, size, first = [], 0, number
    yield b"".join(lines), first, True


def _lines(content: Any, most: int) -> Iterator[bytes]:
    """Lines; one of many megabytes is cut, but not within a UTF-8 character."""
    for line in iter(lambda: content.readline(most), b""):
        while (
            most <= len(line) < most + 3
            and not line.endswith(b"\n")
            and b"\x80" <= content.peek(1)[:1] < b"\xc0"
        ):
            line += content.read(1)
        yield line


def _line(path: Path, one: Document, offset: int | None) -> str:
    line = one.line + one.text.count(b"\n", 0, offset or 0)
    return f"{path}, line {line}"
