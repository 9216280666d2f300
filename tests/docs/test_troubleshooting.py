"""docs/troubleshooting.md quotes the messages of common mistakes: they are made, and looked up."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from d2plm.core.errors import D2PLMError
from d2plm.core.precision import resolve_device
from d2plm.core.vocabulary import PROTEIN
from d2plm.data.ingest import ingest
from d2plm.data.store import DATA, SequenceStore
from d2plm.export.exported_model import load_export
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.templates import parse_template
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def reading(name: str, content: bytes) -> Callable[[Path], object]:
    def mistake(folder: Path) -> object:
        (folder / name).write_bytes(content)
        return ingest(folder / name, folder / "store")

    return mistake


def damaged_store(folder: Path) -> object:
    (folder / "a.fasta").write_bytes(b">one\nMKV\n")
    ingest(folder / "a.fasta", folder / "store")
    (folder / "store" / DATA).write_bytes(b"")
    return SequenceStore(folder / "store")


@pytest.mark.parametrize(
    ("mistake", "quoted"),
    [
        (
            reading("a.fasta", b">one\nMKJ\n"),
            "which is not a … letter; write … for an unknown …",
        ),
        (reading("a.fasta", b">one\n>two\nMKV\n"), "has no sequence; remove it"),
        (reading("a.fasta", b"MKV\n"), "not FASTA (text before the first '>': …)"),
        (
            reading("a.csv", b"number,weight\n1,2\n"),
            "which column holds the sequence? Set sequence_field to one of …",
        ),
        (
            reading("a.fasta.gz", gzip.compress(b">one\nMKV\n" * 99)[:-9]),
            "truncated or corrupt compressed file",
        ),
        (damaged_store, "damaged or not written by D2PLM; prepare the data again"),
        (
            load_export,
            "not a model folder",
        ),
        (
            lambda _: Sampling(sampler="euler").resolved(AbsorbingDiffusion()),
            "is not defined for …, the paradigm of this model",
        ),
        (
            lambda _: resolve_device("cuda"),
            "no CUDA device is visible; use 'cpu' or 'auto'",
        ),
        (
            lambda _: parse_template("MKV", "one", PROTEIN),
            "nothing to fill in; put '…' where …s are wanted",
        ),
    ],
)
def test_the_message_of_a_mistake_is_quoted(
    mistake: Callable[[Path], object],
    quoted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert f"| `{quoted}`" in PAGE
    with pytest.raises(D2PLMError) as error:
        mistake(tmp_path)
    message = str(error.value)
    for part in filter(None, map(str.strip, quoted.split("…"))):  # in this order
        _, found, message = message.partition(part)
        assert found, str(error.value)
