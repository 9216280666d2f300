"""RelativesEncoder: features of each residue of a protein from the protein's relatives.

The soft alignment gives for each residue the aligned residues of each relative. Their embedding,
weighted by the agreement of the relative with the visible residues nearby and over the whole
protein, is averaged over the relatives by attention, which may also select none of them. The cost
is about a thousand operations per residue and relative, because the relatives do not pass through
the model's blocks; the price is that only their aligned residues are used. The order of the
relatives does not matter, and a protein without relatives gets zeros: the model is then identical
to one without an encoder.

Shape suffixes: T tokens, N rows of an alignment (residues × relatives), E encoder width, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d2plm.core.batch import Alignment
from d2plm.model.alignment import FEATURES, LETTERS
from d2plm.model.dit_config import DiTConfig
from d2plm.model.layers import in_dtype

HEADS = 4
LARGEST_SCORE = 15.0  # largest attention score of a relative; that of no relative is 0


class RelativesEncoder(nn.Module):
    """An `Alignment` → the terms added to the hidden states [T, D] and to the logits [T, V]."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.relatives_dim
        self.residue_embedding = nn.Linear(LETTERS, width, bias=False)
        self.agreement = nn.Linear(FEATURES, width)
        self.gate = nn.Linear(width, width)  # starts at zero, like the last two layers
        self.score = nn.Linear(width, HEADS)
        self.to_hidden = nn.Linear(width + HEADS, config.hidden_size, bias=False)
        self.to_logits = nn.Linear(width + HEADS, config.vocab_size, bias=False)

    def forward(self, alignment: Alignment, num_tokens: int) -> tuple[Tensor, Tensor]:
        dtype = self.score.weight.dtype
        exact = torch.promote_types(dtype, torch.float32)
        features = alignment.features.to(dtype)
        hidden_NE = F.silu(self.agreement(features))
        residue_NE = self.residue_embedding(features[:, :LETTERS])
        value_NE = residue_NE * (1 + self.gate(hidden_NE))
        score_NH = self.score(hidden_NE).to(exact).clamp(-LARGEST_SCORE, LARGEST_SCORE).exp()
        places_N = alignment.places
        sum_TH = score_NH.new_ones(num_tokens, HEADS).index_add(0, places_N, score_NH)
        weight_NH = score_NH / sum_TH[places_N]
        weighted = value_NE.unflatten(1, (HEADS, -1)) * weight_NH[..., None]
        mean_TE = score_NH.new_zeros(num_tokens, value_NE.shape[1])
        mean_TE = mean_TE.index_add(0, places_N, weighted.flatten(1))
        pooled = torch.cat([mean_TE, 1 - 1 / sum_TH], dim=1)
        known_TV = in_dtype(self.to_logits, exact)(pooled)  # in fp32, as the head
        return self.to_hidden(pooled.to(dtype)), known_TV
