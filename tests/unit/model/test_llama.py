"""With the options of Llama and GPT-NeoX, a DiT computes what transformers' models compute.

These are given a mask that lets every token attend to every other, as a DiT does. What Llama
computes in fp32 whatever its dtype is, RMSNorm, is replaced by fp64 after a check.
"""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from d2plm.core.batch import PackedBatch
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from tests.conftest import DiTFactory, randomise

V, WIDTH, HEADS, LAYERS, INNER = 300, 32, 2, 3, 40
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
}
PLAIN: dict[str, Any] = {"time_embedding_dim": None, "affine_norm": True, "qk_norm": False}
LLAMA: dict[str, Any] = {**SIZES, **PLAIN, "norm": "rms"}
NEOX: dict[str, Any] = {
    **SIZES,
    **PLAIN,
    "feed_forward": "gelu",
    "linear_bias": True,
    "parallel_residual": True,
    "rope_fraction": 0.25,
}
LENGTHS = (17, 1, 9)
PACKED = PackedBatch.pack(
    [np.random.default_rng(n).integers(0, V, size=n, dtype=np.uint16) for n in LENGTHS]
)
TOKENS = PACKED.tokens.int()  # torch has few operations for 16 bits without a sign


def logits(model: DiT) -> Tensor:
    times = torch.rand(len(LENGTHS))
    with torch.no_grad():
        return model(TOKENS, PACKED.cu_seqlens, PACKED.max_seqlen, times)


def theirs(model: transformers.PreTrainedModel) -> Tensor:
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


def frequencies_of_a_dit(rotary: nn.Module, pairs: int) -> None:
    """Give transformers' rotary embedding a DiT's frequencies, which round differently in fp32."""
    ours = 10_000.0 ** (-torch.arange(pairs) / pairs)
    torch.testing.assert_close(rotary.inv_freq.float(), ours, rtol=1e-6, atol=0.0)
    rotary.inv_freq = ours


def rms_norm(self: LlamaRMSNorm, x: Tensor) -> Tensor:
    return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()


def test_a_bidirectional_llama_is_a_dit_without_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(
        **SIZES, rms_norm_eps=1e-5, max_position_embeddings=64, attn_implementation="sdpa"
    )
    model = transformers.LlamaForCausalLM(config)
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
    frequencies_of_a_dit(model.model.rotary_emb, WIDTH // HEADS // 2)
    monkeypatch.setattr(LlamaRMSNorm, "forward", rms_norm)
    torch.testing.assert_close(logits(ours), theirs(model), rtol=1e-10, atol=1e-10)


def test_a_bidirectional_gpt_neox_is_a_dit_with_parallel_residuals_and_few_rotated_channels() -> (
    None
):
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    config = transformers.GPTNeoXConfig(
        **SIZES, rope_parameters=rope, max_position_embeddings=64, attn_implementation="sdpa"
    )
    assert config.use_parallel_residual
    model = transformers.GPTNeoXForCausalLM(config)
    randomise(model)
    model = model.double().eval()
    w = model.state_dict()
    size = WIDTH // HEADS
    pairs = round(0.25 * size / 2)
    # Theirs rotate the first channels, i against i + pairs; a DiT the first of each half, i against
    # i + size/2.
    rest = list(range(2 * pairs, size))
    half = size // 2 - pairs
    turned = [*range(pairs), *rest[:half], *range(pairs, 2 * pairs), *rest[half:]]

    def qkv(whole: Tensor) -> Tensor:
        q, k, v = whole.unflatten(0, (HEADS, 3, size)).unbind(1)  # theirs are by head
        return torch.cat([each.flatten(0, 1) for each in (q[:, turned], k[:, turned], v)])

    weights = {
        "token_embedding.weight": w["gpt_neox.embed_in.weight"],
        "head.proj.weight": model.get_output_embeddings().weight.detach(),
        "head.proj.bias": torch.zeros(V),
    }
    for kind in ("weight", "bias"):
        weights[f"head.norm.{kind}"] = w[f"gpt_neox.final_layer_norm.{kind}"]
        for i in range(LAYERS):
            layer, block = f"gpt_neox.layers.{i}", f"blocks.{i}"
            names = {
                "attention_norm": "input_layernorm",
                "attention.out_proj": "attention.dense",
                "feed_forward_norm": "post_attention_layernorm",
                "feed_forward.up_proj": "mlp.dense_h_to_4h",
                "feed_forward.down_proj": "mlp.dense_4h_to_h",
            }
            weights |= {f"{block}.{a}.{kind}": w[f"{layer}.{b}.{kind}"] for a, b in names.items()}
            mixed = qkv(w[f"{layer}.attention.query_key_value.{kind}"])
            weights[f"{block}.attention.qkv_proj.{kind}"] = mixed
    ours = DiT(DiTConfig(**NEOX)).double().eval()
    ours.load_state_dict(weights)
    frequencies_of_a_dit(model.gpt_neox.rotary_emb, pairs)
    torch.testing.assert_close(logits(ours), theirs(model), rtol=1e-10, atol=1e-10)


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
