"""`d2plm data`: its actions as a user calls them, on good and on wrong input."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from d2plm.cli import main
from d2plm.commands.table import COMMANDS
from d2plm.core.vocabulary import PROTEIN
from d2plm.data.ingest import ingest
from d2plm.data.megatron import MegatronSequences
from d2plm.data.prepare import prepare
from d2plm.data.store import SequenceStore
from d2plm.settings.data import ClusterSettings, Resources, SearchSettings, SplitSettings
from tests.conftest import Captured

EXAMPLE = Path(__file__).parents[3] / "examples" / "data" / "uniprot_500.fasta.gz"
ACTIONS = ("stats", "verify", "head", "export")
GIVEN = {"export": ["output=/nowhere/out.fasta"]}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few proteins, prepared by the quickest settings."""
    folder = tmp_path_factory.mktemp("data")
    with gzip.open(EXAMPLE, "rt") as file:
        (folder / "few.fasta").write_text(">".join(file.read().split(">")[:31]))
    prepare(
        folder / "few.fasta",
        folder / "prepared",
        split=SplitSettings(validation_fraction=0.2, search_directions="from_held_out"),
        clustering=ClusterSettings(method="none"),
        search=SearchSettings(sensitivity=1.0),
        resources=Resources(threads=1),
    )
    return folder / "prepared"


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    """The prepared data, to be damaged."""
    return Path(shutil.copytree(prepared, tmp_path / "prepared"))


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


def test_stats_of_a_store(prepared: Path, capsys: Captured) -> None:
    assert main(["data", "stats", f"store={prepared / 'raw_lmdb'}"]) == 0
    store, text = SequenceStore(prepared / "raw_lmdb"), capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["raw"]
    assert ["sequences", f"{len(store)}"] in rows
    assert ["residues", f"{store.residues:,}"] in rows
    assert ["sequences", store.digest] in rows
    assert ["input", "few.fasta"] in rows
    assert ["records", "30"] in rows


