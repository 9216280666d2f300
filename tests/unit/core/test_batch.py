"""PackedBatch: layout, fixed shapes, and rejected input."""

import math
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2plm.core.batch import PackedBatch, segment_sum
from d2plm.core.errors import DataError
from d2plm.core.vocabulary import PAD, encode

ROW = st.lists(st.integers(0, 32), min_size=1, max_size=12)
ROWS = st.lists(ROW.map(lambda row: np.array(row, dtype=np.uint8)), max_size=6)


@given(rows=ROWS, padding=st.integers(0, 20), empty=st.integers(0, 5))
def test_packing_lays_end_to_end_and_pads(rows: list[np.ndarray], padding: int, empty: int) -> None:
    used = sum(len(row) for row in rows)
    segments = len(rows) + (padding > 0) + empty
    batch = PackedBatch.pack(rows, token_budget=used + padding, max_segments=segments)
    flat = [token for row in rows for token in row.tolist()]
    assert batch.tokens.tolist() == flat + [PAD] * padding
    bounds = batch.cu_seqlens.tolist()
    assert len(bounds) == segments + 1 == batch.num_segments + 1
    assert bounds[0] == 0 and bounds[-1] == used + padding == batch.num_tokens
    assert bounds == sorted(bounds)
    split = batch.split()
    assert [part.tolist() for part in split] == [row.tolist() for row in rows]
    assert int(batch.real().sum()) == len(rows)
    assert batch.draw_ids.tolist() == [*range(len(rows)), *[-1] * (segments - len(rows))]
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert batch.max_seqlen >= max(lengths, default=0)
    assert batch.sequence_lengths() == [len(row) for row in rows]
    assert batch.segment_ids().tolist() == [s for s, n in enumerate(lengths) for _ in range(n)]
    assert batch.positions().tolist() == [i for n in lengths for i in range(n)]
    torch.testing.assert_close(vars(batch.to("cpu")), vars(batch), rtol=0, atol=0)
    assert (batch.tokens.dtype, batch.cu_seqlens.dtype) == (torch.uint8, torch.int32)
    assert batch.sequence_ids.dtype == batch.draw_ids.dtype == torch.int64


@given(rows=ROWS, padding=st.integers(0, 40), longest=st.integers(1, 9))
def test_segments_of_the_tail_are_short(rows: list[np.ndarray], padding: int, longest: int) -> None:
    longest = max([longest, *map(len, rows)])
    used, pieces = sum(map(len, rows)), math.ceil(padding / longest)
    shape = {"token_budget": used + padding, "max_seqlen": longest}
    batch = PackedBatch.pack(rows, max_segments=len(rows) + pieces, **shape)
    lengths = batch.cu_seqlens.diff().tolist()
    assert lengths[: len(rows)] == [len(row) for row in rows]
    assert sum(lengths[len(rows) :]) == padding
    assert all(1 <= length <= longest for length in lengths[len(rows) :])
    assert batch.sequence_ids.tolist()[len(rows) :] == [-1] * pieces
    if pieces:
        with pytest.raises(DataError, match="do not fit"):
            PackedBatch.pack(rows, max_segments=len(rows) + pieces - 1, **shape)


def test_ids_and_limits_are_kept_as_given() -> None:
    rows = [encode("MK"), encode("ACD")]
    limits = {"token_budget": 6, "max_segments": 4, "max_seqlen": 6}
    ids = {"sequence_ids": [40, 7], "draw_ids": [5, 6], "global_sequences": 9}
    batch = PackedBatch.pack(rows, **ids, **limits)
    assert batch.sequence_ids.tolist() == [40, 7, -1, -1]
    assert batch.draw_ids.tolist() == [5, 6, -1, -1]
    assert (batch.global_sequences, batch.max_seqlen) == (9, 6)
    bare = PackedBatch.pack(rows)
    assert (bare.num_tokens, bare.num_segments, bare.max_seqlen) == (5, 2, 3)
    assert bare.global_sequences == 2
    for wrong in ({"token_budget": 4}, {"max_segments": 1}, {"max_segments": 2}, {"max_seqlen": 2}):
        with pytest.raises(DataError):
            PackedBatch.pack(rows, **{**limits, **wrong})


@pytest.mark.parametrize(
    ("lengths", "pins"), [([3, 4], {}), ([3, 2], {"max_segments": 2}), ([6], {"max_segments": 0})]
)
def test_a_row_of_other_lengths_is_rejected(lengths: list[int], pins: dict[str, int]) -> None:
    with pytest.raises(DataError):
        PackedBatch.of_row(np.zeros(6, dtype=np.uint8), np.array(lengths), **pins)


def test_a_batch_goes_to_another_process_whole_and_without_shared_memory() -> None:
    batch = PackedBatch.pack([encode("MKV"), encode("AC")], token_budget=9, global_sequences=7)
    sent = bytes(ForkingPickler.dumps(batch))  # torch registers its shared memory with this one
    assert batch.tokens.numpy().tobytes() in sent
    assert b"rebuild_storage" not in sent
    received = pickle.loads(sent)
    torch.testing.assert_close(vars(received), vars(batch), rtol=0, atol=0)
    received.tokens[0] = PAD  # its memory is its own, and may be written


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-100, 100)), max_size=30))
def test_segment_sum_adds_by_segment(pairs: list[tuple[int, int]]) -> None:
    segments = torch.tensor([s for s, _ in pairs], dtype=torch.long)
    values = torch.tensor([v for _, v in pairs], dtype=torch.float64)
    expected = [sum(v for s, v in pairs if s == segment) for segment in range(5)]
    assert segment_sum(values, segments, 5).tolist() == expected
