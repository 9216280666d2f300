"""With the options of Llama, a DiT computes what transformers' model computes; formulas of others.

Llama is given a mask that lets every token attend to every other, as a DiT does. What it computes
in fp32 whatever its dtype is, RMSNorm, is replaced by fp64 after a check.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from d2plm.core.batch import PackedBatch
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.model.layers import rope_tables, rotate
from tests.conftest import DiTFactory, randomise

V, WIDTH, HEADS, LAYERS, INNER = 300, 32, 2, 3, 40
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
}
LLAMA: dict[str, Any] = {**SIZES, "time_embedding_dim": None, "norm": "rms"}
LLAMA |= {"affine_norm": True, "qk_norm": False}
LENGTHS = (17, 1, 9)
PACKED = PackedBatch.pack(
    [np.random.default_rng(n).integers(0, V, size=n, dtype=np.uint16) for n in LENGTHS]
)
TOKENS = PACKED.tokens.int()  # torch has few operations for 16 bits without a sign


def logits(model: DiT) -> Tensor:
    times = torch.rand(len(LENGTHS))
    with torch.no_grad():
        return model(TOKENS, PACKED.cu_seqlens, PACKED.max_seqlen, times)


def theirs(model: LlamaForCausalLM) -> Tensor:
    """The logits of each sequence alone, without a causal mask."""
    with torch.no_grad():
        each = [
            model(
                ids.long()[None],
                attention_mask=torch.zeros(1, 1, len(ids), len(ids)).to(model.dtype),
            ).logits[0]
            for ids in TOKENS.split(LENGTHS)
        ]
    return torch.cat(each)


def rms_norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
    return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


def test_a_bidirectional_llama_is_a_dit_without_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        **SIZES, rms_norm_eps=1e-5, max_position_embeddings=64, attn_implementation="sdpa"
    )
    model = LlamaForCausalLM(config)
    randomise(model)
    model = model.double().eval()
    w = model.state_dict()
    weights = {
        "token_embedding.weight": w["model.embed_tokens.weight"],
        "head.norm.weight": w["model.norm.weight"],
        "head.proj.weight": w["lm_head.weight"],
        "head.proj.bias": torch.zeros(V),
    }
    for i in range(LAYERS):
        layer, block = f"model.layers.{i}", f"blocks.{i}"
        qkv = [w[f"{layer}.self_attn.{kind}_proj.weight"] for kind in "qkv"]
        gate_up = [w[f"{layer}.mlp.{kind}_proj.weight"] for kind in ("gate", "up")]
        weights |= {
            f"{block}.attention_norm.weight": w[f"{layer}.input_layernorm.weight"],
            f"{block}.attention.qkv_proj.weight": torch.cat(qkv),
            f"{block}.attention.out_proj.weight": w[f"{layer}.self_attn.o_proj.weight"],
            f"{block}.feed_forward_norm.weight": w[f"{layer}.post_attention_layernorm.weight"],
            f"{block}.feed_forward.gate_up_proj.weight": torch.cat(gate_up),
            f"{block}.feed_forward.down_proj.weight": w[f"{layer}.mlp.down_proj.weight"],
        }
    ours = DiT(DiTConfig(**LLAMA)).double().eval()
    ours.load_state_dict(weights)
    as_it_is = theirs(model)
    torch.testing.assert_close(logits(ours), as_it_is, rtol=1e-4, atol=1e-4)
    frequencies = 10_000.0 ** (-torch.arange(8) / 8)  # a DiT's, which round differently in fp32
    torch.testing.assert_close(model.model.rotary_emb.inv_freq.float(), frequencies)
    model.model.rotary_emb.inv_freq = frequencies
    monkeypatch.setattr(LlamaRMSNorm, "forward", rms_norm)
    torch.testing.assert_close(logits(ours), theirs(model), rtol=1e-10, atol=1e-10)


def test_a_fraction_of_the_channels_is_rotated() -> None:
    positions, pairs = torch.arange(5), 2
    x = torch.randn(5, HEADS, 16, dtype=torch.float64)
    tables = rope_tables(positions, 16, 10_000.0, fraction=pairs / 8)
    first, second = x.chunk(2, dim=-1)
    angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(pairs) / pairs)
    turned = torch.complex(first, second)[..., :pairs] * (1j * angles.double()).exp()
    expected = x.clone()
    expected[..., :pairs], expected[..., 8 : 8 + pairs] = turned.real, turned.imag
    found = rotate(x, *(table.double() for table in tables))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parallel", [False, True], ids=["sequential", "parallel"])
def test_a_block_with_a_time_is_its_formula(parallel: bool, tiny_dit: DiTFactory) -> None:
    model = tiny_dit(
        norm="rms", affine_norm=True, parallel_residual=parallel, vocab_size=V
    ).double()
    tokens, time = torch.tensor([0, 7, 9, 2]), torch.tensor([0.4])
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    x, c = model.embed(tokens, bounds, time)
    block, layout = model.blocks[0], model.layout(tokens, bounds, x.dtype)
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = block.modulation(c)[0].chunk(6)

    def norm(of: Any, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * of.weight

    h = norm(block.attention_norm, x) * (1 + scale_a) + shift_a
    y = x + gate_a * block.attention(h, layout.cos, layout.sin, bounds, 4)
    h = norm(block.feed_forward_norm, x if parallel else y) * (1 + scale_f) + shift_f
    expected = y + gate_f * block.feed_forward(h)
    found = block(x, c, layout, bounds, 4)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_model_without_a_time_has_no_parameter_of_one_and_ignores_it() -> None:
    model = DiT(DiTConfig(**LLAMA))
    model.initialise(0)
    names = {name for name, _ in model.named_parameters()}
    assert not any("time" in name or "modulation" in name for name in names)
    assert (logits(model) == 0).all()  # as of every fresh model
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    assert len(norms) == 2 * LAYERS + 1 and all((weight == 1).all() for weight in norms)
    randomise(model)
    assert torch.equal(logits(model), logits(model))  # at other times


def test_token_dropout_is_of_the_last_token_of_any_vocabulary(tiny_dit: DiTFactory) -> None:
    model = tiny_dit(vocab_size=V, token_dropout=True)
    bounds, time = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0.4])
    x, _ = model.embed(torch.tensor([0, 32, V - 1, 2]), bounds, time)
    rows = model.token_embedding.weight
    torch.testing.assert_close(
        x, rows[[0, 32, V - 1, 2]] * 0.88 / 0.75 * torch.tensor([[1, 1, 0, 1]]).T
    )
