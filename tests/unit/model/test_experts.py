"""Mixtures of experts against every expert computed on every token, and what routing promises."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.model.dit import DiT, load_dit
from d2plm.model.dit_config import DiTConfig
from d2plm.model.experts import MixtureOfExperts, Router
from d2plm.model.layers import SwiGLU
from d2plm.model.lora import add_lora
from tests.conftest import TINY_SIZES, Tokens, randomise

EXPERTS: dict[str, Any] = {"num_experts": 5, "experts_per_token": 2}
TOKENS = 40


def layer(**changes: Any) -> MixtureOfExperts:
    config = DiTConfig(**{**TINY_SIZES, **EXPERTS, **changes})
    size = config.shared_expert_size
    made = MixtureOfExperts(config, None if size is None else SwiGLU(config, size))
    randomise(made)
    return made.double()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def by_every_expert(made: MixtureOfExperts, x: Tensor) -> Tensor:
    """The definition: every expert on every token, weighted by gates that are mostly zero."""
    scores = 1 / (1 + torch.exp(-(x @ made.router.weight.mT)))
    bias = 0.0 if made.router.bias is None else made.router.bias
    chosen = torch.zeros_like(scores)
    for token, row in enumerate(scores + bias):
        for _ in range(made.router.experts_per_token):
            free = torch.where(chosen[token] > 0, -torch.inf, row)
            chosen[token, int(free.argmax())] = 1.0
    gates = scores * chosen / (scores * chosen).sum(-1, keepdim=True)
    total = torch.zeros_like(x)
    experts = zip(made.experts.gate_up_weight, made.experts.down_weight, strict=True)
    for number, (gate_up, down) in enumerate(experts):
        gate, up = (x @ gate_up.mT).chunk(2, dim=-1)
        total = total + gates[:, number : number + 1] * ((gate * gate.sigmoid() * up) @ down.mT)
    return total if made.shared_expert is None else total + made.shared_expert(x)


ALL_CHOSEN = {"num_experts": 3, "experts_per_token": 3, "balance_rate": 0.0}


@pytest.mark.parametrize(
    "changes",
    [{}, {"shared_expert_size": 10, "num_experts": 40}, ALL_CHOSEN],
    ids=["plain", "shared", "all chosen"],
)
def test_output_and_gradients_are_those_of_the_definition(changes: dict[str, Any]) -> None:
    made, x = layer(**changes), drawn(TOKENS, TINY_SIZES["hidden_size"])
    x[:9] = x[0]  # to the same experts
    x.requires_grad_()
    trained = [x, *(p for p in made.parameters() if p.requires_grad)]
    weights = drawn(TOKENS, TINY_SIZES["hidden_size"], seed=1)
    expected = by_every_expert(made, x)
    found = made(x, torch.ones(TOKENS, dtype=torch.bool))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad((found * weights).sum(), trained)
    theirs = torch.autograd.grad((expected * weights).sum(), trained)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_scores_are_fp32_under_bf16() -> None:
    made = layer().bfloat16()
    x = drawn(TOKENS, TINY_SIZES["hidden_size"]).bfloat16()
    _, gates = made.router(x, torch.ones(TOKENS, dtype=torch.bool))
    exact = (x.double() @ made.router.weight.double().mT).sigmoid()
    chosen = (exact + made.router.bias.double()).topk(2).indices
    expected = exact.gather(1, chosen) / exact.gather(1, chosen).sum(-1, keepdim=True)
    assert gates.dtype == torch.float32
    torch.testing.assert_close(gates.double(), expected, rtol=1e-6, atol=1e-6)


def routers(model: DiT) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def logits(model: DiT, batch: PackedBatch) -> Tensor:
    times = torch.linspace(0.1, 0.9, batch.num_segments, dtype=torch.float64)
    return model(batch.tokens, batch.cu_seqlens, batch.max_seqlen, times)


LENGTHS = (20, 33, 7)


@pytest.fixture
def sequences(proteins: list[Tokens]) -> list[Tokens]:
    return [p[:n] for p, n in zip(proteins, LENGTHS, strict=False)]


def test_packed_equals_one_at_a_time_and_padding_does_not_count(
    tiny_dit: Callable[..., DiT], sequences: list[Tokens]
) -> None:
    model = tiny_dit(**EXPERTS).double().train()
    padded = PackedBatch.pack(sequences, token_budget=100, max_segments=6)
    times = torch.linspace(0.1, 0.9, 6, dtype=torch.float64)
    at_once = model(padded.tokens, padded.cu_seqlens, padded.max_seqlen, times)
    loads = [router.load.clone() for router in routers(model)]
    squares = [router.z.clone() for router in routers(model)]
    assert [int(load.sum()) for load in loads] == [2 * sum(LENGTHS)] * 2
    alone, zs = [], []
    for sequence, time in zip(sequences, times, strict=False):
        one = PackedBatch.pack([sequence])
        alone.append(model(one.tokens, one.cu_seqlens, one.max_seqlen, time[None]))
        for load, router in zip(loads, routers(model), strict=True):
            load -= router.load
        zs.append(torch.stack([router.z for router in routers(model)]))
    torch.testing.assert_close(at_once[: sum(LENGTHS)], torch.cat(alone), rtol=1e-10, atol=1e-10)
    assert not any(load.any() for load in loads)
    torch.testing.assert_close(torch.stack(squares), torch.stack(zs).sum(0))


def test_the_bias_of_a_router_starts_at_zero_and_every_matrix_by_its_inputs() -> None:
    model = DiT(DiTConfig(**{**TINY_SIZES, **EXPERTS, "num_experts": 64}))
    model.initialise(seed=0)
    found = dict(model.named_parameters())
    inside = "blocks.0.feed_forward"
    assert not found[f"{inside}.router.bias"].any()
    for name, inputs in (("gate_up", 16), ("down", 24)):
        weight = found[f"{inside}.experts.{name}_weight"]
        assert float(weight.std()) == pytest.approx(inputs**-0.5, rel=0.05)
        assert not torch.equal(weight[0], weight[1])


def test_a_loaded_model_has_the_biases_of_its_routers_and_they_do_not_learn(
    tiny_dit: Callable[..., DiT], tmp_path: Path
) -> None:
    model = tiny_dit(**EXPERTS, shared_expert_size=24)
    model.save_pretrained(tmp_path)
    loaded = load_dit(tmp_path)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    biases = [router.bias for router in routers(loaded)]
    assert len(biases) == 2 and all(bias.any() and not bias.requires_grad for bias in biases)


def test_a_change_of_low_rank_leaves_the_experts_out(tiny_dit: Callable[..., DiT]) -> None:
    model = tiny_dit(**EXPERTS, shared_expert_size=24)
    add_lora(model, 2)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("shared_expert" in name for name in trained)
    assert not any(part in name for name in trained for part in (".router.", ".experts."))
