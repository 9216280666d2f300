"""docs/troubleshooting.md quotes the messages of common mistakes: they are made, and looked up."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from d2plm.core.errors import D2PLMError
from d2plm.data.ingest import ingest
from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def reading(name: str, content: bytes) -> Callable[[Path], object]:
    def mistake(folder: Path) -> object:
        (folder / name).write_bytes(content)
        return ingest(folder / name, folder / "store")

    return mistake


@pytest.mark.parametrize(
    ("mistake", "quoted"),
    [
        (reading("a.fasta", b">one\nMKJ\n"), "which is not a … letter; write … for an unknown …"),
        (reading("a.fasta", b"MKV\n"), "not FASTA (text before the first '>': …)"),
        (
            reading("a.csv", b"number,weight\n1,2\n"),
            "which column holds the sequence? Set sequence_field to one of …",
        ),
        (
            reading("a.fasta.gz", gzip.compress(b">one\nMKV\n" * 99)[:-9]),
            "truncated or corrupt compressed file",
        ),
    ],
)
def test_the_message_of_a_mistake_is_quoted(
    mistake: Callable[[Path], object], quoted: str, tmp_path: Path
) -> None:
    assert f"| `{quoted}`" in PAGE
    with pytest.raises(D2PLMError) as error:
        mistake(tmp_path)
    message = str(error.value)
    for part in filter(None, map(str.strip, quoted.split("…"))):  # in this order
        _, found, message = message.partition(part)
        assert found, str(error.value)
