"""A checkpoint as safetensors and back: nothing is lost, and training continues from it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d2plm.core.errors import CheckpointError
from d2plm.data.store import SequenceStore
from d2plm.training import checkpoint
from d2plm.training.conversion import INDEX, to_checkpoint, to_safetensors
from d2plm.training.shards import full_weights
from tests.ranks import run
from tests.runs import tensors
from tests.unit.training.test_replay import Keep, trainer_of


def _train(store: Path, output: Path) -> None:
    trainer_of(store, output, Keep(save_every=5)).train()


def weights_after(store: Path, output: Path) -> dict[str, torch.Tensor]:
    trainer = trainer_of(store, output)
    trainer.train()
    weights = full_weights(trainer.model, trainer.process)
    assert weights is not None
    return weights


def test_training_continues_from_a_converted_checkpoint_as_from_its_original(
    tiny_store: SequenceStore, tmp_path: Path
) -> None:
    run(_train, tiny_store.path, tmp_path / "run", world_size=2)
    original = tmp_path / "run" / "checkpoints" / "step-00000005"
    number = to_safetensors(str(original), tmp_path / "converted", max_shard_bytes=20_000)
    files = sorted((tmp_path / "converted").glob("*.safetensors"))
    assert len(files) > 2
    converted = {name: value for file in files for name, value in load_file(file).items()}
    assert len(converted) == number
    for name, value in tensors(original).items():
        assert torch.equal(converted[name], value)
    back = tmp_path / "again" / "checkpoints" / "step-00000005"
    assert to_checkpoint(tmp_path / "converted", str(back)) == number
    assert checkpoint.verify(*checkpoint.split_location(str(back))) == checkpoint.verify(
        *checkpoint.split_location(str(original))
    )
    expected = weights_after(tiny_store.path, tmp_path / "run")
    found = weights_after(tiny_store.path, tmp_path / "again")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_cannot_be_converted_is_rejected(tiny_store: SequenceStore, tmp_path: Path) -> None:
    trainer = trainer_of(tiny_store.path, tmp_path / "run")
    trainer.save_state(tmp_path / "state")
    source = str(tmp_path / "state" / "step-00000000")
    to_safetensors(source, tmp_path / "converted")
    with pytest.raises(CheckpointError, match="already exists"):
        to_safetensors(source, tmp_path / "converted")
    with pytest.raises(CheckpointError, match="is named step-00000000"):
        to_checkpoint(tmp_path / "converted", str(tmp_path / "step-00000007"))
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        to_safetensors(str(tmp_path / "nothing"), tmp_path / "other")
    (tmp_path / "converted" / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="convert it again"):
        to_checkpoint(tmp_path / "converted", source)
