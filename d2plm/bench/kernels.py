"""Where a GPU's time goes: a profiler's trace, summed over kinds of kernels."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from d2plm.core.errors import BenchError

# Kinds of kernels by their names; the first that is found in the name applies.
KINDS = (
    ("fused by the compiler", re.compile(r"^triton_(?!tem)")),  # tem: a matrix product's template
    ("attention", re.compile(r"flash|fmha|attention|attn", re.IGNORECASE)),
    (
        "matrix products",
        re.compile(r"gemm|nvjet|triton_tem|cutlass|xmma|splitk|cublas", re.IGNORECASE),
    ),
    ("optimizer, clipping and EMA", re.compile(r"adam|multi_tensor|foreach", re.IGNORECASE)),
    ("segment sums", re.compile(r"segment_reduce|segmented", re.IGNORECASE)),
    ("copies", re.compile(r"memcpy|memset|direct_copy", re.IGNORECASE)),
)
OTHER = "other kernels"
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LISTED = 25  # kernels by name


def profile_steps(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """What the GPU does in so many calls of `step`, as `kernel_shares` gives it.

    Raises:
        BenchError: if the profiler sees no kernel.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="d2plm-profile-") as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return {"steps": steps, **kernel_shares(events)}


def kernel_shares(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the kernels of a Chrome trace (times in µs).

    Returns:
        `span_seconds` from the first kernel's start to the last one's end; `busy_share` of it in
        which any kernel ran; `kinds`, {kind: share of the span}, which add up to the busy share
        where kernels do not overlap; `kernels`, the longest by name, with their share and number.

    Raises:
        BenchError: if there is no kernel among the events.
    """
    kernels = [event for event in events if event.get("cat") in DEVICE_CATEGORIES]
    if not kernels:
        raise BenchError(
            "the profiler saw no kernel: this machine may not let it (CUPTI), or nothing ran on "
            "the GPU"
        )
    spans = sorted((float(event["ts"]), float(event["dur"])) for event in kernels)
    first, busy, until = spans[0][0], 0.0, spans[0][0]
    for start, duration in spans:
        busy += max(start + duration - max(start, until), 0)
        until = max(until, start + duration)
    whole = max(until - first, 1e-9)
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in kernels:
        kinds[kind_of(event["name"])] += float(event["dur"]) / whole
        names[event["name"]][0] += float(event["dur"]) / whole
        names[event["name"]][1] += 1
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:LISTED]
    return {
        "span_seconds": whole / 1e6,
        "busy_share": busy / whole,
        "idle_share": 1 - busy / whole,
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "kernels": [
            {"name": name[:160], "share": share, "calls": int(calls)}
            for name, (share, calls) in longest
        ],
    }


def kind_of(kernel: str) -> str:
    """The kind of a kernel of this name."""
    return next((kind for kind, pattern in KINDS if pattern.search(kernel)), OTHER)
