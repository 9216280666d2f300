"""packed_attention: bidirectional attention within each segment of a packed row.

The kernel is chosen only here. On CUDA it is PyTorch's `varlen_attn` (fp16 or bf16). On a CPU it is
a custom operator that loops over the segments, which is several times faster than one padded call
and, being opaque to the compiler, keeps `fullgraph=True`. In fp32 and fp64 it calls the flash
kernel, once per run of equally long neighbours. In half precision it is two matrix products with a
softmax between them, which the processor's bf16 instructions compute in half to two thirds of the
flash kernel's time; scores and weights are rounded to that precision. Segments are computed in
windows of few different lengths, because oneDNN generates code for every new shape of a product;
many short segments of one length, such as the draws of one protein, are one batch.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from d2plm.core.errors import ModelError

HALF_PRECISION = (torch.bfloat16, torch.float16)
MULTIPLE = 8  # CUDA's kernel requires a multiple of this head size
WINDOW = 32  # tokens; lengths up to 1,024 are 32 shapes of each product, and oneDNN keeps 1,024
BATCHED, SHORT = 8, 128  # from 8 equally long segments of up to 128 tokens: computed as a batch


def packed_attention(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Softmax attention of every token over its own segment, [T, H, K], with the scale 1/√K.

    Raises `ModelError` on CUDA in a dtype other than fp16 and bf16.

    Args:
        q_THK, k_THK, v_THK: [T tokens, H heads, K head size], one floating dtype.
        cu_seqlens: int32 [S + 1] segment bounds; the last value is T.
        max_seqlen: upper bound on the segment lengths, which determines CUDA's grid.
    """
    if q_THK.device.type in ("cpu", "meta"):  # on meta only the shapes are computed
        return _packed_attention_cpu(q_THK, k_THK, v_THK, cu_seqlens)[0]
    if q_THK.dtype not in HALF_PRECISION:
        raise ModelError(
            f"attention on {q_THK.device.type} needs fp16 or bf16, got {q_THK.dtype}: "
            "set precision=bf16"
        )
    from torch.nn.attention.varlen import varlen_attn

    size = q_THK.shape[-1]
    missing = -size % MULTIPLE
    if missing:  # zeros change only the scale 1/√K of the scores
        q_THK = q_THK * ((size + missing) / size) ** 0.5
        q_THK, k_THK, v_THK = (F.pad(x, (0, missing)) for x in (q_THK, k_THK, v_THK))
    out_THK: Tensor = varlen_attn(  # type: ignore[assignment]  # a pair only where one asks for it
        q_THK, k_THK, v_THK, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    )
    return out_THK[..., :size]


def _segments(cu_seqlens: Tensor) -> Iterator[tuple[int, int]]:
    return ((start, stop) for start, stop in pairwise(cu_seqlens.tolist()) if start < stop)


