"""The layers of the DiT: rotary attention, feed-forwards, adaLN-Zero, the time embedding.

They also implement the variants of ESM-2, Llama and GPT-NeoX (`DiTConfig` lists them). Modulation
is computed once per segment and gathered per token.

Shape suffixes: T tokens, S segments, D hidden, H heads, K head size, F feed-forward, C time
embedding.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.func import functional_call

from d2plm.core.batch import segment_sum
from d2plm.model.attention import packed_attention
from d2plm.model.dit_config import DiTConfig
from d2plm.model.experts import MixtureOfExperts

TIME_FREQUENCY_SCALE = 1000.0  # times in [0, 1] are stretched to the range of a step count
# (hidden states [T, D], function from hidden states [M, D] to logits [M, V]) → result of a forward
Reduce = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
ESM_MASKED_SHARE = 0.15 * 0.8  # fraction of masked tokens in ESM-2's training


class Layout(NamedTuple):
    """Positions of T tokens: a packed row, or a process's part of it.

    Attributes:
        segments: int64 [T], the segment of each token.
        bounds: int32 [S + 1], bounds of the segments among these tokens.
        cos, sin: [T, 1, K], for the tokens' positions, see `rope_tables`; with tensor parallelism
            over the heads, of all tokens that this process attends from.
        real: bool [T], False at padding; only for a mixture of experts, which counts the others.
    """

    segments: Tensor
    bounds: Tensor
    cos: Tensor
    sin: Tensor
    real: Tensor | None = None


class TimeEmbedding(nn.Module):
    """Sinusoidal features of a time in [0, 1], then a two-layer MLP: [S] → [S, C]."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.dim = config.time_embedding_dim
        self.mlp_in = nn.Linear(self.dim, self.dim)
        self.mlp_out = nn.Linear(self.dim, self.dim)

    def forward(self, times_S: Tensor) -> Tensor:
        half = self.dim // 2
        exponents = torch.arange(half, device=times_S.device, dtype=torch.float32) / half
        frequencies = torch.exp(-math.log(10_000.0) * exponents)
        angles = TIME_FREQUENCY_SCALE * times_S.float()[:, None] * frequencies
        features_SC = torch.cat([angles.cos(), angles.sin()], dim=-1)
        hidden_SC = F.silu(self.mlp_in(features_SC.to(self.mlp_in.weight.dtype)))
        return F.silu(self.mlp_out(hidden_SC))


def drop_masked_tokens(
    x_TD: Tensor, is_mask_T: Tensor, segments_T: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """ESM-2's token dropout: embeddings of `<mask>` zeroed, the others of its segment scaled.

    The scale is (1 - 0.15·0.8) / (1 - masked fraction of the segment), because ESM-2 was trained
    with a fraction of 0.12. A segment of only `<mask>` becomes zeros.
    """
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    length_S = cu_seqlens.diff().to(dtype)
    masked_S = segment_sum(is_mask_T.to(dtype), segments_T, length_S.shape[0])
    scale_S = (1 - ESM_MASKED_SHARE) * length_S / (length_S - masked_S).clamp(min=1)
    scale_T = scale_S[segments_T].masked_fill(is_mask_T, 0)
    return (x_TD * scale_T[:, None]).to(x_TD.dtype)


def rope_tables(
    positions_T: Tensor,
    head_size: int,
    theta: float,
    frequencies: Sequence[float] | None = None,
    fraction: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, K] (fp32) of the rotary angles (Su et al., arXiv:2104.09864).

    The two halves of K have the same angles; the sine of the first half is negated, so that a
    rotation is `x · cos + swapped(x) · sin`. Pairs beyond a `fraction` have the frequency 0 and are
    not rotated. Computed from the positions at each call: `from_pretrained` would fill a buffer
    with garbage.
    """
    if frequencies is None:
        half = head_size // 2
        pairs = round(fraction * half)
        exponents = torch.arange(pairs, device=positions_T.device, dtype=torch.float32) / pairs
        frequencies_K = theta ** (-exponents)
        if pairs < half:
            frequencies_K = F.pad(frequencies_K, (0, half - pairs))
    else:
        frequencies_K = _on_device(tuple(frequencies), positions_T.device)
    angles = positions_T.float()[:, None] * frequencies_K
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


@lru_cache(maxsize=16)  # a copy at every call would make the host wait for the device
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def rotate(x_THK: Tensor, cos_T1K: Tensor, sin_T1K: Tensor) -> Tensor:
    """Rotate the two halves of each head against each other by the position's angles."""
    first, second = x_THK.chunk(2, dim=-1)
    swapped = torch.cat([second, first], dim=-1)
    return torch.addcmul(x_THK * cos_T1K, swapped, sin_T1K)


class Attention(nn.Module):
    """Packed multi-head self-attention, by default with normalised queries and keys (QK-norm)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.kernel = packed_attention
        width, bias = config.hidden_size, config.linear_bias
        self.qkv_proj = nn.Linear(width, 3 * width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)
        self.q_norm, self.k_norm = (
            normalisation(config, width // self.heads, bias=False)
            if config.qk_norm
            else nn.Identity()
            for _ in range(2)
        )

    def forward(
        self, x_TD: Tensor, cos_T1K: Tensor, sin_T1K: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> Tensor:
        # Not unbind of a leading dimension: its backward stacks and transposes the gradients.
        q, k, v = rearrange(self.qkv_proj(x_TD), "t (h k) -> t h k", h=3 * self.heads).chunk(3, 1)
        q = rotate(self.q_norm(q), cos_T1K, sin_T1K)
        k = rotate(self.k_norm(k), cos_T1K, sin_T1K)
        # Under autocast the normalisation has left the queries and keys in fp32.
        mixed = self.kernel(q.to(v.dtype), k.to(v.dtype), v, cu_seqlens, max_seqlen)
        return self.out_proj(rearrange(mixed, "t h k -> t (h k)"))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (Shazeer, arXiv:2002.05202); `inner` is the hidden width."""

    def __init__(self, config: DiTConfig, inner: int | None = None) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.linear_bias
        inner = inner or config.intermediate_size
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up_proj(x_TD).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate_TF) * up_TF)


