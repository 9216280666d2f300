"""prefetch: copies the next global batch to the device while the current one computes.

On CUDA the copy runs on a side stream of the main process (a stream in a forked loader worker would
crash) and the compute stream waits for it; elsewhere batches pass through untouched. A batch is
only some hundred kilobytes: the gain is that a step never waits for the host, not bandwidth.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from d2plm.core.spans import span
from d2plm.data.loader import GlobalBatch


def prefetch(
    stream: Iterable[GlobalBatch], device: torch.device, *, enabled: bool = True
) -> Iterator[GlobalBatch]:
    """The global batches of `stream` on `device`, in order; on CUDA copied one ahead."""
    if device.type == "cpu":
        yield from stream
    elif device.type == "cuda" and enabled:
        yield from _side_stream(stream, device)
    else:
        for batch in stream:
            yield _copy(batch, device)


def _copy(batch: GlobalBatch, device: torch.device) -> GlobalBatch:
    return replace(batch, micro_batches=[packed.to(device) for packed in batch.micro_batches])


def _side_stream(stream: Iterable[GlobalBatch], device: torch.device) -> Iterator[GlobalBatch]:
    copies = torch.cuda.Stream(device)
    pending: GlobalBatch | None = None
    for batch in stream:
        with span("copy"), torch.cuda.stream(copies):
            following = _copy(batch, device)
        if pending is not None:
            yield pending
        compute = torch.cuda.current_stream(device)
        compute.wait_stream(copies)
        for packed in following.micro_batches:
            packed.record_stream(compute)
        pending = following
    if pending is not None:
        yield pending


def read_ahead(stream: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
    """The batches of `stream`, each made by a thread while the previous one is in use."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, stream, None)
        while (batch := following.result()) is not None:
            following = thread.submit(next, stream, None)
            yield batch
