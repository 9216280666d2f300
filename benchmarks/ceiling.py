"""The device's practical peak: the matrix products of a training step, and copies.

No kernel reaches a datasheet's peak. A step's rate relative to the rates measured here shows how
much of the rest the model itself causes. Data are random, because products of zeros run faster.

    python -m benchmarks.ceiling --model 450m --tokens 65536
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks.measure import Row, parser, publish
from benchmarks.workload import model_settings
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.model.dit_config import DiTConfig
from d2plm.training.throughput import known_peak

SECONDS = 0.2  # spent on each measurement


def bench_ceiling(given: argparse.Namespace) -> list[Row]:
    """Rates of matrix products and copies.

    For each matrix of a block, the product of the forward and the two of the backward are measured;
    the large square product stands for the peak.
    """
    config, tokens, square = DiTConfig(**model_settings(given.model)), given.tokens, given.square
    device = torch.device(resolve_device(given.device))
    dtype = resolve_precision("auto", device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def seconds_of(work: Callable[[], object]) -> float:
        timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=SECONDS).median)

    def rate(left: Tensor, right: Tensor) -> float:
        took = seconds_of(lambda: torch.mm(left, right))
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
    for name, (inputs, outputs) in matrices.items():
        x, weight, grad = random(tokens, inputs), random(outputs, inputs), random(tokens, outputs)
        products = {
            "forward": (x, weight.t()),
            "backward, input": (grad, weight),
            "backward, weight": (grad.t(), x),
        }
        for part, (left, right) in products.items():
            found = rate(left, right)
            shape = f"{left.shape[0]} × {left.shape[1]} × {right.shape[1]}"
            rows.append(Row(f"{name}, {part}: {shape}", found, "TFLOP/s"))
            flops += 2 * tokens * inputs * outputs
            took += 2 * tokens * inputs * outputs / found
    rows.append(Row(f"all products of a block, {tokens:,} tokens", flops / took, "TFLOP/s"))
    source = torch.randint(256, (given.copied_bytes,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source))
    rows.append(Row("copy, bytes read and written", 2 * given.copied_bytes / copy / 1e12, "TB/s"))
    return rows


def main() -> None:
    """The command line."""
    made = parser("ceiling", __doc__)
    made.add_argument("--model", default="450m", help="a file of configs/model")
    made.add_argument("--tokens", type=int, default=65_536, help="of a micro-batch")
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    made.add_argument("--square", type=int, default=8192, help="side of the largest product")
    made.add_argument("--copied-bytes", type=int, default=1 << 32)
    given = made.parse_args()
    publish(given, bench_ceiling(given))


if __name__ == "__main__":
    main()
