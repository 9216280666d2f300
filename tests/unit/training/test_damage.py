"""Checkpoints of two ranks: damaged ones, disks without room, and as safetensors."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from d2plm.core.errors import CheckpointError
from d2plm.data.store import SequenceStore
from d2plm.training.conversion import INDEX, to_safetensors
from d2plm.training.trainer import Trainer
from tests.ranks import Ranks, run
from tests.runs import (
    At,
    assert_same_run,
    build,
    checkpoints,
    history,
    newest,
    progress,
    tensors,
    train,
)
from tests.unit.training.test_checkpoint import flip_a_bit

SETTINGS: dict[str, Any] = {"max_steps": 12, "every": 2, "save_total_limit": 10}


def train_until_stopped(store: Path, output: Path) -> None:
    stop = At("on_step_begin", 6, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    build(store, output, callbacks=[stop], **SETTINGS).train()


@pytest.fixture(scope="module")
def runs(tiny_store: SequenceStore, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    stopped, unbroken = folder / "stopped", folder / "unbroken"
    two = Ranks(train_until_stopped, tiny_store.path, stopped, world_size=2)
    run(train, tiny_store.path, unbroken, SETTINGS, world_size=2)
    assert two.wait() == [143, 143]
    return {"stopped": stopped, "unbroken": unbroken}


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    runs: dict[str, Path], store: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    shutil.copytree(runs["stopped"], output)
    damaged, before = newest(output), checkpoints(output)[-2]
    file = flip_a_bit(damaged, rank=1)
    run(train, store, output, SETTINGS, world_size=2)
    said = (output / "log-0.txt").read_text()
    assert file.name in said
    assert f"{before}, step {int(before[-8:])} of 12" in said
    assert (output / "checkpoints.old" / damaged.name).is_dir()
    assert_same_run(output, runs["unbroken"])


def limit(trainer: Trainer) -> None:
    """Files can no longer be large from step 4 on, and can again from step 8 on."""
    trainer.saver.finish()
    size = 8000 if trainer.step == 4 else resource.RLIM_INFINITY
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


def train_with_small_files(store: Path, output: Path, on_save_error: str, rank: int) -> None:
    full = [At("on_step_begin", step, limit, rank=rank) for step in (4, 8)]
    build(store, output, callbacks=full, **SETTINGS, on_save_error=on_save_error).train()


@pytest.mark.parametrize(("on_save_error", "rank"), [("stop", 1), ("continue", 0)])
def test_one_rank_that_cannot_write(
    on_save_error: str, rank: int, runs: dict[str, Path], store: Path, tmp_path: Path
) -> None:
    code, saved = (1, [2, 4]) if on_save_error == "stop" else (0, [2, 4, 10, 12])
    arguments = (store, tmp_path, on_save_error, rank)
    codes = Ranks(train_with_small_files, *arguments, world_size=2).wait(180)
    assert codes == [code, code]
    for number in (0, 1):
        said = (tmp_path / f"log-{number}.txt").read_text()
        assert f"cannot write checkpoint {tmp_path}/checkpoints/step-00000006" in said
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert [progress(folder)["step"] for folder in kept] == saved
    losses = [row["loss"] for row in history(tmp_path)]
    assert losses == [row["loss"] for row in history(runs["unbroken"])][: len(losses)]
    assert (len(losses) == 12) == (on_save_error == "continue")


def train_apart(store: Path, output: Path) -> None:
    """Each rank has a disk of its own, as machines have that share none."""
    disk = output / f"disk-{os.environ['RANK']}"
    build(store, output, checkpoints=str(disk), **SETTINGS).train()


def test_ranks_that_share_no_folder_are_reported(store: Path, tmp_path: Path) -> None:
    assert Ranks(train_apart, store, tmp_path, world_size=2).wait(90) == [1, 1]
    for rank in (0, 1):
        said = (tmp_path / f"log-{rank}.txt").read_text()
        assert "__1_0.distcp, which other ranks wrote: the folder must be one that all" in said


def test_a_checkpoint_of_two_ranks_is_converted_whole(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    original, folder = newest(runs["stopped"]), tmp_path / "converted"
    number = to_safetensors(str(original), folder, max_shard_bytes=20_000)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    converted = {name: value for file in files for name, value in load_file(file).items()}
    assert len(converted) == number
    torch.testing.assert_close(converted, tensors(original), rtol=0, atol=0)
    assert json.loads((folder / INDEX).read_text())["run_state"] == progress(original)
    with pytest.raises(CheckpointError, match="already exists"):
        to_safetensors(str(original), folder)
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        to_safetensors(str(tmp_path / "nothing"), tmp_path / "other")
