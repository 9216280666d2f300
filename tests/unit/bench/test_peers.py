"""The peers do what our trainer does: the padded DiT, the arms, the Lightning example."""

import gzip
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from d2plm.bench.arms import require_same_losses, take_turns
from d2plm.bench.padded import CorruptedSequences, PaddedDiT, PaddingCollator, padded_loss
from d2plm.bench.peers import bench_peers, dit_arms
from d2plm.bench.workload import Workload, workload_of
from d2plm.core.alphabet import CLS, EOS, MASK
from d2plm.core.batch import PackedBatch
from d2plm.core.errors import BenchError, ConfigError
from d2plm.core.noise import Key
from d2plm.data.homology import ClusterSettings, SearchSettings
from d2plm.data.prepare import Resources, prepare
from d2plm.data.split import SplitSettings
from d2plm.data.store import SequenceStore
from d2plm.export.exported_model import load_export
from d2plm.model.dit import DiT
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.training.callbacks.base import Callback
from d2plm.training.trainer import Trainer
from tests.conftest import FASTA, TINY_SIZES, DiTFactory

SMALL_FASTA = FASTA.with_name("uniprot_500.fasta.gz")
EXAMPLE = FASTA.parents[1] / "lightning.py"
LENGTHS = (40, 3, 17, 40, 2)
ESM_LIKE = {
    "feed_forward": "gelu",
    "linear_bias": True,
    "affine_norm": True,
    "qk_norm": False,
    "token_dropout": True,
    "head": "esm",
}
TINY_ESM = {"hidden_size": 16, "num_hidden_layers": 2}
TINY_ESM |= {"num_attention_heads": 2, "intermediate_size": 24}
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


def batch_of_proteins() -> PackedBatch:
    """<cls> residues <eos> of several lengths, and a tail of padding."""
    random = np.random.default_rng(0)
    rows = [random.integers(4, 24, size=length + 2, dtype=np.uint8) for length in LENGTHS]
    for row in rows:
        row[0], row[-1] = CLS, EOS
    return PackedBatch.pack(rows, token_budget=sum(map(len, rows)) + 9, max_segments=len(rows) + 2)


@pytest.fixture(params=[{}, ESM_LIKE], ids=["dit", "esm"])
def dit(request: pytest.FixtureRequest, tiny_dit: DiTFactory) -> DiT:
    model = tiny_dit(**request.param)
    assert isinstance(model, DiT)
    return model


@pytest.fixture
def tiny_workload() -> Iterator[Workload]:
    with workload_of(SMALL_FASTA, TINY_SIZES, **SIZES) as workload:
        yield workload


def test_longer_proteins_are_left_out_on_demand() -> None:
    def lengths(longest: int | None) -> list[int]:
        with workload_of(SMALL_FASTA, TINY_SIZES, **SIZES, longest_protein=longest) as workload:
            return sorted(SequenceStore(Path(workload.store)).lengths.tolist())

    everything = lengths(None)
    middle = everything[len(everything) // 2]
    assert lengths(middle) == [length for length in everything if length <= middle]


def test_a_padded_dit_has_the_logits_of_the_packed_one_at_every_token(dit: DiT) -> None:
    batch = batch_of_proteins()
    corrupted = AbsorbingDiffusion().corrupt(batch, Key(0))
    assert (corrupted.tokens == MASK).any()
    packed = dit(corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times)
    for length in (None, 64):
        padded = PaddingCollator(length)([CorruptedSequences.of(batch, corrupted)])
        assert padded["input_ids"].shape == (len(LENGTHS), length or max(LENGTHS) + 2)
        logits = PaddedDiT(dit)(padded["input_ids"], padded["attention_mask"], padded["times"])
        at_tokens = logits[padded["attention_mask"].bool()]
        torch.testing.assert_close(at_tokens, packed[: len(at_tokens)], rtol=1e-5, atol=1e-5)


def test_a_padded_dit_has_the_loss_and_the_gradients_of_the_packed_one(dit: DiT) -> None:
    batch, paradigm = batch_of_proteins(), AbsorbingDiffusion()
    corrupted = paradigm.corrupt(batch, Key(0))
    logits = dit(corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times)
    nats, count = paradigm.loss(logits, batch, corrupted)
    expected = gradients(dit, nats / count)

    padded = PaddingCollator(64)([CorruptedSequences.of(batch, corrupted)])
    logits = PaddedDiT(dit)(padded["input_ids"], padded["attention_mask"], padded["times"])
    loss = padded_loss(logits, padded)
    torch.testing.assert_close(loss.double(), nats / count, rtol=1e-6, atol=0)
    for name, gradient in gradients(dit, loss).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * scale)


