"""The control: an autoregressive twin of uniprot_20k's model, which predicts from left to right.

The blocks, the number of parameters and the packing are the same. Attention sees no later token,
and every residue of a row is a target, whereas a masked row has half as many. The likelihood is
exact. Building it makes the attention of the whole process causal.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.model import layers
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.masked import cross_entropy
from d2plm.paradigms.paradigm import Corrupted, target_index
from d2plm.settings.paradigm import DiffusionSettings
from d2plm.settings.registry import register
from d2plm.settings.schema import key


def causal_attention(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Like `packed_attention`, but each token attends only to itself and earlier tokens."""
    mixed = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        if start < stop:
            q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (q_THK, k_THK, v_THK))
            mixed.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1))
    return torch.cat(mixed)


@dataclass(frozen=True, kw_only=True)
class AutoregressiveSettings(DiffusionSettings):
    """Those of diffusion; it needs `shift=true`, `loss=mean` and `time_sampling=uniform`."""

    type: str = key("autoregressive")


class Autoregressive(AbsorbingDiffusion):
    """Autoregressive model: nothing is masked; residue i is predicted from the state at i − 1."""

    Settings = AutoregressiveSettings
    estimator = "exact likelihood"

    def build(self) -> None:
        layers.packed_attention = causal_attention
        super().build()

    def corrupt(self, batch: PackedBatch, key: Key) -> Corrupted:
        maskable = self.maskable(batch)
        return Corrupted(
            tokens=batch.tokens,
            targets=target_index(batch.tokens, maskable),
            times=torch.zeros(batch.num_segments, dtype=torch.float64),
            weights=maskable.double(),
            count=maskable.sum(dtype=torch.float64),
        )

    def bound_noise(
        self, batch: PackedBatch, key: Key, draw: int, draws: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ones = torch.ones(batch.num_segments, dtype=torch.float64)
        return batch.tokens, 0 * ones, ones

    def bound_terms(
        self, log_p: Tensor, batch: PackedBatch, tokens: Tensor, fraction: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        maskable = self.maskable(batch)
        nats = cross_entropy(log_p, batch, maskable)
        return nats, nats, maskable


register("paradigm", "autoregressive", Autoregressive, AutoregressiveSettings)
