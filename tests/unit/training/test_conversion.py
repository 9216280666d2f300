"""A checkpoint as safetensors and back: nothing is lost, and training continues from it."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d2plm.core.errors import CheckpointError
from d2plm.training.conversion import INDEX, to_checkpoint, to_safetensors
from tests.ranks import run
from tests.runs import At, build, interrupt, newest, progress, tensors, train


def train_to_five(store: Path, output: Path) -> None:
    with suppress(KeyboardInterrupt):
        build(store, output, callbacks=[At("on_step_end", 5, interrupt)], every=0).train()


def test_training_continues_from_a_converted_checkpoint(store: Path, tmp_path: Path) -> None:
    run(train_to_five, store, tmp_path / "run", world_size=2)
    original, folder = newest(tmp_path / "run"), tmp_path / "converted"
    number = to_safetensors(str(original), folder, max_shard_bytes=20_000)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    converted = {name: value for file in files for name, value in load_file(file).items()}
    assert len(converted) == number
    assert_equal(converted, tensors(original))
    back = tmp_path / "again" / "checkpoints" / "step-00000005"
    assert to_checkpoint(folder, str(back)) == number
    assert progress(back) == progress(original)
    for name in ("run", "again"):
        train(store, tmp_path / name, {"max_steps": 8, "every": 8, "log": False})
    assert_equal(*(tensors(newest(tmp_path / name)) for name in ("again", "run")))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_cannot_be_converted_is_rejected(store: Path, tmp_path: Path) -> None:
    trainer = build(store, tmp_path / "run", log=False)
    source = trainer.save()
    trainer.saver.wait()
    to_safetensors(source, tmp_path / "converted")
    with pytest.raises(CheckpointError, match="already exists"):
        to_safetensors(source, tmp_path / "converted")
    with pytest.raises(CheckpointError, match="step-00000000"):
        to_checkpoint(tmp_path / "converted", str(tmp_path / "step-00000007"))
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        to_safetensors(str(tmp_path / "nothing"), tmp_path / "other")
    (tmp_path / "converted" / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="convert it again"):
        to_checkpoint(tmp_path / "converted", source)
