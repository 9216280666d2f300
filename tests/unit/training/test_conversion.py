"""A checkpoint as safetensors: nothing is lost."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d2plm.core.errors import CheckpointError
from d2plm.training.conversion import INDEX, to_safetensors
from tests.ranks import run
from tests.runs import At, build, interrupt, newest, progress, tensors


def train_to_five(store: Path, output: Path) -> None:
    with suppress(KeyboardInterrupt):
        build(store, output, callbacks=[At("on_step_end", 5, interrupt)], every=0).train()


def test_a_checkpoint_of_two_ranks_is_converted_whole(store: Path, tmp_path: Path) -> None:
    run(train_to_five, store, tmp_path / "run", world_size=2)
    original, folder = newest(tmp_path / "run"), tmp_path / "converted"
    number = to_safetensors(str(original), folder, max_shard_bytes=20_000)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    converted = {name: value for file in files for name, value in load_file(file).items()}
    assert len(converted) == number
    torch.testing.assert_close(converted, tensors(original), rtol=0, atol=0)
    assert json.loads((folder / INDEX).read_text())["run_state"] == progress(original)


def test_what_cannot_be_converted_is_rejected(store: Path, tmp_path: Path) -> None:
    trainer = build(store, tmp_path / "run", log=False)
    source = trainer.save()
    trainer.saver.wait()
    to_safetensors(source, tmp_path / "converted")
    with pytest.raises(CheckpointError, match="already exists"):
        to_safetensors(source, tmp_path / "converted")
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        to_safetensors(str(tmp_path / "nothing"), tmp_path / "other")
