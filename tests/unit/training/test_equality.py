"""Training is equal on one rank and two: chunks of logits, relatives, means, precision, ties."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from d2plm.core.noise import Key
from d2plm.core.vocabulary import ESM2_TOKENS
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.relatives import RelativesIndex
from d2plm.data.store import SequenceStore
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms import paradigm as base
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.training.callbacks.callback import Callback
from d2plm.training.muon import build_muon
from d2plm.training.shards import local
from d2plm.training.trainer import Trainer
from tests.conftest import randomise
from tests.ranks import run
from tests.runs import (
    BUDGET,
    SHORT,
    SIZES,
    assert_same_run,
    build,
    history,
    newest,
    tensors,
    train_each,
)


def dense_model() -> DiT:
    """A model none of whose weights is zero, the same on every rank."""
    model = DiT(DiTConfig(**{**SIZES, "num_hidden_layers": 2})).double()
    randomise(model)
    return model


def tied_model() -> DiT:
    model = dense_model()
    model.head.proj.weight = model.token_embedding.weight
    return model


def following(count: int) -> RelativesIndex:
    """Relatives of every tenth sequence, the two that follow it: some ranks' rows have none."""
    queries = np.repeat(np.arange(0, count, 10), 2)
    targets = (queries + np.tile([1, 2], len(queries) // 2)) % count
    return RelativesIndex.of_hits(count, queries, targets, np.full(len(queries), 0.4), 2)


def train_in_chunks(store: Path, output: Path, runs: dict[str, dict[str, Any]]) -> None:
    """As `train_each`, as if the vocabulary was a large one: logits of five residues at a time."""
    base.LARGE_VOCABULARY, base.CHUNK_LOGITS = 0, 5 * len(ESM2_TOKENS)
    train_each(store, output, runs)


CHUNKED: dict[str, dict[str, Any]] = {
    "mask": {"gradient_accumulation_steps": 2},
    "uniform, recomputed": {
        "paradigm": UniformFlowMatching(loss="mean"),
        "gradient_accumulation_steps": 2,
        "plan": {"activation_checkpointing": 1, "reshard_between_micro_batches": True},
    },
}


def test_two_ranks_train_on_logits_in_chunks_as_one_on_whole_ones(
    tiny_store: SequenceStore, tmp_path: Path
) -> None:
    runs = {name: {"max_steps": 2, **settings} for name, settings in CHUNKED.items()}
    run(train_each, tiny_store.path, tmp_path / "one", runs)
    run(train_in_chunks, tiny_store.path, tmp_path / "two", runs, world_size=2)
    for name in runs:
        assert_same_run(tmp_path / "two" / name, tmp_path / "one" / name, 1e-10)


def test_two_ranks_train_on_relatives_as_one(tiny_store: SequenceStore, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"sizes": {"relatives_dim": 12}, "max_relatives": 2, "max_steps": 3}
    shared["relatives"] = following
    spreads: dict[str, dict[str, Any]] = {
        "adamw": shared,
        "muon": {**shared, "gradient_accumulation_steps": 4},
    }
    spreads["muon"]["optimizer"] = build_muon
    run(train_each, tiny_store.path, tmp_path / "1", spreads)
    run(train_each, tiny_store.path, tmp_path / "2", spreads, world_size=2)
    for name in spreads:
        expected = tensors(newest(tmp_path / "1" / name))
        encoder = [n for n in expected if n.startswith("model/relatives.")]
        assert len(encoder) == 9
        # The gate's own gradient begins with the second step: the projections have left zero.
        assert all(expected[name].any() for name in encoder)
        assert_same_run(tmp_path / "2" / name, tmp_path / "1" / name, 1e-10)


@pytest.mark.thorough
def test_low_precision_trains_on_two_ranks_as_on_one(
    tiny_store: SequenceStore, tmp_path: Path
) -> None:
    shared = {"paradigm": AbsorbingDiffusion(loss="mean"), "overfit_batches": 1, "max_steps": 24}
    settings = {precision: {**shared, "precision": precision} for precision in ("bf16", "fp32")}
    settings["fp32"]["num_workers"] = 1
    for ranks in (1, 2):
        run(train_each, tiny_store.path, tmp_path / str(ranks), settings, world_size=ranks)
    one, two = (losses(tmp_path / str(ranks) / "bf16") for ranks in (1, 2))
    exact, sharded = (losses(tmp_path / str(ranks) / "fp32") for ranks in (1, 2))
    assert_close(sharded, exact, 1e-5)
    assert two[-5:].mean() < two[:5].mean() - 0.05
    assert_close(two, one, 2**-8)  # bf16 has 8 bits
    assert_close(two, exact, 2**-6)
    assert (two - exact).abs().max() > 1e-5


@pytest.mark.parametrize("aggregation", ["rank_average", "token_weighted"])
def test_the_loss_of_two_ranks_is_the_mean_that_was_chosen(
    aggregation: str, tiny_store: SequenceStore, tmp_path: Path
) -> None:
    """Loss and gradients against the ranks' own batches, put through the model one by one."""
    settings = {
        "run": {
            "loss_aggregation": aggregation,
            "model": dense_model,
            "paradigm": AbsorbingDiffusion(loss="mean"),
            "gradient_accumulation_steps": 2,
            "max_grad_norm": None,
            "max_steps": 1,
        }
    }
    run(train_each, tiny_store.path, tmp_path, settings, world_size=2)

    model, paradigm = dense_model().train(), AbsorbingDiffusion(loss="mean")
    sums, counts = [], []
    for rank in (0, 1):
        loader = PackedLoader(
            [Collection(tiny_store)],
            token_budget=BUDGET,
            max_length=48,
            micro_batches=2,
            bins_per_micro_batch=2,
            rank=rank,
            world_size=2,
        )
        total, count = torch.zeros((), dtype=torch.float64), 0
        for batch in next(loader.stream(Position())).micro_batches:
            noised = paradigm.corrupt(batch, Key(0, 0))
            logits = model(noised.tokens, batch.cu_seqlens, batch.max_seqlen, noised.times)
            log_p = logits[:, 4:24].log_softmax(-1)
            masked = noised.tokens == 32
            total = total - log_p[masked].gather(1, batch.tokens[masked].long()[:, None] - 4).sum()
            count += int(masked.sum())
        sums.append(total)
        counts.append(count)
    rank_average = (sums[0] / counts[0] + sums[1] / counts[1]) / 2
    token_weighted = (sums[0] + sums[1]) / (counts[0] + counts[1])
    assert abs(rank_average - token_weighted) > 1e-4
    loss = rank_average if aggregation == "rank_average" else token_weighted
    loss.backward()
    assert_close(losses(tmp_path / "run"), loss.detach()[None], 1e-10)
    saved = tensors(newest(tmp_path / "run"))
    for name, parameter in model.named_parameters():
        # The first moment of AdamW is a tenth of the gradient.
        assert_close(10 * saved[f"optimizer/{name}/exp_avg"], parameter.grad, 1e-10)


@pytest.mark.thorough
def test_tied_parameters_train_on_two_ranks_as_on_one(
    tiny_store: SequenceStore, tmp_path: Path
) -> None:
    settings = {"run": {"model": tied_model, "max_steps": 3}}
    for ranks in (1, 2):
        run(train_each, tiny_store.path, tmp_path / str(ranks), settings, world_size=ranks)
    assert "model/head.proj.weight" not in tensors(newest(tmp_path / "1" / "run"))
    assert_same_run(tmp_path / "2" / "run", tmp_path / "1" / "run", 1e-10)


def losses(output: Path) -> Tensor:
    return torch.tensor([row["loss"] for row in history(output)], dtype=torch.float64)


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# --- fp16 ----------------------------------------------------------------------------------------


class Overflow(Callback):
    """An infinite gradient in one shard of one rank, and what the step then did."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            self.before = self.state(trainer)

    def on_micro_step_end(self, trainer: Trainer) -> None:
        if trainer.step == self.step and trainer.process.rank == trainer.process.world_size - 1:
            grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            next(g for g in map(local, grads) if g.numel()).view(-1)[0] = float("inf")

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        assert trainer.loss_scale is not None
        if trainer.step not in (self.step + 1, self.step + 2):
            return
        after = self.state(trainer)
        if trainer.step == self.step + 2:
            assert after["head.proj.bias"].ne(self.before["head.proj.bias"]).any()
            return
        assert not torch.isfinite(trainer.grad_norm)
        assert after.pop("scale") == self.before.pop("scale") / 2
        assert self.before.pop("good_steps") == self.step
        assert after.pop("good_steps") == 0
        for name, tensor in self.before.items():
            assert torch.equal(after[name], tensor), name

    def state(self, trainer: Trainer) -> dict[str, Tensor]:
        assert trainer.loss_scale is not None
        found = {**trainer.parameters, **trainer.loss_scale.tensors()}
        for name, parameter in trainer.parameters.items():
            moments = trainer.optimizer.state[parameter]
            found |= {f"{name}.{kind}": moment for kind, moment in moments.items()}
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def train_in_fp16(store: Path, output: Path) -> None:
    """The overflow is in the fourth step. (Resuming is tested in test_optimizer_state.)"""
    build(store, output, callbacks=[Overflow(3)], **{**SHORT, "precision": "fp16"}).train()


def test_fp16_leaves_an_overflown_step_out_and_continues(
    tiny_store: SequenceStore, tmp_path: Path
) -> None:
    run(train_each, tiny_store.path, tmp_path, {"exact": {"precision": "fp32"}})
    run(train_in_fp16, tiny_store.path, tmp_path / "two", world_size=2)
    found, exact = losses(tmp_path / "two"), losses(tmp_path / "exact")
    assert_close(found[:4], exact[:4], 2**-9)  # fp16 has 11 bits
    assert torch.isfinite(found).all()
