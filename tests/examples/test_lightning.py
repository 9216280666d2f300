"""examples/lightning.py trains as our trainer does, exports a model, and names what is wrong."""

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.workload import OPTIMIZER, Workload, workload_of
from d2plm.export.exported_model import ExportedModel, load_export
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.training.learning_rate import constant
from tests.conftest import FASTA, TINY_SIZES
from tests.ranks import run
from tests.runs import At

SMALL_FASTA = FASTA.with_name("uniprot_500.fasta.gz")
EXAMPLE = FASTA.parents[1] / "lightning.py"
SIZES = {"token_budget": 1024, "max_length": 512}
STEPS = 4


@pytest.fixture
def tiny_workload() -> Iterator[Workload]:
    with workload_of(SMALL_FASTA, TINY_SIZES, **SIZES) as workload:
        yield workload


def test_it_trains_exactly_as_our_trainer_does(tiny_workload: Workload, tmp_path: Path) -> None:
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint

    losses, expected, model = list[float](), list[float](), tiny_workload.new_model()

    def keep(_trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        losses.append(float(outputs["loss"]))

    settings = {"device": "cpu", "precision": "fp32", "ema_decay": 0.5}
    keeping = [
        At("on_step_end", step + 1, lambda own: expected.append(float(own.loss)))
        for step in range(STEPS)
    ]
    ours = tiny_workload.trainer(callbacks=keeping, max_steps=STEPS, **settings)
    ours.train()

    example = runpy.run_path(str(EXAMPLE), run_name="example")
    average = example["MovingAverage"](decay=0.5)
    sequences = tiny_workload.collection().sequences

    class Data(example["SequenceData"]):  # type: ignore  # loaded above
        def open_stores(self) -> dict[str, Any]:
            return {"train": sequences, "validation": sequences}

    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=2)
    options: dict[str, Any] = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    options |= dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    module = example["SequenceModule"](
        model, AbsorbingDiffusion(), precision="fp32", optimizer=OPTIMIZER, schedule=constant
    )
    lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        callbacks=[LambdaCallback(on_train_batch_end=keep), average, checkpoints],
        **options,
    ).fit(module, datamodule=Data(tmp_path, sequences=8, **SIZES))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert len({round(loss, 3) for loss in losses}) == STEPS
    shadow = average.weights()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, ours.parameters[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(shadow[name], ours.ema.shadow[name], rtol=1e-4, atol=1e-6)


def run_script(words: list[str]) -> None:
    """A rank of the script, as torchrun starts it."""
    os.environ["TORCHELASTIC_RUN_ID"] = "a test"
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def exported(prepared: Path, output: Path, *more: str) -> ExportedModel:
    words = [str(EXAMPLE), str(prepared), str(output), "--steps", "4", "--devices", "2"]
    words += ["--token-budget", "256", "--max-length", "64", "--every", "2", *more]
    run(run_script, [*words, "--strategy", "fsdp2"], world_size=2)
    return load_export(output / "model")


@pytest.mark.thorough
def test_the_script_shards_the_model_and_resumes(few_prepared: Path, tmp_path: Path) -> None:
    whole = exported(few_prepared, tmp_path / "whole")
    assert (whole.provenance["step"], whole.max_length) == (4, 64)
    half = tmp_path / "whole" / "checkpoints" / "epoch=0-step=2.ckpt"
    resumed = exported(few_prepared, tmp_path / "resumed", "--resume", str(half))
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, dict(whole.model.named_parameters())[name]), name


def test_missing_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path / "absent"), str(tmp_path)])
    with pytest.raises(SystemExit, match="absent"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
