"""Sums of the rows of each segment of a packed row, on CUDA.

Reads each value once, in its own precision; `torch.segment_reduce` needs an fp32 copy and takes
several times as long.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 32, 128  # size of a program's tile


def segment_sums(values_TD: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum rows [T, D] (any strides) of segments, int32 [S + 1] → [S, D], accumulated in fp32."""
    segments, width = cu_seqlens.shape[0] - 1, values_TD.shape[1]
    sums_SD = torch.empty(segments, width, dtype=values_TD.dtype, device=values_TD.device)
    grid = (segments, triton.cdiv(width, COLUMNS))
    _add_rows[grid](values_TD, cu_seqlens, sums_SD, width, *values_TD.stride(), ROWS, COLUMNS)
    return sums_SD


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _add_rows(  # type: ignore[no-untyped-def]
    values,
    bounds,
    sums,
    width,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    segment = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start, stop = tl.load(bounds + segment), tl.load(bounds + segment + 1)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(start, stop, ROWS):
        rows = first + tl.arange(0, ROWS)
        places = rows.to(tl.int64)[:, None] * row_stride + columns[None, :] * column_stride
        inside = (rows < stop)[:, None] & (columns < width)[None, :]
        total += tl.load(values + places, mask=inside, other=0.0).to(tl.float32)
    result = tl.sum(total, axis=0).to(sums.dtype.element_ty)
    tl.store(sums + segment * width + columns, result, mask=columns < width)
