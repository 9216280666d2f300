"""How fast attention over packed proteins is, forward and backward, against the usual ways.

One process holds all of them, as their tensors are small, and lets them take turns on the segments
of the loader's own batches. Nothing is timed before their outputs and gradients agree.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from d2plm.bench.arms import Timings
from d2plm.bench.measure import in_new_process, serve
from d2plm.bench.rows import Row, rate_unit, ratio_row
from d2plm.bench.workload import workload_of
from d2plm.core.errors import BenchError
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.model.attention import HALF_PRECISION, packed_attention
from d2plm.training.throughput import known_peak

MODULE = "d2plm.bench.attention"
PACKED = "packed"
TIGHT = "packed, without empty segments"
PADDED = "padded to the longest"
UNMASKED = "padded to the longest, padding attended to"
ALONE = "one call a sequence"
EXACT = 1e-4  # relative error of fp32 against fp64
LOW_PRECISION = 2e-2  # of bf16: 8 bits of mantissa
BATCHES = 4  # taken in turn, so that no length is special

# (queries, keys, values, gradient of the output), and what gives the output of the first three.
Prepared = tuple[list[Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]


def bench_attention(
    proteins: Path,
    *,
    heads: int = 3,
    head_size: int = 64,
    token_budget: int = 8192,
    max_length: int = 1024,
    device: str = "auto",
    precision: str = "auto",
    turns: int = 15,
    steps: int = 3,
    threads: int | None = None,
    pinned: bool = False,
    temporary_dir: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], list[Timings]]:
    """Measure a layer's attention, forward and backward, without its projections.

    Each way is given its inputs as its own kind of model would hold them. The ways: the model's
    packed operator; on CUDA the same without the empty segments that pin the shapes, and with the
    tightest bound on the lengths, as the kernel chooses its grid by both; one padded call, with a
    mask on a CPU and without on CUDA, where cuDNN's masked backward gives NaN at some lengths; and
    a call for each sequence.

    Args:
        proteins: FASTA of real proteins, for their lengths.
        heads, head_size: of the layer.
        token_budget: tokens of a step.
        turns, steps: of each way, and steps of a turn.
        threads: of the CPU; None leaves it to PyTorch.
        pinned: whether to stay on one CPU.
        report: called with one line per stage.

    Returns:
        The table, and each way's times.

    Raises:
        BenchError: the outputs or gradients differ.
    """
    place = torch.device(resolve_device(device))
    dtype = resolve_precision(precision, place)
    report(f"attention: {heads} heads of {head_size}, {token_budget:,} tokens, {dtype}")
    layout = {"token_budget": token_budget, "max_length": max_length}
    with workload_of(proteins, {}, **layout, temporary_dir=temporary_dir) as workload:
        batches = workload.batches(BATCHES)
    # Empty segments are left out here and put back there: a command line has room for so much.
    bounds = [batch.cu_seqlens.unique_consecutive().tolist() for batch in batches]
    lengths = [batch.sequence_lengths() for batch in batches]
    measured = in_new_process(
        MODULE,
        "attend",
        bounds=bounds,
        segments=batches[0].num_segments,
        max_seqlen=batches[0].max_seqlen,
        sizes=[heads, head_size],
        device=place.type,
        precision=str(dtype).removeprefix("torch."),
        turns=turns,
        steps=steps,
        threads=threads,
        pinned=pinned,
    ).result
    timings = [Timings(**timing) for timing in measured["timings"]]
    tolerance = LOW_PRECISION if dtype in HALF_PRECISION else EXACT
    rows = [
        _error_row(name, error, tolerance, str(dtype).removeprefix("torch."))
        for name, error in measured["errors"].items()
    ]
    taken = [lengths[step % BATCHES] for step in range(turns * steps)]
    tokens = sum(map(sum, taken)) / turns
    squares = sum(sum(length**2 for length in batch) for batch in taken) / turns
    flops = 12 * heads * head_size * squares
    return _speed_rows(timings, tokens, flops, place, dtype) + rows, timings


def _error_row(name: str, error: float, tolerance: float, precision: str) -> Row:
    row = Row(
        f"{name}, {precision} against fp64: output and gradients",
        error,
        "relative",
        tolerance,
        at_most=True,
    )
    if not row.met:
        raise BenchError(
            f"attention, {name}: outputs or gradients are {error:g} off those of fp64 (at most "
            f"{tolerance:g} is allowed); no times are given"
        )
    return row


def _speed_rows(
    timings: Sequence[Timings],
    tokens: float,
    flops: float,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Row]:
    rows = [Row(t.name, t.per_second(tokens), rate_unit(device)) for t in timings]
    rows += [Row(f"{t.name}: model FLOP/s", t.per_second(flops) / 1e12, "TFLOP/s") for t in timings]
    peak = known_peak(device, dtype)
    if peak is not None:
        share = 100 * timings[0].per_second(flops) / 1e12 / peak
        rows.append(Row(f"{PACKED}, of {peak:g} TFLOP/s (datasheet)", share, "%"))
    packed = timings[0].seconds
    return rows + [
        ratio_row(f"{other.name} ÷ {PACKED}", other.seconds, packed) for other in timings[1:]
    ]


def _work_attend(
    *,
    bounds: list[list[int]],
    segments: int,
    max_seqlen: int,
    sizes: list[int],
    device: str,
    precision: str,
    turns: int,
    steps: int,
    threads: int | None,
    pinned: bool,
) -> dict[str, Any]:
    if pinned and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if threads is not None:
        torch.set_num_threads(threads)
    dtype = getattr(torch, precision)
    prepared: dict[str, list[Prepared]] = {}
    for seed, batch in enumerate(bounds):
        packed = _random_inputs(batch[-1], sizes, seed, device, dtype)
        for name, one in _ways(batch, packed, segments, max_seqlen).items():
            prepared.setdefault(name, []).append(one)
    errors = _errors(prepared, bounds[0])
    timings = {name: Timings(name) for name in prepared}
    for of_batches in prepared.values():
        for one in of_batches:
            _results(one)
    for turn in range(turns):
        order = list(prepared) if turn % 2 == 0 else list(reversed(prepared))
        for name in order:
            chosen = [prepared[name][(turn * steps + i) % len(bounds)] for i in range(steps)]
            _time(timings[name], chosen, device)
    return {"timings": [asdict(timing) for timing in timings.values()], "errors": errors}


def _random_inputs(
    tokens: int, sizes: list[int], seed: int, device: str, dtype: torch.dtype
) -> list[Tensor]:
    """Queries, keys, values and the output's gradient: [T, H, K]."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (tokens, *sizes)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)]


