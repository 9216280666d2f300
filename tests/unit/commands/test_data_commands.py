"""`d2plm data` on good and wrong input; `d2plm prepare` replaces no data of a run unasked."""

import gzip
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from d2plm.cli import main
from d2plm.commands import prepare as command
from d2plm.config import compose
from d2plm.core.errors import DataError
from d2plm.core.files import RUN_CONFIG
from d2plm.data.manifest import open_prepared
from d2plm.data.store import SequenceStore
from tests.conftest import Captured

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
    assert document["digests"]["train"] == store.digest
    assert document["verification"]["leaking_pairs_after"] == 0


def test_verify_names_what_is_damaged(few_prepared: Path, copy: Path, capsys: Captured) -> None:
    assert main(["data", "verify", f"store={few_prepared}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, line in zip(("train", "validation", "raw"), lines, strict=True):
        assert line.startswith(f"{few_prepared / f'{name}_lmdb'}: whole, ")
    assert main(["data", "verify", f"store={few_prepared / 'raw_lmdb'}"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[-1:]
    for damage in (change_a_residue, other_data):
        damage(copy / "validation_lmdb")
        assert str(copy / "validation_lmdb") in refusal(capsys, 1, "verify", f"store={copy}")


def test_an_export_is_all_of_standard_output(
    few_prepared: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    source, output = few_prepared / "train_lmdb", tmp_path / "new" / "train.fasta.gz"
    assert main(["data", "export", f"store={source}", f"output={output}"]) == 0
    capfdbinary.readouterr()
    assert main(["data", "export", f"store={source}", "output=-"]) == 0
    assert capfdbinary.readouterr().out == gzip.decompress(output.read_bytes())


@pytest.mark.parametrize("action", ["stats", "verify", "head", "export"])
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


def prepare(folder: Path, *more: str) -> Any:
    words = ["data.alphabet=bytes", "data.format=lines", "data.validation_fraction=0.2"]
    words += [f"data.input={folder / 'texts'}", f"work_dir={folder}", "tracking=none", *more]
    return command.run(compose("prepare", words))


def written_texts(folder: Path) -> Path:
    draw, texts = random.Random(0), folder / "texts"
    texts.write_text("\n".join("".join(draw.choices("abcdefgh", k=60)) for _ in range(30)))
    return texts


@pytest.mark.parametrize(
    ("more", "changed"),
    [("", "the input"), ("data.split_seed=1", "the settings"), ("data.window=9", "setting")],
)
def test_only_a_new_start_replaces_data_of_a_run(tmp_path: Path, more: str, changed: str) -> None:
    texts = written_texts(tmp_path)
    made = prepare(tmp_path)
    output_dir = tmp_path / "diffusion"
    output_dir.mkdir(exist_ok=True)
    (output_dir / RUN_CONFIG).touch()
    assert prepare(tmp_path) == made
    if not more:
        texts.write_text("z" + texts.read_text()[1:])
    words = [more] if more else []
    with pytest.raises(DataError, match=f"{changed}.* changed since the run in {output_dir}") as e:
        prepare(tmp_path, *words)
    assert "data.keep_prepared=true" in str(e.value) and "trainer.resume=none" in str(e.value)
    assert prepare(tmp_path, *words, "data.keep_prepared=true") == made
    again = prepare(tmp_path, *words, "trainer.resume=none")
    assert again["key"] != made["key"]
    assert open_prepared(tmp_path / "data").manifest == again


def test_the_data_of_any_run_in_the_work_folder_are_kept(tmp_path: Path) -> None:
    texts, output_dir = written_texts(tmp_path), tmp_path / "large" / "steps100"
    made = prepare(tmp_path)
    output_dir.mkdir(parents=True)
    (output_dir / RUN_CONFIG).write_text(f"data: {{prepared_dir: {tmp_path / 'data'}}}")
    for name, content in (("a", "data: {prepared_dir: /elsewhere}"), ("b", "["), ("c", "data: 1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / RUN_CONFIG).write_text(content)
    texts.write_text("z" + texts.read_text()[1:])
    with pytest.raises(DataError, match=rf"since the run in {output_dir} \(1 run used these data"):
        prepare(tmp_path, "paradigm=flow_matching")
    assert open_prepared(tmp_path / "data").manifest == made
    (output_dir / RUN_CONFIG).unlink()
    assert prepare(tmp_path, "paradigm=flow_matching")["key"] != made["key"]


def test_the_same_sequences_from_another_file_replace_nothing(tmp_path: Path) -> None:
    texts, output_dir = written_texts(tmp_path), tmp_path / "diffusion"
    records = (f">{i}\n{line}\n" for i, line in enumerate(texts.read_text().split()))
    texts.write_text("".join(records))
    made = prepare(tmp_path, "data.format=fasta")
    output_dir.mkdir(exist_ok=True)
    (output_dir / RUN_CONFIG).touch()
    packed = tmp_path / "texts.gz"
    packed.write_bytes(gzip.compress(texts.read_bytes()))
    for more in (f"data.input={packed}", "data.on_illegal=drop"):
        assert prepare(tmp_path, "data.format=fasta", more) == made
    assert open_prepared(tmp_path / "data").manifest == made
    assert not [*(tmp_path / "data").glob("*new_*")]
