"""What the device can do at most: matrix products of all kinds that a step needs, and copies.

A datasheet's peak is not reached by any kernel; a step's share of what is measured here says how
much of the rest is the model's own doing. Data are random, as zeros run faster.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from d2plm.bench.rows import Row
from d2plm.model.config import DiTConfig
from d2plm.training.throughput import known_peak

GROUPS = 5  # timings of each, of which the median counts


def bench_ceiling(
    config: DiTConfig,
    *,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    square: int = 8192,
    copied_bytes: int = 1 << 32,
    seconds: float = 0.2,
) -> list[Row]:
    """Rates of matrix products and copies.

    Args:
        config: the model whose shapes are measured: of each matrix of a block the product of the
            forward and the two of the backward.
        tokens: of a micro-batch.
        square: side of the large product that stands for the ceiling.
        copied_bytes: of the largest tensor that is copied.
        seconds: that the `GROUPS` timings of one thing take, or so many calls if that is longer.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def rate(left: Tensor, right: Tensor) -> float:
        took = seconds_of(lambda: torch.mm(left, right), device, seconds)
        return 2 * left.shape[0] * left.shape[1] * right.shape[1] / took / 1e12

    width, inner = config.hidden_size, config.intermediate_size
    up = 2 * inner if config.feed_forward == "swiglu" else inner
    matrices = {
        "queries, keys and values": (width, 3 * width),
        "attention's output": (width, width),
        "feed-forward up": (width, up),
        "feed-forward down": (inner, width),
    }
    largest = rate(random(square, square), random(square, square))
    rows = [Row(f"matrix product of {square:,}³", largest, "TFLOP/s")]
    peak = known_peak(device, dtype)
    if peak is not None:
        rows.append(Row("the same, of the datasheet's", 100 * largest / peak, "%"))
    flops = took = 0.0
    for name, (given, made) in matrices.items():
        x, weight, grad = random(tokens, given), random(made, given), random(tokens, made)
        products = {
            "forward": (x, weight.t()),
            "backward, input": (grad, weight),
            "backward, weight": (grad.t(), x),
        }
        for part, (left, right) in products.items():
            found = rate(left, right)
            shape = f"{left.shape[0]} × {left.shape[1]} × {right.shape[1]}"
            rows.append(Row(f"{name}, {part}: {shape}", found, "TFLOP/s"))
            flops += 2 * tokens * given * made
            took += 2 * tokens * given * made / found
    rows.append(Row(f"all products of a block, {tokens:,} tokens", flops / took, "TFLOP/s"))
    source = torch.randint(256, (copied_bytes,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), device, seconds)
    rows.append(Row("copy, bytes read and written", 2 * copied_bytes / copy / 1e12, "TB/s"))
    return rows


def seconds_of(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of one call: the median of a few groups of calls that take `seconds` in all."""
    for _ in range(3):
        work()
    once = _timed(work, 1, device)
    calls = max(1, round(seconds / GROUPS / max(once, 1e-9)))
    return median(_timed(work, calls, device) / calls for _ in range(GROUPS))


def _timed(work: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return time.perf_counter() - start
    torch.cuda.synchronize(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(calls):
        work()
    events[1].record()
    events[1].synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3
