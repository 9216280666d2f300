"""The device's practical peak: the matrix products of a training step, and copies.

No kernel reaches a datasheet's peak. A step's rate relative to the rates measured here shows how
much of the rest the model itself causes. Data are random, because products of zeros run faster.

    python -m benchmarks.ceiling --model 450m --tokens 65536
"""

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks.measure import Row, parser, publish
from benchmarks.workload import model_settings
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.model.dit_config import DiTConfig
from d2plm.training.throughput import known_peak

SECONDS = 0.2  # spent on each measurement


def seconds_of(statement: str, *tensors: Tensor) -> float:
    """Median time of a statement about tensors `a` and `b`."""
    named = dict(zip("ab", tensors, strict=True))
    timer = Timer(statement, "import torch", globals=named, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=SECONDS).median)


def bench_ceiling(config: DiTConfig, tokens: int, side: int, copied: int, device: str) -> list[Row]:
    """Rates of matrix products and copies.

    For each matrix of a block, the product of the forward and the two of the backward are measured;
    the large square product stands for the peak.

    Args:
        side: of the square matrices.
        copied: bytes.
    """
    place = torch.device(resolve_device(device))
    dtype = resolve_precision("auto", place)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=place, dtype=dtype)

    def rate(left: Tensor, right: Tensor) -> float:
        flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return flops / seconds_of("torch.mm(a, b)", left, right) / 1e12

    width, inner = config.hidden_size, config.intermediate_size
    up = 2 * inner if config.feed_forward == "swiglu" else inner
    matrices = {
        "queries, keys and values": (width, 3 * width),
        "attention's output": (width, width),
        "feed-forward up": (width, up),
        "feed-forward down": (inner, width),
    }
    largest = rate(random(side, side), random(side, side))
    rows = [Row(f"matrix product of {side:,}³", largest, "TFLOP/s")]
    peak = known_peak(place, dtype)
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
            rows.append(Row(f"{name}, {part}", found, "TFLOP/s"))
            flops += 2 * tokens * inputs * outputs
            took += 2 * tokens * inputs * outputs / found
    rows.append(Row(f"all products of a block, {tokens:,} tokens", flops / took, "TFLOP/s"))
    source = torch.randint(256, (copied,), device=place, dtype=torch.uint8)
    copy = seconds_of("a.copy_(b)", torch.empty_like(source), source)
    rows.append(Row("copy, bytes read and written", 2 * copied / copy / 1e12, "TB/s"))
    return rows


def main() -> None:
    """The command line."""
    made = parser("ceiling", __doc__)
    made.add_argument("--model", default="450m", help="a file of configs/model")
    made.add_argument("--tokens", type=int, default=65_536, help="of a micro-batch")
    made.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    made.add_argument("--side", type=int, default=8192, help="of the square matrices")
    made.add_argument("--copied", type=int, default=1 << 32, help="bytes")
    given = made.parse_args()
    config = DiTConfig(**model_settings(given.model))
    publish(given, bench_ceiling(config, given.tokens, given.side, given.copied, given.device))


if __name__ == "__main__":
    main()
