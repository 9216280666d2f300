"""Named spans of a step for profilers: torch's, and NVTX on CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def span(name: str) -> Iterator[None]:
    """Name the block in a profiler's trace."""
    nvtx = torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
