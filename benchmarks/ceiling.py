"""The device's practical peak: the matrix products of a training step, and copies.

No kernel reaches a datasheet's peak. A step's rate relative to the rates measured here shows how
much of the rest the model itself causes. Data are random, because products of zeros run faster.

    python -m benchmarks.ceiling --model 450m --tokens 65536
"""

import argparse

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks.measure import Row, parser, publish
from benchmarks.workload import model_settings
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.model.dit_config import DiTConfig

SECONDS = 0.2  # spent on each measurement
SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices whose product stands for the peak
COPIED = {"cpu": 1 << 26, "cuda": 1 << 32}  # bytes


def seconds_of(statement: str, a: Tensor, b: Tensor) -> float:
    """Median time of a statement about two tensors."""
    names = {"torch": torch, "a": a, "b": b}
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=SECONDS).median)


def bench_ceiling(given: argparse.Namespace) -> list[Row]:
    """Rates of a square product, of all products of a block and its backward, and of a copy."""
    config, tokens = DiTConfig(**model_settings(given.model)), given.tokens
    device = torch.device(resolve_device(given.device))
    dtype, side = resolve_precision("auto", device), SIDE[device.type]

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, dtype=dtype)

    took = seconds_of("torch.mm(a, b)", random(side, side), random(side, side))
    rows = [Row(f"a matrix product of {side:,}³", 2 * side**3 / took / 1e12, "TFLOP/s")]
    width, inner = config.hidden_size, config.intermediate_size
    up = 2 * inner if config.feed_forward == "swiglu" else inner
    flops = took = 0.0
    for inputs, outputs in ((width, 3 * width), (width, width), (width, up), (inner, width)):
        x, weight, grad = random(tokens, inputs), random(outputs, inputs), random(tokens, outputs)
        for left, right in ((x, weight.t()), (grad, weight), (grad.t(), x)):
            took += seconds_of("torch.mm(a, b)", left, right)
            flops += 2 * tokens * inputs * outputs
    what = f"all products of a block, {tokens:,} tokens"
    rows.append(Row(what, flops / took / 1e12, "TFLOP/s"))
    source = torch.randint(256, (COPIED[device.type],), device=device, dtype=torch.uint8)
    copy = seconds_of("a.copy_(b)", torch.empty_like(source), source)
    rows.append(Row("a copy, bytes read and written", 2 * len(source) / copy / 1e12, "TB/s"))
    return rows


def main() -> None:
    """The command line."""
    made = parser("ceiling", __doc__)
    made.add_argument("--model", default="450m", help="a file of configs/model")
    made.add_argument("--tokens", type=int, default=65_536, help="of a micro-batch")
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    given = made.parse_args()
    publish(given, bench_ceiling(given))


if __name__ == "__main__":
    main()
