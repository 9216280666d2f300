"""Embeddings: the hidden states of a layer for each residue of an unmasked protein.

The model is given the time of one masked residue (a fraction of 1 / length), the closest to an
unmasked protein in training. Layers are numbered like Hugging Face's hidden states: 0 is the input
of the first block, n the output of the n-th; the last layer's is taken after the final norm.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from d2plm.core.batch import PackedBatch, under_budget
from d2plm.core.errors import require_number
from d2plm.core.vocabulary import Tokens
from d2plm.data.loader import framed
from d2plm.model.dit import DiT
from d2plm.paradigms.paradigm import Paradigm, denoise


def layer_number(model: DiT, layer: int) -> int:
    """The non-negative number of a layer; raises ConfigError if the model has no such layer."""
    last = len(model.blocks)
    require_number("layer", layer, integer=True, low=-last - 1, high=last)
    return layer if layer >= 0 else layer + last + 1


@torch.no_grad()
def embeddings(
    model: DiT,
    paradigm: Paradigm,
    sequences: Sequence[Tokens],
    *,
    layer: int = -1,
    pooled: bool = False,
    token_budget: int = 16384,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[NDArray[np.float32]]:
    """The hidden states of each sequence's residues, float32 [L, D], or their mean, [D].

    Args:
        model: in evaluation mode, on the device and in the precision of the forward pass.
        sequences: uint8 residue tokens [L], non-empty and no longer than the model allows.
        layer: see the module; negative numbers count from the last.
        pooled: return the mean over the residues.
        token_budget: tokens per forward pass; a longer sequence gets a pass of its own.
        progress: called with the number of tokens after each forward pass.

    Raises:
        ConfigError: if the model has no such layer.
    """
    found: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(sequences)
    layer = layer_number(model, layer)
    lengths = [len(one) + 2 for one in sequences]
    longest_first = sorted(range(len(sequences)), key=lambda number: -lengths[number])
    with watched(model, [layer]) as kept:
        for numbers in under_budget(longest_first, lengths.__getitem__, token_budget):
            batch = PackedBatch.pack([framed(sequences[i]) for i in numbers]).to(model.device)
            residues = torch.tensor([len(sequences[i]) for i in numbers], dtype=torch.float64)
            times = paradigm.time_at_corrupted_fraction(1 / residues).float().to(model.device)
            denoise(model, batch, batch.computable(), times)
            states, bounds = kept[layer].float().cpu(), batch.cu_seqlens.tolist()
            for number, first, end in zip(numbers, bounds, bounds[1:], strict=False):
                own = states[first + 1 : end - 1]  # without <cls> and <eos>
                found[number] = (own.mean(0) if pooled else own).numpy().copy()
            progress(batch.num_tokens)
    return found


@contextmanager
def watched(model: DiT, layers: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Context manager: the hidden states [T, D] of `layers` in the latest forward pass."""
    kept: dict[int, Tensor] = {}
    last, handles = len(model.blocks), []

    def keep(
        layer: int, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | None = None
    ) -> None:
        kept[layer] = inputs[0] if output is None else output  # a pre-hook has no output

    for layer in layers:
        if layer == 0:
            handles.append(model.blocks[0].register_forward_pre_hook(partial(keep, 0)))
            continue
        module: nn.Module = model.head.norm if layer == last else model.blocks[layer - 1]
        handles.append(module.register_forward_hook(partial(keep, layer)))
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()
