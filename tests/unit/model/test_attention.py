"""packed_attention on a CPU, against softmax attention written out for each segment."""

import math

import pytest
import torch
from torch import Tensor

from d2plm.model.attention import WINDOW, packed_attention

HEADS, HEAD_SIZE = 3, 8
LENGTHS = [
    [7, 3, 3, 3, 9, 1],
    [3, *[5] * 9, 0, 130, *[5] * 8],  # many short ones, computed as a batch, between others
    [4, 4, 0, 4, 0, 0],  # empty segments between and after equally long ones
    [40, 33, 64],
]


def written_out(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """softmax(q·kᵀ/√K)·v of each segment."""
    parts = []
    for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("qhk,shk->hqs", qs, ks) / math.sqrt(q.shape[-1])
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        parts.append(torch.einsum("hqs,shk->qhk", weights, vs))
    return torch.cat(parts)


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def random_inputs(
    tokens: int, dtype: torch.dtype = torch.float64, heads: int = HEADS
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shape = (tokens, heads, HEAD_SIZE)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(3)
    )
    return q, k, v


@pytest.mark.parametrize(
    ("dtype", "heads", "tolerance"),
    [(torch.float64, HEADS, 1e-12), (torch.bfloat16, HEADS, 5e-2), (torch.bfloat16, 1, 5e-2)],
)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_attention_and_its_gradients_are_those_written_out(
    lengths: list[int], dtype: torch.dtype, heads: int, tolerance: float
) -> None:
    inputs = random_inputs(sum(lengths), dtype, heads)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = packed_attention(*inputs, bounds(lengths), max(lengths))
    expected = written_out(*exact, lengths)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance / 2, rtol=tolerance / 2)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    given = upstream.clone()
    found = torch.autograd.grad(out, inputs, upstream)
    assert torch.equal(upstream, given)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)


def test_an_expanded_gradient_and_strided_inputs_are_handled() -> None:
    lengths = [6, 6, 2]
    qkv = torch.randn(14, 3, HEADS, HEAD_SIZE, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv.unbind(1)
    (found,) = torch.autograd.grad(packed_attention(q, k, v, bounds(lengths), 6).sum(), qkv)
    (wanted,) = torch.autograd.grad(written_out(q, k, v, lengths).sum(), qkv)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_products_in_bfloat16_have_few_shapes() -> None:
    lengths = list(range(1, 2 * WINDOW + 1, 7))
    inputs = random_inputs(sum(lengths), torch.bfloat16)
    with torch.profiler.profile(record_shapes=True) as profiler:
        packed_attention(*inputs, bounds(lengths), max(lengths)).sum().backward()
    products = [event.input_shapes for event in profiler.events() if event.name == "aten::bmm"]
    assert len(products) == 7 * len(lengths)
    largest = {max(sizes[1:]) for shapes in products for sizes in shapes if sizes}
    assert largest == {WINDOW, 2 * WINDOW}


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (x.detach() for x in random_inputs(6))
    out = packed_attention(q * 1e4, k, v, bounds([6]), 6)
    assert torch.isfinite(out).all()
    best = torch.einsum("qhk,shk->hqs", q, k).argmax(-1)
    expected = torch.stack([v[best[h], h] for h in range(HEADS)], dim=1)
    torch.testing.assert_close(out, expected)


def test_the_operators_pass_torchs_own_checks() -> None:
    cu_seqlens = bounds([4, 4, 0, 3])
    inputs = random_inputs(11, torch.bfloat16)
    torch.library.opcheck(torch.ops.d2plm.packed_attention_cpu.default, (*inputs, cu_seqlens))
    q, k, v = (x.detach() for x in random_inputs(11))
    out, lse = torch.ops.d2plm.packed_attention_cpu(q, k, v, cu_seqlens)
    torch.library.opcheck(
        torch.ops.d2plm.packed_attention_cpu_backward.default,
        (torch.ones_like(out), q, k, v, out, lse, cu_seqlens),
        test_utils=("test_schema", "test_faketensor"),
    )
