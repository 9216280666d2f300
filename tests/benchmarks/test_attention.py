"""The attention benchmark: its implementations agree, and one that differs is rejected."""

from itertools import pairwise

import pytest
import torch

from benchmarks import attention
from benchmarks.attention import PACKED, PADDED, TOLERANCE
from benchmarks.measure import BenchError

BOUNDS = [0, 3, 4, 11, 16]
EXACT = TOLERANCE[torch.float32]


@pytest.fixture
def prepared() -> dict[str, attention.Prepared]:
    packed = attention.random_inputs(BOUNDS[-1], 2, 4, torch.device("cpu"), torch.float32)
    return attention.implementations(BOUNDS, packed, segments=7, max_seqlen=16)


def test_every_implementation_returns_a_softmax_written_out(
    prepared: dict[str, attention.Prepared],
) -> None:
    (q, k, v, _), _ = prepared[PACKED]
    expected = []
    for a, b in pairwise(BOUNDS):
        scores = torch.einsum("ihd,jhd->hij", q[a:b], k[a:b]) / 4**0.5
        expected.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[a:b]))
    for name, way in prepared.items():
        out = attention.as_packed(name, attention.results(way)[0], BOUNDS)
        torch.testing.assert_close(out, torch.cat(expected), msg=name)


def test_an_implementation_with_a_wrong_gradient_is_rejected(
    prepared: dict[str, attention.Prepared],
) -> None:
    assert 0 < attention.largest_error(prepared, BOUNDS, EXACT) < EXACT
    given, attend = prepared[PADDED]
    # The same output, and no gradient for the keys.
    prepared[PADDED] = given, lambda q, k, v: attend(q, k.detach() + 0 * k, v)
    with pytest.raises(BenchError, match="no times are reported"):
        attention.largest_error(prepared, BOUNDS, EXACT)