def test_stats_of_prepared_data_are_a_column_for_each_split(
    prepared: Path, tmp_path: Path, capsys: Captured
) -> None:
    picture = tmp_path / "new" / "stats.svg"
    assert main(["data", "stats", f"store={prepared}", f"output={picture}"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["train", "validation"]
    assert ["sequences", "24", "6"] in rows
    assert ["leaking", "pairs", "after", "0"] in rows
    assert "<svg" in picture.read_text()


def test_stats_as_json(prepared: Path, capsys: Captured) -> None:
    assert main(["data", "stats", f"store={prepared}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    store = SequenceStore(prepared / "train_lmdb")
    train = document["stores"]["train"]
    assert train["sequences"] == len(store)
    assert train["residues"] == sum(train["residue_counts"].values()) == store.residues
    assert sum(train["composition_percent"].values()) == pytest.approx(100)
    assert train["clusters"] == {"number": 24, "largest": 1, "singletons": 24}
    assert document["digests"]["train"] == store.digest
    assert document["verification"]["leaking_pairs_after"] == 0
    assert document["origin"]["records"] == 30


def test_verify_names_each_whole_store(prepared: Path, capsys: Captured) -> None:
    assert main(["data", "verify", f"store={prepared}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, line in zip(("train", "validation", "raw"), lines, strict=True):
        assert line.startswith(f"{prepared / f'{name}_lmdb'}: whole, ")
    assert main(["data", "verify", f"store={prepared / 'raw_lmdb'}"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[-1:]


def test_head_prints_the_first_records(
    prepared: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    store = SequenceStore(prepared / "raw_lmdb")
    assert main(["data", "head", f"store={store.path}", "number=2"]) == 0
    text = capfdbinary.readouterr().out
    names = [line[1:].decode() for line in text.splitlines() if line.startswith(b">")]
    assert names == [store.name(0), store.name(1)]


def test_export_ingests_to_the_same_store(prepared: Path, tmp_path: Path) -> None:
    source, output = prepared / "train_lmdb", tmp_path / "new" / "train.fasta.gz"
    assert main(["data", "export", f"store={source}", f"output={output}"]) == 0
    ingest(output, tmp_path / "again")
    expected = SequenceStore(source).manifest["digests"]
    found = SequenceStore(tmp_path / "again").manifest["digests"]
    assert found == {what: expected[what] for what in ("sequences", "names")}


def test_export_to_standard_output_contains_nothing_else(
    prepared: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    source = prepared / "train_lmdb"
    assert main(["data", "export", f"store={source}", "output=-"]) == 0
    text = capfdbinary.readouterr().out
    main(["data", "export", f"store={source}", f"output={tmp_path / 'o.fasta'}"])
    assert text == (tmp_path / "o.fasta").read_bytes()


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_actions_are_listed_with_an_example_each(words: list[str], capsys: Captured) -> None:
    assert main(["data", *words]) == 0
    text = capsys.readouterr().out
    for action in ACTIONS:
        assert f"  {action} " in text
        assert f"d2plm data {action} store=" in text


@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_s_help_and_configuration(action: str, capsys: Captured) -> None:
    assert main(["data", action, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: d2plm data {action} " in text
    assert COMMANDS["data"].actions[action].example in text
    assert "  store=???" in text and "folder of a store" in text
    assert main(["data", action, "store=x", *GIVEN.get(action, []), "--cfg"]) == 0
    assert "store: x" in capsys.readouterr().out


def test_help_shows_the_command_once(capsys: Captured) -> None:
    main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  data ") for line in lines) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sttas", "store=x"], "unknown action 'sttas' (did you mean 'stats'?)"),
        (["store=x"], "unknown action 'store=x': the action comes before settings"),
        (["stats", "stor=x"], "unknown key 'stor' (did you mean 'store'?)"),
        (["head", "store=x", "format=json"], "unknown key 'format'"),
        (["stats"], "store"),
        (["export", "store=x"], "output"),
        (["stats", "x", "y"], "store is already 'x'; give settings as key=value"),
        (["stats", "store=x", "--jsn"], "unknown option '--jsn' (did you mean '--json'?)"),
        (["stats", "store=.", "output=stats.jpg"], "output='stats.jpg': must be a file that ends"),
        (["head", "store=.", "number=0"], "number=0: must be an integer ≥ 1"),
    ],
)
def test_a_wrong_setting_is_rejected_by_name(
    words: list[str], message: str, capsys: Captured
) -> None:
    assert message in refusal(capsys, 2, *words)


@pytest.mark.parametrize("action", ACTIONS)
def test_an_incomplete_store_is_rejected(
    action: str, copy: Path, tmp_path: Path, capsys: Captured
) -> None:
    def message(path: Path) -> str:
        return refusal(capsys, 1, action, f"store={path}", *GIVEN.get(action, []))

    assert "no such file or folder" in message(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert "no sequence store, or one whose writing was broken off" in message(tmp_path / "empty")
    (copy / "train_lmdb" / "manifest.json").unlink()
    assert "broken off" in message(copy / "train_lmdb")
    (tmp_path / "empty" / "manifest.json").write_text('{"format": "other"}')
    assert "is not the manifest of a sequence store" in message(tmp_path / "empty")
    (tmp_path / "empty" / "manifest.json").write_text('{"format": "d2plm.prepared"}')
    assert "cannot be read" in message(tmp_path / "empty")
    os.truncate(copy / "validation_lmdb" / "data.mdb", 4096)
    assert "damaged" in message(copy / "validation_lmdb")


@pytest.mark.parametrize("action", ["head", "export"])
def test_prepared_data_are_rejected_where_one_store_is_wanted(
    action: str, prepared: Path, capsys: Captured
) -> None:
    line = refusal(capsys, 1, action, f"store={prepared}", *GIVEN.get(action, []))
    assert f"contains several stores; give one of {prepared / 'train_lmdb'}, " in line


def test_verify_finds_a_changed_residue(copy: Path, capsys: Captured) -> None:
    change_a_residue(copy / "validation_lmdb")
    line = refusal(capsys, 1, "verify", f"store={copy}")
    assert str(copy / "validation_lmdb") in line
    assert "prepare the data again" in line


def test_verify_finds_a_store_of_other_data(copy: Path, capsys: Captured) -> None:
    shutil.rmtree(copy / "validation_lmdb")
    shutil.copytree(copy / "raw_lmdb", copy / "validation_lmdb")
    line = refusal(capsys, 1, "verify", f"store={copy}")
    assert f"{copy / 'validation_lmdb'}: is not the store that" in line


def test_an_output_that_cannot_be_written_is_named(
    prepared: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").write_text("in the way")
    output = tmp_path / "file" / "out"
    line = refusal(capsys, 1, "export", f"store={prepared / 'raw_lmdb'}", f"output={output}.fasta")
    assert f"{output}.fasta: cannot be written" in line
    line = refusal(capsys, 1, "stats", f"store={prepared}", f"output={output}.png")
    assert f"{output}.png: cannot be written" in line


def test_a_store_is_exported_as_a_megatron_corpus(prepared: Path, tmp_path: Path) -> None:
    store = SequenceStore(prepared / "train_lmdb")
    for options, end in (["output=a.idx"], None), (["output=b", "format=megatron"], 99):
        output, *rest = options
        given = [f"store={store.path}", output.replace("=", f"={tmp_path}/"), *rest]
        stated = [] if end is None else [f"end_of_document={end}"]
        assert main(["data", "export", *given, *stated]) == 0
        name = output.removeprefix("output=").removesuffix(".idx")
        corpus = MegatronSequences(tmp_path / name, PROTEIN, end_of_document=end)
        assert [tokens.tolist() for tokens in corpus] == [tokens.tolist() for tokens in store]
