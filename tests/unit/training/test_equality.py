"""Training is equal on one rank and two: chunks of logits, relatives, means, precision, ties."""

from pathlib import Path
from typing import Any

import numpy as np
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
from d2plm.training.muon import build_muon
from d2plm.training.trainer import Trainer
from tests.conftest import randomise
from tests.ranks import run
from tests.runs import (
    BUDGET,
    SHORT,
    SIZES,
    At,
    assert_same_run,
    build,
    history,
    newest,
    tensors,
    train_each,
)
from tests.unit.training.test_optimizer_state import overflow


def dense_model() -> DiT:
    """A model none of whose weights is zero, the same on every rank."""
    model = DiT(DiTConfig(**{**SIZES, "num_hidden_layers": 2})).double()
    randomise(model)
    return model


def tied_model() -> DiT:
    model = dense_model()
    model.head.proj.weight = model.token_embedding.weight
    return model


def following(count: int, every: int = 10) -> RelativesIndex:
    """Relatives of every tenth sequence, the two that follow it: some ranks' rows have none."""
    queries = np.repeat(np.arange(0, count, every), 2)
    targets = (queries + np.tile([1, 2], len(queries) // 2)) % count
    return RelativesIndex.of_hits(count, queries, targets, np.full(len(queries), 0.4), 2)


RELATIVES: dict[str, Any] = {"sizes": {"relatives_dim": 12}, "relatives": following}
RELATIVES |= {"max_relatives": 2, "max_steps": 3, "optimizer": build_muon}
RUNS: dict[str, dict[str, Any]] = {
    "mask": {"gradient_accumulation_steps": 2, "max_steps": 2},
    "uniform, recomputed": {
        "paradigm": UniformFlowMatching(loss="mean"),
        "gradient_accumulation_steps": 2,
        "plan": {"activation_checkpointing": 1, "reshard_between_micro_batches": True},
        "max_steps": 2,
    },
    "relatives": {**RELATIVES, "gradient_accumulation_steps": 4},
    "tied": {"model": tied_model, "max_steps": 3},
}


IN_CHUNKS = ("mask", "uniform, recomputed")


def train_in_chunks(store: Path, output: Path, runs: dict[str, dict[str, Any]]) -> None:
    """As `train_each`; some as if the vocabulary was a large one: five residues' logits at once."""
    train_each(store, output, {name: runs[name] for name in runs if name not in IN_CHUNKS})
    base.LARGE_VOCABULARY, base.CHUNK_LOGITS = 0, 5 * len(ESM2_TOKENS)
    train_each(store, output, {name: runs[name] for name in IN_CHUNKS})


def test_two_ranks_train_as_one_in_chunks_too(store: Path, tmp_path: Path) -> None:
    run(train_each, store, tmp_path / "one", RUNS, seconds=900)
    run(train_in_chunks, store, tmp_path / "two", RUNS, world_size=2, seconds=900)
    for name in RUNS:
        assert_same_run(tmp_path / "two" / name, tmp_path / "one" / name, 1e-10)
    expected = tensors(newest(tmp_path / "one" / "relatives"))
    encoder = [n for n in expected if n.startswith("model/relatives.")]
    assert len(encoder) == 9
    # The gate's own gradient begins with the second step: the projections have left zero.
    assert all(expected[name].any() for name in encoder)
    assert "model/head.proj.weight" not in tensors(newest(tmp_path / "one" / "tied"))


def test_the_loss_of_two_ranks_is_the_mean_that_was_chosen(
    tiny_store: SequenceStore, tmp_path: Path
) -> None:
    """Loss and gradients against the ranks' own batches, put through the model one by one."""
    shared = {"model": dense_model, "paradigm": AbsorbingDiffusion(loss="mean"), "max_steps": 1}
    shared |= {"gradient_accumulation_steps": 2, "max_grad_norm": None}
    chosen = ("rank_average", "token_weighted")
    settings = {aggregation: {"loss_aggregation": aggregation, **shared} for aggregation in chosen}
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
    named, parameters = zip(*model.named_parameters(), strict=True)
    for aggregation, loss in zip(chosen, (rank_average, token_weighted), strict=True):
        assert_close(losses(tmp_path / aggregation), loss.detach()[None], 1e-10)
        saved = tensors(newest(tmp_path / aggregation))
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        for name, gradient in zip(named, gradients, strict=True):
            # The first moment of AdamW is a tenth of the gradient.
            assert_close(10 * saved[f"optimizer/{name}/exp_avg"], gradient, 1e-10)


def losses(output: Path) -> Tensor:
    return torch.tensor([row["loss"] for row in history(output)], dtype=torch.float64)


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of this rank's parameters and their moments, and of the scale."""
    assert trainer.loss_scale is not None
    found = {**trainer.parameters, **trainer.loss_scale.tensors()}
    for name, parameter in trainer.parameters.items():
        moments = trainer.optimizer.state[parameter]
        found |= {f"{name}.{kind}": moment for kind, moment in moments.items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def train_in_16_bits(store: Path, output: Path) -> None:
    """The fourth step overflows in one shard. (Resuming is tested in test_optimizer_state.)"""
    train_each(store, output, {"bf16": {"precision": "bf16"}})
    states: list[dict[str, Tensor]] = []
    keep = [At("on_step_end", n, lambda t: states.append(state_of(t))) for n in (3, 4, 5)]
    callbacks = [At("on_micro_step_end", 3, overflow, rank=1), *keep]
    build(store, output / "fp16", callbacks=callbacks, **{**SHORT, "precision": "fp16"}).train()
    before, overflown, after = states
    assert before["good_steps"] == 3
    halved = {"scale": before["scale"] / 2, "good_steps": torch.zeros_like(before["good_steps"])}
    assert_close(overflown, {**before, **halved}, 0)
    assert after["head.proj.bias"].ne(before["head.proj.bias"]).any()


def test_in_16_bits_two_ranks_train_as_one_in_fp32_and_leave_an_overflown_step_out(
    store: Path, tmp_path: Path
) -> None:
    run(train_each, store, tmp_path, {"exact": {"precision": "fp32"}})
    run(train_in_16_bits, store, tmp_path, world_size=2)
    exact, bf16, fp16 = (losses(tmp_path / name) for name in ("exact", "bf16", "fp16"))
    assert_close(fp16[:4], exact[:4], 2**-9)  # it has 11 bits
    assert torch.isfinite(fp16).all()
    assert_close(bf16, exact, 2**-6)  # it has 8
    assert (bf16 - exact).abs().max() > 1e-5
