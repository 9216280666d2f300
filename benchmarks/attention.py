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
    layout = {"token_budget": given.token_budget, "max_length": given.max_length}
    with workload_of(PROTEINS, {}, **layout) as workload:
        batches = workload.batches(BATCHES)
    bounds = [batch.cu_seqlens.unique_consecutive().tolist() for batch in batches]

    def prepared(bounds: list[int], seed: int, segments: int) -> dict[str, Prepared]:
        inputs = random_inputs((bounds[-1], given.heads, given.head_size), seed, place, dtype)
        return implementations(bounds, inputs, segments, batches[0].max_seqlen)

    few = [bound for bound in bounds[0] if bound <= CHECKED]
    tolerance = LOW_PRECISION if dtype in HALF_PRECISION else EXACT
    error = largest_error(prepared(few, BATCHES, len(few)), few, tolerance)
    every = [prepared(bounds[i], i, batch.num_segments) for i, batch in enumerate(batches)]

    def turn(name: str, number: int) -> None:
        for step in range(number * given.steps, (number + 1) * given.steps):
            results(every[step % BATCHES][name])

    for number in range(BATCHES):
        for name in every[0]:
            turn(name, number)  # warms up
    works = {name: partial(turn, name) for name in every[0]}
    seconds = alternate(works, given.turns, cuda=place.type == "cuda")
    taken = (batches[step % BATCHES] for step in range(given.turns * given.steps))
    tokens = sum(sum(batch.sequence_lengths()) for batch in taken) / given.turns
    rows = [Row(name, tokens / median(times), rate_unit(place)) for name, times in seconds.items()]
    for name in [*seconds][1:]:
        rows.append(ratio_row(f"{name} ÷ {PACKED}", seconds[name], seconds[PACKED]))
    what = "largest error of outputs and gradients against fp64"
    return [*rows, Row(what, error, "relative", tolerance, at_most=True)]


def random_inputs(
    shape: tuple[int, int, int], seed: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Queries, keys, values and the output's gradient: [T, H, K]."""
    generator = torch.Generator(device).manual_seed(seed)
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
    """Every implementation with its inputs, by name; `PACKED` is the first."""
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
