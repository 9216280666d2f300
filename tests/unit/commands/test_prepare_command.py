"""d2plm prepare in the folder of a run: data on which it was trained are not replaced unasked."""

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


@pytest.mark.parametrize(
    ("more", "changed"),
    [("", "the input"), ("data.split_seed=1", "the settings"), ("data.window=9", "setting")],
)
def test_data_of_a_run_are_replaced_only_if_it_starts_anew(
    tmp_path: Path, more: str, changed: str
) -> None:
    draw, texts = random.Random(0), tmp_path / "texts"
    texts.write_text("\n".join("".join(draw.choices("abcdefgh", k=60)) for _ in range(30)))
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
