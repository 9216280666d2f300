"""Whether what is fast is right: one batch's loss and gradients, computed in two ways."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from d2plm.bench.rows import Row
from d2plm.bench.workload import Workload
from d2plm.core.alphabet import MASK
from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.training.parallelise import in_precision

EXACT = 1e-5  # relative, in fp32: the order of sums
LOSS, GRADIENTS = 2e-2, 5e-2  # of a lower precision on another device


def packed_rows(workload: Workload) -> list[Row]:
    """Packed against one sequence at a time, fp32 on the CPU."""
    (batch,) = workload.batches(1)
    bounds = batch.cu_seqlens.tolist()
    alone = [pair for pair, real in zip(pairwise(bounds), batch.real(), strict=True) if real]
    loss, gradients = _loss_and_gradients(workload, [(0, batch.num_tokens)])
    other_loss, other_gradients = _loss_and_gradients(workload, alone)
    worst = max(_difference([g], [h]) for g, h in zip(gradients, other_gradients, strict=True))
    what, difference = "packed against one at a time, fp32", abs(loss - other_loss) / loss
    return [
        Row(f"{what}: loss", difference, "relative", EXACT, at_most=True),
        Row(f"{what}: gradients", worst, "relative", EXACT, at_most=True),
    ]


def device_rows(workload: Workload, device: torch.device, dtype: torch.dtype) -> list[Row]:
    """A device against the CPU in fp32: masks, loss and gradients of a packed batch."""
    row = [(0, workload.token_budget)]
    loss, gradients = _loss_and_gradients(workload, row)
    other_loss, other_gradients = _loss_and_gradients(workload, row, device, dtype)
    here, there = _masked(workload, torch.device("cpu")), _masked(workload, device)
    precise = str(dtype).removeprefix("torch.")
    what = f"{device.type} {precise} against cpu fp32"
    return [
        Row(
            f"masked otherwise on {device.type} than on cpu, of {workload.token_budget:,} tokens",
            float((here != there).sum()),
            "",
            0,
            at_most=True,
        ),
        Row(f"{what}: loss", abs(other_loss - loss) / loss, "relative", LOSS, at_most=True),
        Row(
            f"{what}: gradients",
            _difference(gradients, other_gradients),
            "relative",
            GRADIENTS,
            at_most=True,
        ),
    ]


def _loss_and_gradients(
    workload: Workload,
    parts: Sequence[tuple[int, int]],
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, list[Tensor]]:
    """The first batch's summed loss and its gradients, on the CPU.

    Args:
        parts: (first token, the one after the last) of each forward; whole segments.
    """
    place = device or torch.device("cpu")
    model, paradigm = workload.new_model().to(place).train(), AbsorbingDiffusion()
    batch = workload.batches(1)[0].to(place)
    corrupted, total = paradigm.corrupt(batch, Key(workload.seed)), 0.0
    for start, stop in parts:
        inside = (batch.cu_seqlens >= start) & (batch.cu_seqlens <= stop)
        cu_seqlens = (batch.cu_seqlens[inside] - start).contiguous()
        times = corrupted.times[inside[:-1]][: len(cu_seqlens) - 1]
        logits = in_precision(model, dtype)(
            corrupted.tokens[start:stop], cu_seqlens, batch.max_seqlen, times
        )
        log_p = paradigm.log_probabilities(logits)
        nats = -log_p.gather(-1, corrupted.targets[start:stop, None])[:, 0]
        loss = (nats * corrupted.weights[start:stop]).sum()
        loss.backward()
        total += float(loss.detach())
    return total, [p.grad.cpu().float() for p in model.parameters() if p.grad is not None]


def _masked(workload: Workload, device: torch.device) -> Tensor:
    batch: PackedBatch = workload.batches(1)[0].to(device)
    return (AbsorbingDiffusion().corrupt(batch, Key(workload.seed)).tokens == MASK).cpu()


def _difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """2-norm of the difference, relative to that of what is expected."""
    differences = sum(float((a - b).norm() ** 2) for a, b in zip(expected, found, strict=True))
    norm = sum(float(a.norm() ** 2) for a in expected)
    return float((differences / max(norm, 1e-60)) ** 0.5)
