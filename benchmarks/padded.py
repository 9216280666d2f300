"""A DiT on padded tensors, as models are usually trained, to compare the packed one with.

Every row is as long as the batch's longest, or as a fixed length, and every position is computed;
keys of padding are masked. Layers, weights and logits are the DiT's own. `DiT.forward_padded` is
different: it packs its input.
"""

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from d2plm.core.batch import PackedBatch
from d2plm.core.vocabulary import PAD
from d2plm.model import layers
from d2plm.model.dit import DiT
from d2plm.model.layers import Attention, Layout, rope_tables, rotate
from d2plm.paradigms.paradigm import Corrupted, predicted_log_softmax

Corrupting = tuple[PackedBatch, Corrupted]  # the sequences of a step, and what is masked of them


class PaddingCollator:
    """Lays a step's sequences below each other, to the longest of them or to `length`."""

    def __init__(self, length: int | None) -> None:
        self.length = length

    def __call__(self, steps: list[Corrupting]) -> dict[str, Tensor]:
        """The padded tensors of the one step that there is.

        Returns:
            `input_ids` and `attention_mask` (1 = token), int64 [B, L]; `targets`, int64, and
            `weights`, float32, [B, L]; `times` float32 [B]; `count`.
        """
        ((batch, corrupted),) = steps
        lengths = batch.sequence_lengths()

        def padded(values_T: Tensor, value: int) -> Tensor:
            rows = values_T[: sum(lengths)].split(lengths)
            values_BL = pad_sequence(list(rows), batch_first=True, padding_value=value)
            more = 0 if self.length is None else self.length - values_BL.shape[1]
            return F.pad(values_BL, (0, more), value=value)

        return {
            "input_ids": padded(corrupted.tokens, PAD).long(),
            "attention_mask": padded(torch.ones_like(corrupted.tokens), 0).long(),
            "targets": padded(corrupted.targets, 0),
            "weights": padded(corrupted.weights, 0),
            "times": corrupted.times[: len(lengths)].float(),
            "count": corrupted.count,
        }


def padded_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of `Trainer.train_step`: Σ weight · −log p(residue) ÷ count, over [B, L]."""
    logits_BLV = model(batch["input_ids"], batch["attention_mask"], batch["times"])
    log_p = predicted_log_softmax(logits_BLV.flatten(0, 1))
    nats = F.nll_loss(log_p, batch["targets"].flatten(), reduction="none")
    return (nats * batch["weights"].flatten()).sum() / batch["count"].float().clamp(min=1)


class PaddedDiT(nn.Module):
    """A `DiT` computed on (B, L, D) tensors; its attention is replaced, so it packs no more.

    Shapes: B sequences, L positions, D hidden, H heads, K head size, C time embedding, V alphabet.
    """

    def __init__(self, dit: DiT) -> None:
        super().__init__()
        self.dit = dit
        for block in dit.blocks:
            layer: Any = block.attention
            layer.forward = partial(padded_attention, layer)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, times: Tensor) -> Tensor:
        """Logits of the clean token at every position; those at padding mean nothing.

        Args:
            input_ids, attention_mask: integer [B, L], 1 = token.
            times: float [B].

        Returns:
            [B, L, V].
        """
        dit, config = self.dit, self.dit.config
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        size = config.hidden_size // config.num_attention_heads
        rope_L1K = rope_tables(places, size, config.rope_theta, config.rope_frequencies)
        keys_B11L = attention_mask.bool()[:, None, None]
        layout = Layout(input_ids, keys_B11L, *rope_L1K)
        assert dit.time_embedding is not None
        x_BLD, time_BC = dit.token_embedding(input_ids), dit.time_embedding(times)
        # [B, 1, D], which broadcast over the positions, in place of [T, D].
        with patch.object(layers, "expand_modulation", lambda m, _, n: m[:, None].chunk(n, -1)):
            for block in dit.blocks:
                x_BLD = block(x_BLD, time_BC, layout, keys_B11L, input_ids.shape[1])
            logits_BLV: Tensor = dit.head(x_BLD, time_BC, layout)
        return logits_BLV


def padded_attention(
    layer: Attention, x_BLD: Tensor, cos_L1K: Tensor, sin_L1K: Tensor, keys_B11L: Tensor, _: int
) -> Tensor:
    """As `Attention.forward`, of every position, with the keys of padding masked."""
    qkv = rearrange(layer.qkv_proj(x_BLD), "b l (h k) -> b l h k", h=3 * layer.heads)
    q, k, v = qkv.chunk(3, 2)
    # Autocast leaves a normalisation in fp32 on some devices; the rest would follow it.
    cos_L1K, sin_L1K = cos_L1K.to(v.dtype), sin_L1K.to(v.dtype)
    q = rotate(layer.q_norm(q).to(v.dtype), cos_L1K, sin_L1K)
    k = rotate(layer.k_norm(k).to(v.dtype), cos_L1K, sin_L1K)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed_BHLK = F.scaled_dot_product_attention(q, k, v, attn_mask=keys_B11L)
    mixed_BLD: Tensor = layer.out_proj(rearrange(mixed_BHLK, "b h l k -> b l (h k)"))
    return mixed_BLD
