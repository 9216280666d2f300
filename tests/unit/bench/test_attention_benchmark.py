"""The attention benchmark: its ways compute the same, and one that does not is refused."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from d2plm.bench import attention
from d2plm.bench.attention import ALONE, PACKED, PADDED, bench_attention
from d2plm.bench.rows import Row
from d2plm.core.errors import BenchError
from tests.conftest import FASTA

FEW = FASTA.with_name("uniprot_500.fasta.gz")
BOUNDS = [0, 3, 4, 11, 16]


def prepared(dtype: torch.dtype) -> dict[str, attention.Prepared]:
    packed = attention._random_inputs(BOUNDS[-1], [2, 4], 0, "cpu", dtype)
    return attention._ways(BOUNDS, packed, segments=7, max_seqlen=16)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_way_is_measured_on_the_same_tokens(precision: str, tmp_path: Path) -> None:
    rows, timings = bench_attention(
        FEW,
        heads=2,
        head_size=8,
        token_budget=512,
        max_length=128,
        device="cpu",
        precision=precision,
        turns=2,
        steps=1,
        threads=1,
        temporary_dir=tmp_path,
    )
    assert [timing.name for timing in timings] == [PACKED, PADDED, ALONE]
    assert all(len(timing.cpu) == 2 and not timing.cuda for timing in timings)
    found = {row.what: row for row in rows}
    assert found[f"time of {PADDED} ÷ {PACKED}"].unit == "×"
    errors = [row for row in rows if row.unit == "relative"]
    assert len(errors) == 3
    assert all(row.met for row in errors)
    # The rates differ by the floating-point operations of a token alone.
    per_token = {
        name: found[f"{name}: model FLOP/s"].value * 1e12 / found[name].value
        for name in (PACKED, PADDED, ALONE)
    }
    assert per_token[PADDED] == pytest.approx(per_token[PACKED])
    assert not list(tmp_path.iterdir())


def test_the_ways_give_what_a_softmax_written_out_gives() -> None:
    ways = prepared(torch.float32)
    (q, k, v, grad), _ = ways[PACKED]
    expected = torch.cat(
        [
            torch.einsum(
                "hij,jhd->ihd",
                torch.softmax(torch.einsum("ihd,jhd->hij", q[a:b], k[a:b]) / 4**0.5, -1),
                v[a:b],
            )
            for a, b in pairwise(BOUNDS)
        ]
    )
    for name, way in ways.items():
        out = attention._as_packed(name, attention._results(way)[0], BOUNDS)
        torch.testing.assert_close(out, expected, msg=name)
    assert grad.shape == expected.shape


def test_a_way_with_a_wrong_gradient_is_refused() -> None:
    ways = {name: [way] for name, way in prepared(torch.float32).items()}
    given, way = ways[PADDED][0]
    # The same output, and no gradient for the keys.
    ways[PADDED] = [(given, lambda q, k, v: way(q, k.detach() + 0 * k, v))]
    errors = attention._errors(ways, BOUNDS)
    assert errors[PACKED] < attention.EXACT
    with pytest.raises(BenchError, match="no times are given"):
        attention._error_row(PADDED, errors[PADDED], attention.EXACT, "float32")
    with pytest.raises(BenchError):
        attention._error_row(PADDED, float("nan"), attention.EXACT, "float32")
    assert isinstance(attention._error_row(PACKED, errors[PACKED], attention.EXACT, ""), Row)
