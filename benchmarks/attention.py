"""Attention over packed proteins, forward and backward, against the usual implementations.

All of them take turns in one process, on the segments of the loader's own batches, without the
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
from d2plm.model.attention import HALF_PRECISION, packed_attention
from d2plm.training.throughput import known_peak

PACKED = "packed"
PADDED = "padded to the longest"
UNMASKED = "padded to the longest, padding attended to"
ALONE = "one call per sequence"
EXACT = 1e-4  # relative error of fp32 against fp64
LOW_PRECISION = 2e-2  # of bf16: 8 bits of mantissa
CHECKED = 4096  # tokens that are compared with fp64
BATCHES = 4  # used in turn, so that no length is special

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
    heads, size = given.heads, given.head_size
    layout = {"token_budget": given.token_budget, "max_length": given.max_length}
    with workload_of(PROTEINS, {}, **layout) as workload:
        batches = workload.batches(BATCHES)
    bounds = [batch.cu_seqlens.unique_consecutive().tolist() for batch in batches]

    def prepared(bounds: list[int], seed: int, segments: int) -> dict[str, Prepared]:
        inputs = random_inputs(bounds[-1], (heads, size), seed, place, dtype)
        return implementations(bounds, inputs, segments, batches[0].max_seqlen)

    few = [bound for bound in bounds[0] if bound <= CHECKED]
    found = errors(prepared(few, BATCHES, len(few)), few)
    exact = error_rows(found, LOW_PRECISION if dtype in HALF_PRECISION else EXACT)
    every = [prepared(bounds[i], i, batch.num_segments) for i, batch in enumerate(batches)]
    for name in every[0]:
        for of_batch in every:
            results(of_batch[name])  # warms up

    def turn(name: str, number: int) -> None:
        for step in range(number * given.steps, (number + 1) * given.steps):
            results(every[step % BATCHES][name])

    works = {name: partial(turn, name) for name in every[0]}
    seconds = alternate(works, given.turns, cuda=place.type == "cuda")
    taken = [batches[step % BATCHES] for step in range(given.turns * given.steps)]
    lengths = [length for batch in taken for length in batch.sequence_lengths()]
    squares = sum(length**2 for length in lengths) / given.turns
    teraflops, rows = 12 * heads * size * squares / 1e12, list[Row]()
    for name, times in seconds.items():
        time = median(times)
        rows.append(Row(name, sum(lengths) / given.turns / time, rate_unit(place)))
        rows.append(Row(f"{name}: model FLOP/s", teraflops / time, "TFLOP/s"))
        if (peak := known_peak(place, dtype)) is not None:
            fraction = 100 * teraflops / time / peak
            rows.append(Row(f"{name}, of {peak:g} TFLOP/s (datasheet)", fraction, "%"))
        if name != PACKED:
            rows.append(ratio_row(f"{name} ÷ {PACKED}", times, seconds[PACKED]))
    return rows + exact


def error_rows(found: dict[str, float], tolerance: float) -> list[Row]:
    """Errors against fp64 as rows.

    Raises:
        BenchError: if one is not within the tolerance.
    """
    rows = []
    for name, error in found.items():
        what = f"{name}: output and gradients against fp64"
        rows.append(Row(what, error, "relative", tolerance, at_most=True))
        if not rows[-1].met:
            raise BenchError(
                f"attention, {name}: outputs or gradients differ from fp64 by {error:g} (allowed: "
                f"{tolerance:g}); no times are reported"
            )
    return rows


def random_inputs(
    tokens: int, sizes: tuple[int, int], seed: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Queries, keys, values and the output's gradient: [T, H, K]."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (tokens, *sizes)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)]


def errors(prepared: dict[str, Prepared], bounds: list[int]) -> dict[str, float]:
    """The largest relative error of each exact implementation."""
    packed, _ = prepared[PACKED]
    expected = results(_one_by_one(bounds, [tensor.cpu().double() for tensor in packed]))
    found = {}
    for name, one in prepared.items():
        if name != UNMASKED:
            tensors = [as_packed(name, tensor, bounds) for tensor in results(one)]
            found[name] = max(
                float((tensor.cpu().double() - true).norm() / true.norm())
                for tensor, true in zip(tensors, expected, strict=True)
            )
    return found


def implementations(
    bounds: list[int], packed: list[Tensor], segments: int, max_seqlen: int
) -> dict[str, Prepared]:
    """Every implementation with its inputs, by name; `PACKED` is the first."""
    tight = torch.tensor(bounds, dtype=torch.int32, device=packed[0].device)
    cu_seqlens = F.pad(tight, (0, segments + 1 - len(bounds)), value=bounds[-1])
    return {
        PACKED: (packed, lambda q, k, v: packed_attention(q, k, v, cu_seqlens, max_seqlen)),
        **_padded(bounds, packed),
        ALONE: _one_by_one(bounds, packed),
    }


def _padded(bounds: list[int], packed: list[Tensor]) -> dict[str, Prepared]:
    keep = _is_token(bounds, packed[0].device)
    padded = []
    for tensor in packed:
        rows = tensor.new_zeros(*keep.shape, *tensor.shape[1:])
        rows[keep] = tensor
        padded.append(rows.transpose(1, 2))  # [B, H, L, K], a view as a model has it
    if keep.device.type == "cuda":
        return {UNMASKED: (padded, F.scaled_dot_product_attention)}
    masked = partial(F.scaled_dot_product_attention, attn_mask=keep[:, None, None, :])
    return {PADDED: (padded, masked)}


def _one_by_one(bounds: list[int], packed: list[Tensor]) -> Prepared:
    # cuDNN, the first choice on Hopper, compiles a graph for every length.
    on_cuda = packed[0].device.type == "cuda"

    def attend(*qkv_THK: Tensor) -> Tensor:
        outputs = []
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if on_cuda else nullcontext():
            for start, stop in pairwise(bounds):
                q, k, v = (x[start:stop].transpose(0, 1)[None] for x in qkv_THK)
                outputs.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
        return torch.cat(outputs)

    return packed, attend


def _is_token(bounds: list[int], device: torch.device) -> Tensor:
    """bool [B, L]: the slots of a padded batch that hold a token."""
    lengths = torch.tensor(bounds, device=device).diff()
    return torch.arange(int(lengths.max()), device=device) < lengths[:, None]


def results(prepared: Prepared) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    (q, k, v, grad), attend = prepared
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def as_packed(name: str, tensor: Tensor, bounds: list[int]) -> Tensor:
    """An implementation's result in the packed layout [T, H, K]."""
    if name != PADDED:
        return tensor
    return tensor.transpose(1, 2)[_is_token(bounds, tensor.device)]


def main() -> None:
    """The command line."""
    made = training_parser("attention", __doc__, turns=15, steps=3)
    made.add_argument("--heads", type=int, default=3, help="of the layer")
    made.add_argument("--head-size", type=int, default=64, help="channels of a head")
    given = made.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    publish(given, bench_attention(given))


if __name__ == "__main__":
    main()