def _windows(
    segments: Iterable[tuple[int, int]], tokens: int
) -> Iterator[tuple[slice, slice, slice]]:
    """For each segment: its tokens, a window of a multiple of WINDOW around them, its place there.

    A window also covers tokens of other segments, or is as short as the row of `tokens`.
    """
    for start, stop in segments:
        length = min(-(-(stop - start) // WINDOW) * WINDOW, tokens)
        first = min(start, tokens - length)
        window = slice(first, first + length)
        yield slice(start, stop), window, slice(start - first, stop - first)


def _fill_outside(values: Tensor, own: slice, value: float) -> None:
    values[..., : own.start] = value
    values[..., own.stop :] = value


def _equal_length_runs(cu_seqlens: Tensor) -> list[tuple[int, int, int]]:
    """(first token, number of segments, their length) of each run of equally long segments."""
    runs = []
    for length, group in groupby(_segments(cu_seqlens), lambda bounds: bounds[1] - bounds[0]):
        segments = list(group)
        runs.append((segments[0][0], len(segments), length))
    return runs


def _as_batch(packed: Tensor, start: int, count: int, length: int) -> Tensor:
    """View `count` segments of [T, H, …] as [count, H, length, …]."""
    rows = packed[start : start + count * length]
    return rows.unflatten(0, (count, length)).transpose(1, 2)


@torch.library.custom_op("d2plm::packed_attention_cpu", mutates_args=())
def _packed_attention_cpu(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """The CPU kernel: (output [T, H, K], log-sum-exp of the scores [T, H]).

    The flash kernel's backward needs the latter; it is [0, H] in half precision.
    """
    out_THK = torch.empty(q_THK.shape, dtype=q_THK.dtype)
    lse_TH = _new_lse(q_THK)
    if q_THK.dtype in HALF_PRECISION:
        for start, count, length in _equal_length_runs(cu_seqlens):
            if count >= BATCHED and length <= SHORT:
                run = start, count, length
                q, k, v = (_as_batch(x, *run).flatten(0, 1) for x in (q_THK, k_THK, v_THK))
                out = torch.bmm(_weights(q, k, slice(0, length)), v)
                _as_batch(out_THK, *run).copy_(out.unflatten(0, (count, -1)))
                continue
            starts = range(start, start + count * length, length)
            segments = ((first, first + length) for first in starts)
            for segment, window, own in _windows(segments, len(q_THK)):
                q, k, v = (x[window].transpose(0, 1).contiguous() for x in (q_THK, k_THK, v_THK))
                out_THK[segment] = torch.bmm(_weights(q, k, own), v)[:, own].transpose(0, 1)
        return out_THK, lse_TH
    for run in _equal_length_runs(cu_seqlens):
        q, k, v = (_as_batch(x, *run) for x in (q_THK, k_THK, v_THK))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        _as_batch(out_THK, *run).copy_(out)
        _as_batch(lse_TH, *run).copy_(lse)
    return out_THK, lse_TH


@_packed_attention_cpu.register_fake
def _(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    out_THK = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
    return out_THK, _new_lse(q_THK)


@torch.library.custom_op("d2plm::packed_attention_cpu_backward", mutates_args=())
def _packed_attention_cpu_backward(
    grad_THK: Tensor,
    q_THK: Tensor,
    k_THK: Tensor,
    v_THK: Tensor,
    out_THK: Tensor,
    lse_TH: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = [torch.empty(q_THK.shape, dtype=q_THK.dtype) for _ in range(3)]
    if q_THK.dtype in HALF_PRECISION:
        for segment, window, own in _windows(_segments(cu_seqlens), len(q_THK)):
            inputs_HLK = (x[window].transpose(0, 1) for x in (grad_THK, q_THK, k_THK, v_THK))
            for whole, part in zip(gradients, _window_backward(own, *inputs_HLK), strict=True):
                whole[segment] = part[:, own].transpose(0, 1)
        return gradients[0], gradients[1], gradients[2]
    inputs = (grad_THK, q_THK, k_THK, v_THK, out_THK, lse_TH)
    for run in _equal_length_runs(cu_seqlens):
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_as_batch(x, *run) for x in inputs), dropout_p=0.0, is_causal=False
        )
        for whole, part in zip(gradients, parts, strict=True):
            _as_batch(whole, *run).copy_(part)
    return gradients[0], gradients[1], gradients[2]


def _weights(q_HLK: Tensor, k_HLK: Tensor, own: slice) -> Tensor:
    """Softmax of a window's scores over the segment in it [H, L, L], computed in fp32."""
    scores_HLL = torch.bmm(q_HLK * q_HLK.shape[-1] ** -0.5, k_HLK.mT)
    _fill_outside(scores_HLL, own, -torch.inf)
    return scores_HLL.softmax(-1)


def _window_backward(
    own: slice, grad_HLK: Tensor, q_HLK: Tensor, k_HLK: Tensor, v_HLK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [H, L, K] of a window in half precision; the weights are recomputed.

    A product with the transpose of an [L, L] matrix is computed as the transpose of a product with
    the matrix itself, which takes two thirds of the time.
    """
    q, k, v = (x.contiguous() for x in (q_HLK, k_HLK, v_HLK))
    grad = grad_HLK.clone(memory_format=torch.contiguous_format)
    _fill_outside(grad.mT, own, 0)  # these outputs come from other windows
    weights = _weights(q, k, own)
    grad_v = torch.bmm(grad.mT, weights).mT
    scores = torch._softmax_backward_data(torch.bmm(grad, v.mT), weights, -1, weights.dtype)
    scale = q.shape[-1] ** -0.5
    return torch.bmm(scores, k).mul_(scale), torch.bmm(q.mT, scores).mul_(scale).mT, grad_v


@_packed_attention_cpu_backward.register_fake
def _(grad_THK: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # torch's API
    q_THK, k_THK, v_THK, cu_seqlens = inputs
    out_THK, lse_TH = output
    ctx.mark_non_differentiable(lse_TH)
    ctx.save_for_backward(q_THK, k_THK, v_THK, out_THK, lse_TH, cu_seqlens)


def _backward(ctx, grad_THK, _grad_lse):  # type: ignore[no-untyped-def]  # torch's API
    q_THK, k_THK, v_THK, out_THK, lse_TH, cu_seqlens = ctx.saved_tensors
    return (
        *_packed_attention_cpu_backward(grad_THK, q_THK, k_THK, v_THK, out_THK, lse_TH, cu_seqlens),
        None,
    )


_packed_attention_cpu.register_autograd(_backward, setup_context=_save_for_backward)


def _new_lse(q_THK: Tensor) -> Tensor:
    tokens, heads, _ = q_THK.shape
    return q_THK.new_empty((0 if q_THK.dtype in HALF_PRECISION else tokens, heads))
