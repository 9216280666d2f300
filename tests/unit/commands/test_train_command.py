"""d2plm train in a folder that another training uses."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from d2plm.cli import main
from d2plm.commands.train import run
from d2plm.config import compose
from d2plm.core.errors import CheckpointError, ConfigError, DataError
from d2plm.core.locks import locked
from d2plm.export.exported_model import load_export, weights_digest
from d2plm.training.callbacks.callback import Callback
from d2plm.training.trainer import Trainer
from tests.conftest import Captured, Logged, MonkeyPatch
from tests.runs import wait_for


def tiny(tmp_path: Path, *more: str) -> Any:
    own = [f"work_dir={tmp_path}", f"data.prepared_dir={tmp_path / 'none'}", "tracking=none"]
    own += ["data.residues=random", "data.token_budget=512", "data.max_length=64"]
    own += ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
    own += ["model.intermediate_size=16", "trainer.max_steps=1", "trainer.compile=false"]
    return compose("train", [*own, "callbacks.evaluation=null", "callbacks.export=null", *more])


def test_a_deleted_training_folder_is_reported(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def delete(_: Callback, trainer: Trainer) -> None:  # as a user in another terminal might
        if trainer.step == 1:
            shutil.rmtree(trainer.output_dir, ignore_errors=True)

    monkeypatch.setattr(Callback, "on_step_begin", delete)
    more = ("trainer.max_steps=4", "callbacks.checkpoint.every=3", "callbacks.metrics=null")
    with pytest.raises(DataError, match="diffusion: was deleted during training"):
        run(tiny(tmp_path, *more))


def test_a_plan_that_does_not_fit_starts_nothing(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("d2plm.commands.train.train_locally", pytest.fail)
    for setting, message in {
        "distributed.tensor=3": "distributed.tensor=3",
        "distributed.pipeline=2": "num_hidden_layers=1",
    }.items():
        with pytest.raises(ConfigError, match=message):
            run(tiny(tmp_path, "distributed.processes=2", setting))


def test_a_training_waits_for_another_one_in_its_folder(tmp_path: Path, caplog: Logged) -> None:
    config = tiny(tmp_path)
    output_dir = Path(config.output_dir)
    held, ended = threading.Event(), []

    def other() -> None:
        with locked(output_dir / ".lock", "busy"):
            held.set()
            wait_for(lambda: "another training run is writing to" in caplog.text)
            ended.append(not (output_dir / "checkpoints").exists())

    thread = threading.Thread(target=other)
    thread.start()
    assert held.wait(180)
    run(config)
    thread.join()
    assert ended == [True], "nothing was written before the other had ended"
    assert (output_dir / "checkpoints" / "step-00000001").is_dir()
    assert not (output_dir / ".lock").exists()


@pytest.mark.parametrize(
    ("processes", "more", "limit"),
    [
        ("1", "trainer.max_wait_seconds=0.1", "trainer.max_wait_seconds=0.1"),
        ("2", "distributed.timeout_seconds=0.2", "distributed.timeout_seconds=0.18"),
    ],
)
def test_a_training_that_waits_gives_up(
    tmp_path: Path, monkeypatch: MonkeyPatch, processes: str, more: str, limit: str
) -> None:
    monkeypatch.setattr("d2plm.commands.train.resolve_device", lambda _: "cuda")
    monkeypatch.setenv("WORLD_SIZE", processes)
    config = tiny(tmp_path, more)
    with locked(Path(config.output_dir) / ".lock", "busy"), pytest.raises(DataError, match=limit):
        run(config)


def test_a_damaged_export_of_a_run_is_written_again(tmp_path: Path, capsys: Captured) -> None:
    config = tiny(tmp_path / "here", "callbacks.export={}")
    run(config)
    model = Path(config.model_dir)
    whole = weights_digest(model)
    (model / "mine").touch()
    assert f"exported {model}" in capsys.readouterr().out
    run(config)
    assert f"reusing {model}" in capsys.readouterr().out
    assert (model / "mine").exists(), "a whole export is kept"
    (model / "config.json").unlink()
    run(config)
    assert f"exported {model}" in capsys.readouterr().out
    load_export(model)
    assert weights_digest(model) == whole
    # `d2plm export` takes the run's own configuration, wherever its folder has been moved.
    moved = (tmp_path / "here").rename(tmp_path / "20240503") / "diffusion"
    weights = moved / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    assert main(["export", f"output_dir={moved}"]) == 0
    assert f"to {moved / 'model'}" in capsys.readouterr().out
    assert main(["export", str(moved), f"model_dir={tmp_path / 'other'}"]) == 0
    assert weights_digest(moved / "model") == weights_digest(tmp_path / "other") == whole
    assert not (tmp_path / "here").exists()
    with pytest.raises(CheckpointError, match=r"max_steps: 1 → 2.*init_from="):
        run(replace(config, output_dir=str(moved), trainer=replace(config.trainer, max_steps=2)))
