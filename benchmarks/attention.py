"""Attention over packed proteins, forward and backward, against the usual implementations.

All of them take turns in one process, on the segments of one of the loader's batches, without the
projections. Each gets its inputs in the layout of its own kind of model. Nothing is timed before
outputs and gradients agree with fp64.

    python -m benchmarks.attention --threads 1
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import (
    PROTEINS,
    BenchError,
    Row,
    alternate,
    publish,
    rate_unit,
    ratio_row,
    training_parser,
)
from benchmarks.workload import workload_of
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.model.attention import packed_attention

PACKED = "packed"
PADDED = "padded to the longest"
UNMASKED = "padded to the longest, padding attended to"
ALONE = "one call per sequence"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative, against fp64

# (queries, keys, values, gradient of the output), and the function of the first three.
Prepared = tuple[list[Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]


def bench_attention(given: argparse.Namespace) -> list[Row]:
    """Measure one layer's attention, forward and backward.

    The implementations: the model's packed operator; one padded call, with a mask on a CPU and
    without on CUDA, where cuDNN's masked backward returns NaN at some lengths; and one call per
    sequence.

    Raises:
        BenchError: outputs or gradients differ.
    """
    place = torch.device(resolve_device(given.device))
    dtype = resolve_precision(given.precision, place)
    layout = {"token_budget": given.token_budget, "max_length": given.max_length}
    with workload_of(PROTEINS, {}, **layout) as workload:
        (batch,) = workload.batches(1)
    bounds = batch.cu_seqlens.unique_consecutive().tolist()
    inputs = random_inputs(bounds[-1], given.heads, given.head_size, place, dtype)
    prepared = implementations(bounds, inputs, batch.num_segments, batch.max_seqlen)
    error = largest_error(prepared, bounds, TOLERANCE[dtype])

    def turn(name: str, _: int) -> None:
        for _ in range(given.steps):
            results(prepared[name])

    works = {name: partial(turn, name) for name in prepared}
    seconds = alternate(works, given.turns, cuda=place.type == "cuda")
    tokens, rows = bounds[-1] * given.steps, list[Row]()
    for name, times in seconds.items():
        rows.append(Row(name, tokens / median(times), rate_unit(place)))
        if name != PACKED:
            rows.append(ratio_row(f"{name} ÷ {PACKED}", times, seconds[PACKED]))
    what = "largest error of outputs and gradients against fp64"
    return [*rows, Row(what, error, "relative", TOLERANCE[dtype], at_most=True)]


def random_inputs(
    tokens: int, heads: int, size: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Queries, keys, values and the output's gradient: [T, H, K]."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (tokens, heads, size)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)]


def largest_error(prepared: dict[str, Prepared], bounds: list[int], tolerance: float) -> float:
    """The largest relative error of outputs and gradients against fp64.

    Raises:
        BenchError: if it is not within the tolerance.
    """
    packed = [tensor.cpu().double() for tensor in prepared[PACKED][0]]
    expected = results(implementations(bounds, packed, len(bounds), bounds[-1])[ALONE])
    largest = 0.0
    for name in prepared.keys() - {UNMASKED}:
        for found, true in zip(results(prepared[name]), expected, strict=True):
            flat = as_packed(name, found, bounds).cpu().double()
            error = float((flat - true).norm() / true.norm())
            if not error <= tolerance:
                raise BenchError(
                    f"attention, {name}: outputs or gradients differ from fp64 by {error:g} "
                    f"(allowed: {tolerance:g}); no times are reported"
                )
            largest = max(largest, error)
    return largest


def implementations(
    bounds: list[int], packed: list[Tensor], segments: int, max_seqlen: int
) -> dict[str, Prepared]:
    """Every implementation with its inputs, by name."""
    tight = torch.tensor(bounds, dtype=torch.int32, device=packed[0].device)
    cu_seqlens = F.pad(tight, (0, segments + 1 - len(bounds)), value=bounds[-1])
    keep, cuda = _is_token(tight), tight.is_cuda
    rows = [tensor.new_zeros(*keep.shape, *tensor.shape[1:]) for tensor in packed]
    # [B, H, L, K], views as a model has them.
    padded = [b.index_put((keep,), a).transpose(1, 2) for a, b in zip(packed, rows, strict=True)]
    mask = None if cuda else keep[:, None, None]

    def one_by_one(*qkv_THK: Tensor) -> Tensor:
        outputs = []
        # cuDNN, the first choice on Hopper, compiles a graph for every length.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if cuda else nullcontext():
            for start, stop in pairwise(bounds):
                q, k, v = (x[start:stop].transpose(0, 1)[None] for x in qkv_THK)
                outputs.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
        return torch.cat(outputs)

    in_one = partial(F.scaled_dot_product_attention, attn_mask=mask)
    return {
        PACKED: (packed, lambda q, k, v: packed_attention(q, k, v, cu_seqlens, max_seqlen)),
        UNMASKED if cuda else PADDED: (padded, in_one),
        ALONE: (packed, one_by_one),
    }


def _is_token(bounds: Tensor) -> Tensor:
    """bool [B, L]: the slots of a padded batch that hold a token."""
    lengths = bounds.diff()
    return torch.arange(int(lengths.max()), device=bounds.device) < lengths[:, None]


def results(prepared: Prepared) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    (q, k, v, grad), attend = prepared
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def as_packed(name: str, tensor: Tensor, bounds: list[int]) -> Tensor:
    """An implementation's result in the packed layout [T, H, K]."""
    keep = _is_token(torch.tensor(bounds, device=tensor.device))
    return tensor.transpose(1, 2)[keep] if name == PADDED else tensor


if __name__ == "__main__":
    made = training_parser("attention", __doc__, turns=15, steps=3)
    made.add_argument("--heads", type=int, default=3, help="of the layer")
    made.add_argument("--head-size", type=int, default=64, help="channels of a head")
    given = made.parse_args()
    torch.set_num_threads(given.threads or torch.get_num_threads())
    publish(given, bench_attention(given))
