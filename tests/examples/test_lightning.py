"""examples/lightning.py trains as our trainer does, exports a model, and names what is wrong."""

import gzip
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.workload import LEARNING_RATE, Workload, workload_of
from d2plm.data.homology import ClusterSettings, SearchSettings
from d2plm.data.prepare import Resources, prepare
from d2plm.data.split import SplitSettings
from d2plm.export.exported_model import load_export
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.training.callbacks.callback import Callback
from d2plm.training.trainer import Trainer
from tests.conftest import FASTA, TINY_SIZES

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


@pytest.mark.slow
def test_the_lightning_example_has_the_losses_and_the_weights_of_our_trainer(
    tiny_workload: Workload,
) -> None:
    import pytorch_lightning as lightning

    example = runpy.run_path(str(EXAMPLE), run_name="example")
    kept = KeepLosses()
    settings = {"device": "cpu", "precision": "fp32", "ema_decay": 0.5}
    ours = tiny_workload.trainer(callbacks=(kept,), max_steps=STEPS, **settings)
    ours.train()

    class Keep(lightning.Callback):
        def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
            theirs.append(float(outputs["loss"]))

    theirs: list[float] = []
    model, average = tiny_workload.new_model(), example["MovingAverage"](decay=0.5)
    module = example["ProteinModule"](
        model, AbsorbingDiffusion(), learning_rate=LEARNING_RATE, precision="fp32"
    )
    data = example["ProteinDataModule"](tiny_workload.collection(), **SIZES)
    lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        callbacks=[Keep(), average],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, datamodule=data)
    assert theirs == pytest.approx(kept.losses, rel=1e-6)
    assert len({round(loss, 3) for loss in theirs}) == STEPS
    expected, shadow = ours.ema.shadow, average.ema.shadow
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, ours.parameters[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(shadow[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_the_lightning_example_runs_as_a_script_and_exports_a_model(
    tmp_path: Path, prepared: Path
) -> None:
    command = [sys.executable, str(EXAMPLE), str(prepared), str(tmp_path / "model")]
    command += ["--steps", "2", "--token-budget", "256", "--max-length", "64"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    exported = load_export(tmp_path / "model")
    assert exported.provenance["step"] == 2
    assert exported.max_length == 64


@pytest.mark.slow
def test_the_lightning_example_names_what_is_wrong_with_its_data(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "absent"), str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "absent" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
