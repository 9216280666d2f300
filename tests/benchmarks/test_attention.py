"""The attention benchmark: its implementations agree, and one that differs is rejected."""

from itertools import pairwise

import pytest
import torch

from benchmarks import attention
from benchmarks.attention import PACKED, PADDED
from benchmarks.measure import BenchError

CPU = torch.device("cpu")
BOUNDS = [0, 3, 4, 11, 16]


def prepared(dtype: torch.dtype) -> dict[str, attention.Prepared]:
    packed = attention.random_inputs(BOUNDS[-1], (2, 4), 0, CPU, dtype)
    return attention.implementations(BOUNDS, packed, segments=7, max_seqlen=16)


def test_every_implementation_returns_a_softmax_written_out() -> None:
    ways = prepared(torch.float32)
    (q, k, v, _), _ = ways[PACKED]
    expected = []
    for a, b in pairwise(BOUNDS):
        scores = torch.einsum("ihd,jhd->hij", q[a:b], k[a:b]) / 4**0.5
        expected.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[a:b]))
    for name, way in ways.items():
        out = attention.as_packed(name, attention.results(way)[0], BOUNDS)
        torch.testing.assert_close(out, torch.cat(expected), msg=name)


def test_an_implementation_with_a_wrong_gradient_is_rejected() -> None:
    named = prepared(torch.float32)
    given, attend = named[PADDED]
    # The same output, and no gradient for the keys.
    named[PADDED] = given, lambda q, k, v: attend(q, k.detach() + 0 * k, v)
    errors = attention.errors(named, BOUNDS)
    assert errors[PACKED] < attention.EXACT
    for error in (errors[PADDED], float("nan")):
        with pytest.raises(BenchError, match="no times are reported"):
            attention.error_rows({PADDED: error}, attention.EXACT)
    assert attention.error_rows({PACKED: errors[PACKED]}, attention.EXACT)[0].met