class GELU(nn.Module):
    """down(gelu(up(x))) with the exact GELU (Hendrycks & Gimpel, arXiv:1606.08415)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.linear_bias
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_TD)))


FEED_FORWARD = {"swiglu": SwiGLU, "gelu": GELU}


def normalisation(
    config: DiTConfig, width: int, *, affine: bool = True, bias: bool = True
) -> nn.Module:
    """The configured normalisation; `affine` adds a weight, and `bias` a bias to LayerNorm."""
    if config.norm == "rms":
        return nn.RMSNorm(width, eps=config.layer_norm_eps, elementwise_affine=affine)
    return nn.LayerNorm(width, eps=config.layer_norm_eps, elementwise_affine=affine, bias=bias)


def modulation_layer(config: DiTConfig, parts: int) -> nn.Linear | None:
    """The layer from the time embedding to shifts, scales and gates; None without a time."""
    if config.time_embedding_dim is None:
        return None
    return nn.Linear(config.time_embedding_dim, parts * config.hidden_size)


class Block(nn.Module):
    """A transformer block modulated by the time (adaLN-Zero: Peebles & Xie, arXiv:2212.09748).

    Without a time it is a plain pre-norm block. In a parallel one (Black et al., arXiv:2204.06745,
    section 2.1) the feed-forward reads the block's input, as attention does.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width, affine = config.hidden_size, config.affine_norm
        self.attention_norm = normalisation(config, width, affine=affine)
        self.attention = Attention(config)
        self.feed_forward_norm = normalisation(config, width, affine=affine)
        if config.num_experts is None:
            self.feed_forward = FEED_FORWARD[config.feed_forward](config)
        else:
            size = config.shared_expert_size
            shared = None if size is None else SwiGLU(config, size)
            self.feed_forward = MixtureOfExperts(config, shared)
        self.modulation = modulation_layer(config, 6)
        self.parallel_residual = config.parallel_residual
        self.dropout = config.hidden_dropout_prob

    def forward(
        self,
        x_TD: Tensor,
        time_SC: Tensor | None,
        layout: Layout,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> Tensor:
        shift_a = scale_a = gate_a = shift_f = scale_f = gate_f = None
        if self.modulation is not None:
            shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = expand_modulation(
                self.modulation(time_SC), layout, 6
            )
        h_TD = modulated(self.attention_norm(x_TD), shift_a, scale_a)
        h_TD = self.attention(h_TD, layout.cos, layout.sin, cu_seqlens, max_seqlen)
        attended_TD = self._added(x_TD, gate_a, h_TD)
        read_TD = x_TD if self.parallel_residual else attended_TD
        h_TD = modulated(self.feed_forward_norm(read_TD), shift_f, scale_f)
        h_TD = self.feed_forward(h_TD, *(() if layout.real is None else (layout.real,)))
        return self._added(attended_TD, gate_f, h_TD)

    def _added(self, x_TD: Tensor, gate_TD: Tensor | None, h_TD: Tensor) -> Tensor:
        h_TD = F.dropout(h_TD, self.dropout, self.training)
        return x_TD + h_TD if gate_TD is None else torch.addcmul(x_TD, gate_TD, h_TD)


class Head(nn.Module):
    """Modulated normalisation and the projection to the alphabet's logits, in fp32 or better."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.norm = normalisation(config, config.hidden_size, affine=config.affine_norm)
        self.modulation = modulation_layer(config, 2)
        self.proj = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(
        self, x_TD: Tensor, time_SC: Tensor | None, layout: Layout, reduce: Reduce | None = None
    ) -> Tensor:
        shift_TD = scale_TD = None
        if self.modulation is not None:
            shift_TD, scale_TD = expand_modulation(self.modulation(time_SC), layout, 2)
        h_TD = self.before_projection(modulated(self.norm(x_TD), shift_TD, scale_TD))
        dtype = torch.promote_types(h_TD.dtype, torch.float32)
        project, h_TD = in_dtype(self.proj, dtype), h_TD.to(dtype)
        return project(h_TD) if reduce is None else reduce(h_TD, project)

    def before_projection(self, h_TD: Tensor) -> Tensor:
        """The layers between the normalisation and the projection: none by default."""
        return h_TD


class EsmHead(Head):
    """The head of ESM-2: a dense layer, the exact GELU and a normalisation before the projection.

    The projection has its own weights, which start as a copy of the embeddings.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense_norm = normalisation(config, config.hidden_size)

    def before_projection(self, h_TD: Tensor) -> Tensor:
        return self.dense_norm(F.gelu(self.dense(h_TD)))


HEAD = {"linear": Head, "esm": EsmHead}


def in_dtype(layer: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """`layer` with its parameters cast to `dtype` once for all calls; adapters remain effective."""
    cast = {name: parameter.to(dtype) for name, parameter in layer.named_parameters()}
    return partial(functional_call, layer, cast)


def modulated(h_TD: Tensor, shift_TD: Tensor | None, scale_TD: Tensor | None) -> Tensor:
    """h·(1 + scale) + shift; without a time, h."""
    if shift_TD is None or scale_TD is None:
        return h_TD
    return torch.addcmul(shift_TD, h_TD, 1 + scale_TD)


def expand_modulation(modulation: Tensor, layout: Layout, parts: int) -> list[Tensor]:
    """Shifts, scales and gates of each segment [S, parts·D] → `parts` tensors [T, D]."""
    return [
        ExpandSegments.apply(part, layout.segments, layout.bounds)
        for part in modulation.chunk(parts, dim=-1)
    ]


class ExpandSegments(torch.autograd.Function):
    """Gather rows [S, D] per token → [T, D]; the gradient is summed over each segment in fp32.

    Plain indexing would sum a bf16 gradient in bf16, which drops terms in segments of hundreds of
    tokens, and is slow on a CPU.
    """

    @staticmethod
    def forward(ctx, rows_SD: Tensor, segments_T: Tensor, cu_seqlens: Tensor) -> Tensor:  # type: ignore[no-untyped-def]  # torch's API
        ctx.save_for_backward(cu_seqlens)
        return rows_SD.index_select(0, segments_T)

    @staticmethod
    def backward(ctx, grad_TD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]  # torch's API
        (cu_seqlens,) = ctx.saved_tensors
        return sum_segments(grad_TD, cu_seqlens), None, None


@torch.library.custom_op("d2plm::sum_segments", mutates_args=())
def sum_segments(values_TD: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum the rows of each segment → [S, D], accumulated in fp32 or better."""
    if values_TD.device.type == "cpu":
        sums_SD = values_TD.new_zeros(cu_seqlens.shape[0] - 1, values_TD.shape[1])
        for segment, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
            if stop > start:
                torch.sum(values_TD[start:stop], dim=0, out=sums_SD[segment])
        return sums_SD
    from d2plm.model.segment_sum_kernel import segment_sums  # needs Triton, part of CUDA builds

    return segment_sums(values_TD, cu_seqlens)


@sum_segments.register_fake
def _(values_TD: Tensor, cu_seqlens: Tensor) -> Tensor:
    return values_TD.new_empty(cu_seqlens.shape[0] - 1, values_TD.shape[1])
