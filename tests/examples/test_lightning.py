"""examples/lightning.py trains as our trainer does, exports a model, and names what is wrong."""

import gzip
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from benchmarks.workload import LEARNING_RATE, Workload, workload_of
from d2plm.data.prepare import prepare
from d2plm.export.exported_model import ExportedModel, load_export
from d2plm.model.dit import DiT
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings.data import ClusterSettings, Resources, SearchSettings, SplitSettings
from d2plm.settings.training import AdamWSettings, MuonSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.learning_rate import constant
from d2plm.training.muon import build_muon
from d2plm.training.optimizer import build_adamw
from d2plm.training.trainer import Trainer
from tests.conftest import FASTA, TINY_SIZES
from tests.ranks import run

SMALL_FASTA = FASTA.with_name("uniprot_500.fasta.gz")
EXAMPLE = FASTA.parents[1] / "lightning.py"
SIZES = {"token_budget": 1024, "max_length": 512}
STEPS = 4


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A few proteins, prepared by the quickest settings."""
    with gzip.open(SMALL_FASTA, "rt") as file:
        (tmp_path / "few.fasta").write_text(">".join(file.read().split(">")[:31]))
    prepare(
        tmp_path / "few.fasta",
        tmp_path / "prepared",
        split=SplitSettings(validation_fraction=0.2, search_directions="from_held_out"),
        clustering=ClusterSettings(method="none"),
        search=SearchSettings(sensitivity=1.0),
        resources=Resources(threads=1),
    )
    return tmp_path / "prepared"


@pytest.fixture
def tiny_workload() -> Iterator[Workload]:
    with workload_of(SMALL_FASTA, TINY_SIZES, **SIZES) as workload:
        yield workload


class KeepLosses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        self.losses.append(float(trainer.loss))


class Keep(lightning.Callback):
    """The loss of every step and the bound of every validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.bounds: list[float] = []

    def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: Any, _module: Any) -> None:
        self.bounds.append(float(trainer.callback_metrics["validation_nelbo"]))


@dataclass
class Fitted:
    """A run of the example in Lightning, from the start or from a checkpoint."""

    keep: Keep
    model: DiT
    average: Any


def fit(workload: Workload, folder: Path, *, resume: Path | None = None, **settings: Any) -> Fitted:
    """Four steps with a validation and a checkpoint after every other one."""
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    fitted = Fitted(Keep(), workload.new_model(), example["MovingAverage"](decay=0.5))
    sequences = workload.collection().sequences

    class Data(example["SequenceData"]):  # type: ignore  # loaded above
        def open_stores(self) -> dict[str, Any]:
            return {"train": sequences, "validation": sequences}

    lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[
            *(fitted.keep, fitted.average),
            ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(
        example["SequenceModule"](fitted.model, AbsorbingDiffusion(), precision="fp32", **settings),
        datamodule=Data(folder, sequences=8, **SIZES),
        ckpt_path=resume,
    )
    return fitted


def test_the_lightning_example_has_the_losses_and_the_weights_of_our_trainer(
    tiny_workload: Workload, tmp_path: Path
) -> None:
    kept, adamw = (
        KeepLosses(),
        partial(build_adamw, settings=AdamWSettings(learning_rate=LEARNING_RATE)),
    )
    settings = {"device": "cpu", "precision": "fp32", "ema_decay": 0.5}
    ours = tiny_workload.trainer(callbacks=(kept,), max_steps=STEPS, **settings)
    ours.train()
    theirs = fit(tiny_workload, tmp_path, optimizer=adamw, schedule=constant)
    assert theirs.keep.losses == pytest.approx(kept.losses, rel=1e-6)
    assert len({round(loss, 3) for loss in theirs.keep.losses}) == STEPS
    expected, shadow = ours.ema.shadow, theirs.average.weights()
    for name, parameter in theirs.model.named_parameters():
        torch.testing.assert_close(parameter, ours.parameters[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(shadow[name], expected[name], rtol=1e-4, atol=1e-6)


def test_a_resumed_lightning_run_equals_an_unbroken_one_bit_for_bit(
    tiny_workload: Workload, tmp_path: Path
) -> None:
    muon = partial(build_muon, settings=MuonSettings(learning_rate=1e-2))
    whole = fit(tiny_workload, tmp_path / "whole", optimizer=muon)
    resumed = fit(
        *(tiny_workload, tmp_path / "resumed"),
        resume=tmp_path / "whole" / "step=2.ckpt",
        optimizer=muon,
    )
    assert resumed.keep.losses == whole.keep.losses[2:]
    assert resumed.keep.bounds == whole.keep.bounds[1:]
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, dict(resumed.model.named_parameters())[name]), name
        assert torch.equal(whole.average.weights()[name], resumed.average.weights()[name]), name


def run_script(words: list[str]) -> None:
    """A rank of the script, as torchrun starts it."""
    os.environ["TORCHELASTIC_RUN_ID"] = "a test"
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def exported(folder: Path, output: Path, *more: str) -> ExportedModel:
    words = [str(EXAMPLE), str(folder / "prepared"), str(output), "--steps", "4", "--devices", "2"]
    words += ["--token-budget", "256", "--max-length", "64", "--every", "2", *more]
    run(run_script, [*words, "--strategy", "fsdp2"], world_size=2)
    return load_export(output / "model")


@pytest.mark.thorough
def test_the_lightning_script_shards_the_model_and_resumes(tmp_path: Path, prepared: Path) -> None:
    whole = exported(tmp_path, tmp_path / "whole")
    assert (whole.provenance["step"], whole.max_length) == (4, 64)
    half = tmp_path / "whole" / "checkpoints" / "epoch=0-step=2.ckpt"
    resumed = exported(tmp_path, tmp_path / "resumed", "--resume", str(half))
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, dict(whole.model.named_parameters())[name]), name


def test_the_lightning_example_names_what_is_wrong_with_its_data(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "absent"), str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "absent" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