def _errors(prepared: dict[str, list[Prepared]], bounds: list[int]) -> dict[str, float]:
    """The largest relative error of each way that computes the same, on the first batch."""
    packed, _ = prepared[PACKED][0]
    expected = _results(_one_by_one(bounds, [tensor.cpu().double() for tensor in packed]))
    return {
        name: max(
            _relative_error(_as_packed(name, tensor, bounds), true)
            for tensor, true in zip(_results(of_batches[0]), expected, strict=True)
        )
        for name, of_batches in prepared.items()
        if name != UNMASKED
    }


def _ways(
    bounds: list[int], packed: list[Tensor], segments: int, max_seqlen: int
) -> dict[str, Prepared]:
    device = packed[0].device
    tight = torch.tensor(bounds, dtype=torch.int32, device=device)
    cu_seqlens = F.pad(tight, (0, segments + 1 - len(bounds)), value=bounds[-1])
    ways: dict[str, Prepared] = {
        PACKED: (packed, lambda q, k, v: packed_attention(q, k, v, cu_seqlens, max_seqlen))
    }
    if device.type == "cuda":
        longest = int(tight.diff().max())
        ways[TIGHT] = (packed, lambda q, k, v: packed_attention(q, k, v, tight, longest))
    ways |= _padded(bounds, packed)
    ways[ALONE] = _one_by_one(bounds, packed)
    return ways


def _padded(bounds: list[int], packed: list[Tensor]) -> dict[str, Prepared]:
    device, keep = packed[0].device, _is_token(bounds, packed[0].device)
    padded = []
    for tensor in packed:
        rows = tensor.new_zeros(*keep.shape, *tensor.shape[1:])
        rows[keep] = tensor
        padded.append(rows.transpose(1, 2))  # [B, H, L, K], a view as a model has it
    if device.type == "cuda":
        return {UNMASKED: (padded, F.scaled_dot_product_attention)}
    mask = keep[:, None, None, :]
    return {
        PADDED: (padded, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    }


def _one_by_one(bounds: list[int], packed: list[Tensor]) -> Prepared:
    def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> Tensor:
        outputs = []
        for start, stop in pairwise(bounds):
            q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (q_THK, k_THK, v_THK))
            outputs.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
        return torch.cat(outputs)

    return packed, attend


def _is_token(bounds: list[int], device: torch.device) -> Tensor:
    """bool [B, L]: the slots of a padded batch that hold a token."""
    lengths = torch.tensor(bounds, device=device).diff()
    return torch.arange(int(lengths.max()), device=device) < lengths[:, None]


def _results(prepared: Prepared) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    (q, k, v, grad), way = prepared
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    out = way(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def _as_packed(name: str, tensor: Tensor, bounds: list[int]) -> Tensor:
    if name != PADDED:
        return tensor
    return tensor.transpose(1, 2)[_is_token(bounds, tensor.device)]


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().double() - expected).norm() / expected.norm())


def _time(timings: Timings, chosen: Sequence[Prepared], device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
    cpu, wall = time.process_time(), time.perf_counter()
    for prepared in chosen:
        _results(prepared)
    if device == "cuda":
        events[1].record()
        events[1].synchronize()
        timings.cuda.append(events[0].elapsed_time(events[1]) / 1e3)
    timings.cpu.append(time.process_time() - cpu)
    timings.wall.append(time.perf_counter() - wall)


if __name__ == "__main__":
    serve({"attend": _work_attend})
