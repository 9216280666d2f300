"""d2plm prepare in the folder of a run: data on which it was trained are not replaced unasked."""

import gzip
import random
from pathlib import Path
from typing import Any

import pytest

from d2plm.commands.prepare import run
from d2plm.config import compose
from d2plm.core.errors import DataError
from d2plm.core.files import RUN_CONFIG
from d2plm.data.manifest import open_prepared


def prepare(folder: Path, *more: str) -> Any:
    words = ["data.alphabet=bytes", "data.format=lines", "data.validation_fraction=0.2"]
    words += [f"data.input={folder / 'texts'}", f"work_dir={folder}", "tracking=none", *more]
    return run(compose("prepare", words))


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


@pytest.mark.parametrize("run_folder", ["diffusion", "large/steps100"])
def test_the_data_of_any_run_in_the_work_folder_are_kept(tmp_path: Path, run_folder: str) -> None:
    texts, output_dir = written_texts(tmp_path), tmp_path / run_folder
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
