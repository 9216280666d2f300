"""`d2plm data`: its actions as a user calls them, on good and on wrong input."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from d2plm.cli import main
from d2plm.data.ingest import ingest
from d2plm.data.store import SequenceStore
from tests.conftest import Captured

ACTIONS = ("stats", "verify", "head", "export")
GIVEN = {"export": ["output=/nowhere/out.fasta"]}


@pytest.fixture
def copy(few_prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(few_prepared, tmp_path / "prepared"))


def refusal(capsys: Captured, code: int, *words: str) -> str:
    """The error line of a rejected command; `code` is its exit status."""
    assert main(["data", *words]) == code
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("d2plm: error: ")
    return lines[0]


def change_a_residue(folder: Path) -> None:
    file, first = folder / "data.mdb", SequenceStore(folder)[0].tobytes()
    content = file.read_bytes()
    assert content.count(first) == 1
    file.write_bytes(content.replace(first, bytes([first[0] ^ 1]) + first[1:]))


def test_stats_are_of_each_split(few_prepared: Path, tmp_path: Path, capsys: Captured) -> None:
    picture = tmp_path / "new" / "stats.svg"
    assert main(["data", "stats", f"store={few_prepared}", f"output={picture}"]) == 0
    capsys.readouterr()
    assert "<svg" in picture.read_text()
    assert main(["data", "stats", f"store={few_prepared}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    store = SequenceStore(few_prepared / "train_lmdb")
    train = document["stores"]["train"]
    assert train["sequences"] == len(store)
    assert train["residues"] == sum(train["residue_counts"].values()) == store.residues
    assert sum(train["composition_percent"].values()) == pytest.approx(100)
    assert train["clusters"] == {"number": 24, "largest": 1, "singletons": 24}
    assert document["digests"]["train"] == store.digest
    assert document["verification"]["leaking_pairs_after"] == 0


def test_verify_names_each_whole_store(few_prepared: Path, capsys: Captured) -> None:
    assert main(["data", "verify", f"store={few_prepared}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, line in zip(("train", "validation", "raw"), lines, strict=True):
        assert line.startswith(f"{few_prepared / f'{name}_lmdb'}: whole, ")
    assert main(["data", "verify", f"store={few_prepared / 'raw_lmdb'}"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[-1:]


def test_export_ingests_to_the_same_store_and_standard_output_has_nothing_else(
    few_prepared: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    source, output = few_prepared / "train_lmdb", tmp_path / "new" / "train.fasta.gz"
    assert main(["data", "export", f"store={source}", f"output={output}"]) == 0
    ingest(output, tmp_path / "again")
    expected = SequenceStore(source).manifest["digests"]
    found = SequenceStore(tmp_path / "again").manifest["digests"]
    assert found == {what: expected[what] for what in ("sequences", "names")}
    capfdbinary.readouterr()
    assert main(["data", "export", f"store={source}", "output=-"]) == 0
    assert capfdbinary.readouterr().out == gzip.decompress(output.read_bytes())


@pytest.mark.parametrize("action", ACTIONS)
def test_a_broken_store_is_named(action: str, copy: Path, tmp_path: Path, capsys: Captured) -> None:
    def message(path: Path) -> str:
        return refusal(capsys, 1, action, f"store={path}", *GIVEN.get(action, []))

    if action in ("head", "export"):
        assert "several stores" in message(copy)
    (tmp_path / "empty").mkdir()
    assert "no sequence store" in message(tmp_path / "empty")
    (copy / "train_lmdb" / "manifest.json").unlink()
    assert "broken off" in message(copy / "train_lmdb")
    (tmp_path / "empty" / "manifest.json").write_text('{"format": "other"}')
    assert "manifest" in message(tmp_path / "empty")
    os.truncate(copy / "validation_lmdb" / "data.mdb", 4096)
    assert "damaged" in message(copy / "validation_lmdb")


def other_data(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("raw_lmdb"), folder)


@pytest.mark.parametrize("damage", [change_a_residue, other_data])
def test_verify_finds(damage: Callable[[Path], None], copy: Path, capsys: Captured) -> None:
    damage(copy / "validation_lmdb")
    assert str(copy / "validation_lmdb") in refusal(capsys, 1, "verify", f"store={copy}")
