"""A DiT on padded tensors, as models are usually trained, to compare the packed one with.

Every row is as long as the batch's longest, or as a fixed length, and every position is computed;
keys of padding are masked. Layers, weights and logits are the DiT's own. `DiT.forward_padded` is
different: it packs its input.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from d2plm.core.batch import PackedBatch
from d2plm.core.vocabulary import MASK, PAD
from d2plm.model.dit import DiT
from d2plm.model.layers import ESM_MASKED_SHARE, Attention, Block, Head, rope_tables, rotate
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


def padded_loss(logits_BLV: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The loss of `Trainer.train_step`: Σ weight · −log p(residue) ÷ count, over [B, L]."""
    log_p = predicted_log_softmax(logits_BLV.flatten(0, 1))
    nats = F.nll_loss(log_p, batch["targets"].flatten(), reduction="none")
    return (nats * batch["weights"].flatten()).sum() / batch["count"].float().clamp(min=1)


class PaddedDiT(nn.Module):
    """A `DiT` computed on (B, L, D) tensors.

    Shapes: B sequences, L positions, D hidden, H heads, K head size, C time embedding, V alphabet.
    """

    def __init__(self, dit: DiT) -> None:
        super().__init__()
        self.dit = dit

    def forward(self, input_ids: Tensor, attention_mask: Tensor, times: Tensor) -> Tensor:
        """Logits of the clean token at every position; those at padding mean nothing.

        Args:
            input_ids, attention_mask: integer [B, L], 1 = token.
            times: float [B].

        Returns:
            [B, L, V].
        """
        dit, config = self.dit, self.dit.config
        rope_L1K = rope_tables(
            torch.arange(input_ids.shape[1], device=input_ids.device),
            config.hidden_size // config.num_attention_heads,
            config.rope_theta,
            config.rope_frequencies,
        )
        keys_B11L = attention_mask.bool()[:, None, None]
        x_BLD = dit.token_embedding(input_ids)
        if config.token_dropout:
            x_BLD = x_BLD * _token_dropout(input_ids, attention_mask)
        assert dit.time_embedding is not None
        time_BC = dit.time_embedding(times)
        for block in dit.blocks:
            assert isinstance(block, Block)
            x_BLD = _block(block, x_BLD, time_BC, rope_L1K, keys_B11L)
        return _head(dit.head, x_BLD, time_BC)


def _token_dropout(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """As `drop_masked_tokens`: the factor of each position's embedding [B, L, 1]."""
    masked = input_ids == MASK
    length = attention_mask.sum(1)
    scale = (1 - ESM_MASKED_SHARE) * length / (length - masked.sum(1)).clamp(min=1)
    return scale[:, None].masked_fill(masked, 0)[..., None]


def _block(
    block: Block, x_BLD: Tensor, time_BC: Tensor, rope_L1K: tuple[Tensor, Tensor], keys_B11L: Tensor
) -> Tensor:
    assert block.modulation is not None
    shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = block.modulation(time_BC)[:, None].chunk(
        6, dim=-1
    )
    h_BLD = torch.addcmul(shift_a, block.attention_norm(x_BLD), 1 + scale_a)
    h_BLD = _attention(block.attention, h_BLD, rope_L1K, keys_B11L)
    x_BLD = torch.addcmul(x_BLD, gate_a, F.dropout(h_BLD, block.dropout, block.training))
    h_BLD = torch.addcmul(shift_f, block.feed_forward_norm(x_BLD), 1 + scale_f)
    h_BLD = block.feed_forward(h_BLD)
    return torch.addcmul(x_BLD, gate_f, F.dropout(h_BLD, block.dropout, block.training))


def _attention(
    attention: Attention, x_BLD: Tensor, rope_L1K: tuple[Tensor, Tensor], keys_B11L: Tensor
) -> Tensor:
    qkv = rearrange(attention.qkv_proj(x_BLD), "b l (h k) -> b l h k", h=3 * attention.heads)
    q, k, v = qkv.chunk(3, 2)
    # Autocast leaves a normalisation in fp32 on some devices; the rest would follow it.
    cos_L1K, sin_L1K = (table.to(v.dtype) for table in rope_L1K)
    q = rotate(attention.q_norm(q).to(v.dtype), cos_L1K, sin_L1K)
    k = rotate(attention.k_norm(k).to(v.dtype), cos_L1K, sin_L1K)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mixed_BHLK = F.scaled_dot_product_attention(q, k, v, attn_mask=keys_B11L)
    return attention.out_proj(rearrange(mixed_BHLK, "b h l k -> b l (h k)"))


def _head(head: Head, x_BLD: Tensor, time_BC: Tensor) -> Tensor:
    assert head.modulation is not None
    shift, scale = head.modulation(time_BC)[:, None].chunk(2, dim=-1)
    h_BLD = head.before_projection(torch.addcmul(shift, head.norm(x_BLD), 1 + scale))
    dtype = torch.promote_types(h_BLD.dtype, torch.float32)
    return F.linear(h_BLD.to(dtype), head.proj.weight.to(dtype), head.proj.bias.to(dtype))