def test_a_padded_dit_computes_every_position(tiny_dit: DiTFactory) -> None:
    seen: list[int] = []
    model = tiny_dit()
    model.blocks[0].feed_forward.register_forward_hook(
        lambda _module, inputs, _output: seen.append(inputs[0][..., 0].numel())
    )
    batch = batch_of_proteins()
    steps = [CorruptedSequences.of(batch, AbsorbingDiffusion().corrupt(batch, Key(0)))]
    for length in (None, 64):
        padded = PaddingCollator(length)(steps)
        PaddedDiT(model)(padded["input_ids"], padded["attention_mask"], padded["times"])
    assert seen == [len(LENGTHS) * (max(LENGTHS) + 2), len(LENGTHS) * 64]


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_peers_have_our_losses_and_a_row_with_a_ratio_each(tmp_path: Path) -> None:
    rows, timings = bench_peers(
        SMALL_FASTA,
        TINY_SIZES,
        **SIZES,
        device="cpu",
        precision="fp32",
        compile=False,
        turns=2,
        steps=1,
        esm=TINY_ESM,
        temporary_dir=tmp_path,
    )
    names = [timing.name for timing in timings]
    assert names == [
        "packed",
        "Lightning, packed",
        "HF Trainer, to longest",
        "Lightning, to longest",
        "HF Trainer, to 512",
        "Lightning, to 512",
        "packed, ESM-compatible",
        "EsmForMaskedLM in HF Trainer, to longest",
        "EsmForMaskedLM in HF Trainer, to 512",
    ]
    for group in (timings[:6], timings[6:]):
        assert require_same_losses(group, 2e-5) > 0  # they did not compute the same in one way
        assert len({round(loss, 2) for loss in group[0].losses}) > 1
    value = {row.what: row for row in rows}
    goals = {"HF Trainer, to longest": 3, "Lightning, to longest": 3}
    goals |= {"HF Trainer, to 512": 6, "Lightning, to 512": 6}
    for name in names:
        assert value[f"{name}, fp32"].unit == "tokens/CPU-s"
    for name in names[1:6]:
        assert value[f"time of {name} ÷ packed, fp32"].goal == goals.get(name)
    for name in names[7:]:
        assert value[f"time of {name} ÷ packed, ESM-compatible, fp32"].unit == "×"
    positions = value["positions ÷ tokens, padded to 512"].value
    assert positions >= value["positions ÷ tokens, padded to longest"].value > 1
    assert not list(tmp_path.iterdir())  # the stores and the checkpoint


@pytest.mark.slow
def test_a_peer_that_does_something_else_is_refused(tiny_workload: Workload) -> None:
    settings: dict[str, Any] = {"compile": False, "device": "cpu", "precision": "fp32"}
    arms = {arm.name: arm for arm in dit_arms(tiny_workload, steps=STEPS, **settings)}
    ours, theirs = arms["packed"], arms["HF Trainer, to longest"]
    reseeded = {**theirs.arguments["workload"], "seed": 1}
    others = [
        replace(theirs, name="masks", arguments={**theirs.arguments, "workload": reseeded}),
        replace(theirs, name="faster", arguments={**theirs.arguments, "learning_rate": 2e-4}),
    ]
    timings = take_turns([ours, theirs, *others], turns=1, steps=STEPS - 1, threads=1)
    require_same_losses([timings[ours.name], timings[theirs.name]], 2e-5)
    for other in others:
        with pytest.raises(BenchError, match=f"packed and {other.name} did not do the same work"):
            require_same_losses([timings[ours.name], timings[other.name]], 2e-5)


def test_peers_in_a_precision_that_they_have_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="fp32 or bf16"):
        bench_peers(SMALL_FASTA, TINY_SIZES, device="cpu", precision="fp64")
    with pytest.raises(ConfigError, match="precision"):
        bench_peers(SMALL_FASTA, TINY_SIZES, device="cpu", precision="half")


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

    from d2plm.bench.lightning_trainer import example
    from d2plm.bench.workload import LEARNING_RATE

    kept = KeepLosses()
    settings = {"device": "cpu", "precision": "fp32", "ema_decay": 0.5}
    ours = tiny_workload.trainer(callbacks=(kept,), max_steps=STEPS, **settings)
    ours.train()

    class Keep(lightning.Callback):
        def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
            theirs.append(float(outputs["loss"]))

    theirs: list[float] = []
    model, average = tiny_workload.new_model(), example.MovingAverage(decay=0.5)
    module = example.ProteinModule(
        model, AbsorbingDiffusion(), learning_rate=LEARNING_RATE, precision="fp32"
    )
    data = example.ProteinDataModule(tiny_workload.collection(), **SIZES)
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


@pytest.mark.slow
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
