"""Every benchmark explains itself, peers do the same work, and tables are what they say."""

import argparse
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from benchmarks.measure import (
    BenchError,
    Row,
    Timings,
    publish,
    ratio_row,
    require_same_losses,
)
from benchmarks.padded import PaddedDiT, PaddingCollator, padded_loss
from benchmarks.speedrun import run as speedrun
from benchmarks.workload import model_settings
from d2plm.config import compose
from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.core.vocabulary import CLS, EOS
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings.model import ModelSettings
from tests.conftest import DiTFactory

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [
    ".".join(file.relative_to(FOLDER).with_suffix("").parts)
    for file in FOLDER.rglob("*.py")
    if "parser(" in file.read_text() and file.stem != "measure"
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_help_and_is_run_by_the_makefile_or_the_gpu_script(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(f"benchmarks.{script}", run_name="__main__")
    assert f"usage: python -m benchmarks.{script} " in capsys.readouterr().out
    makefile, shell = FOLDER.with_name("Makefile").read_text(), (FOLDER / "gpu.sh").read_text()
    assert f"benchmarks.{script}" in makefile.split() or f" {script} " in shell


@pytest.mark.parametrize("name", ["150m", "450m"])
def test_models_are_read_as_hydra_composes_them(name: str) -> None:
    assert ModelSettings(**model_settings(name)) == compose("train", [f"model={name}"]).model


def test_a_ratio_is_the_median_of_neighbouring_turns() -> None:
    row = ratio_row("slow ÷ fast", [2.0, 9.0, 8.0], [1.0, 3.0, 1.0], 2.5)
    assert (row.what, row.value, row.spread) == ("time of slow ÷ fast", 3.0, (2.5, 5.5))
    assert row.met is True
    assert ratio_row("one ÷ other", [3.0], [2.0]).spread == (1.5, 1.5)


def test_the_table_says_which_goals_are_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("ratio", 2.5, "×", 3, spread=(2.0, 3.0)), Row("loss", 0.25, "", 1, at_most=True)]
    output = tmp_path / "peers.json"
    publish(argparse.Namespace(output=output), rows)
    ratio, loss = capsys.readouterr().out.splitlines()[2:4]
    assert ratio.split() == ["ratio", "2.5", "(2", "–", "3)", "×", "≥", "3", "missed"]
    assert loss.split() == ["loss", "0.25", "≤", "1", "met"]
    assert [row["what"] for row in json.loads(output.read_text())["rows"]] == ["ratio", "loss"]


def test_arms_with_other_losses_are_not_compared() -> None:
    ours = Timings("ours", losses=[3.0, 2.0])
    assert require_same_losses([ours, Timings("same", losses=[3.0, 2.0002])], 1e-3) > 0
    for losses in ([3.0, 2.1], [3.0], [3.0, float("nan")]):
        with pytest.raises(BenchError, match="other"):
            require_same_losses([ours, Timings("other", losses=losses)], 1e-3)


LENGTHS = (40, 3, 17, 40, 2)


def batch_of_proteins() -> PackedBatch:
    """<cls> residues <eos> of several lengths, and a tail of padding."""
    random = np.random.default_rng(0)
    rows = [random.integers(4, 24, size=length + 2, dtype=np.uint8) for length in LENGTHS]
    for row in rows:
        row[0], row[-1] = CLS, EOS
    return PackedBatch.pack(rows, token_budget=sum(map(len, rows)) + 9, max_segments=len(rows) + 2)


@pytest.mark.parametrize("length", [None, 64])
def test_a_padded_dit_has_the_logits_and_gradients_of_the_packed_one(
    length: int | None, tiny_dit: DiTFactory
) -> None:
    batch, paradigm, dit = batch_of_proteins(), AbsorbingDiffusion(), tiny_dit()
    corrupted = paradigm.corrupt(batch, Key(0))
    packed = dit(corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times)
    nats, count = paradigm.loss(packed, batch, corrupted)
    expected = gradients(dit, nats / count)

    computed: list[int] = []
    dit.blocks[0].feed_forward.register_forward_hook(
        lambda _module, inputs, _output: computed.append(inputs[0][..., 0].numel())
    )
    padded, model = PaddingCollator(length)([(batch, corrupted)]), PaddedDiT(dit)
    loss = padded_loss(model, padded)
    assert computed == [len(LENGTHS) * (length or max(LENGTHS) + 2)]  # every position
    torch.testing.assert_close(loss.double(), nats / count, rtol=1e-6, atol=0)
    for name, gradient in gradients(dit, loss).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * scale)
    logits = model(padded["input_ids"], padded["attention_mask"], padded["times"])
    at_tokens = logits[padded["attention_mask"].bool()]
    torch.testing.assert_close(at_tokens, packed[: len(at_tokens)], rtol=1e-5, atol=1e-5)


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_page_has_the_table_of_the_entries_as_they_are() -> None:
    runs = speedrun.runs_of(yaml.safe_load(speedrun.ENTRIES.read_text()))
    assert sum(map(len, runs.values())) == len(speedrun.read_results())
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    assert speedrun.table(runs) in page


def test_the_table_has_the_mean_of_the_seeds_and_the_best_last() -> None:
    good, bad = (
        [{"perplexity": x, "million_tokens": 2.0, "cpu_seconds": 100.0} for x in perplexities]
        for perplexities in ((17.1, 17.0), (18.0,))
    )
    *_, bad_row, good_row = speedrun.table({"good": good, "bad": bad, "none": []}).splitlines()
    assert bad_row.startswith("| bad | 2.0 | 100 | **18.000** | 18.000 |")
    assert good_row.startswith("| good | 2.0 | 100 | **17.050** | 17.000 17.100 |")
