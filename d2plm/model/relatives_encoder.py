"""RelativesEncoder: features of each residue of a protein from the protein's relatives.

The soft alignment gives for each residue the aligned residues of each relative. Their embedding,
weighted by the agreement of the relative with the visible residues nearby and over the whole
protein, is averaged over the relatives by attention, which may also select none of them. The cost
is about a thousand operations per residue and relative, because the relatives do not pass through
the model's blocks; the price is that only their aligned residues are used. The order of the
relatives does not matter, and a protein without relatives gets zeros: the model is then identical
to one without an encoder.

Shape suffixes: T tokens, N lines of an alignment (residues × relatives), R relatives, W windows, E
encoder width, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d2plm.model.alignment import LETTERS, UNKNOWN, Alignment
from d2plm.model.dit_config import DiTConfig

HEADS = 4
WINDOWS = (2, 8, 24, None)  # residues to either side over which agreement is measured; None: all
LARGEST_SCORE = 15.0  # of a relative in the attention over them; the score of none is 0


class RelativesEncoder(nn.Module):
    """An `Alignment` → the terms added to the hidden states [T, D] and to the logits [T, V]."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width, features = config.relatives_dim, LETTERS + 1 + 3 * len(WINDOWS)
        self.residue_embedding = nn.Linear(LETTERS, width, bias=False)
        self.agreement = nn.Linear(features, width)
        self.gate = nn.Linear(width, width)  # starts at zero, as the last two
        self.score = nn.Linear(width, HEADS)
        self.to_hidden = nn.Linear(width + HEADS, config.hidden_size, bias=False)
        self.to_logits = nn.Linear(width + HEADS, config.vocab_size, bias=False)

    def forward(self, alignment: Alignment, num_tokens: int) -> tuple[Tensor, Tensor]:
        dtype = self.score.weight.dtype
        exact = torch.promote_types(dtype, torch.float32)
        hidden_NE = F.silu(self.agreement(alignment_features(alignment).to(dtype)))
        residue_NE = self.residue_embedding(alignment.residues.to(dtype))
        value_NE = residue_NE * (1 + self.gate(hidden_NE))
        score_NH = self.score(hidden_NE).to(exact).clamp(-LARGEST_SCORE, LARGEST_SCORE).exp()
        places_N = alignment.places
        sum_TH = score_NH.new_ones(num_tokens, HEADS).index_add(0, places_N, score_NH)
        weight_NH = score_NH / sum_TH[places_N]
        weighted = value_NE.unflatten(1, (HEADS, -1)) * weight_NH[..., None]
        mean_TE = score_NH.new_zeros(num_tokens, value_NE.shape[1])
        mean_TE = mean_TE.index_add(0, places_N, weighted.flatten(1))
        pooled = torch.cat([mean_TE, 1 - 1 / sum_TH], dim=1)
        known_TV = F.linear(pooled, self.to_logits.weight.to(exact))  # in fp32, as the head
        return self.to_hidden(pooled.to(dtype)), known_TV


def alignment_features(alignment: Alignment) -> Tensor:
    """float32 [N, 21 + 1 + 3·W]: features of each residue from the alignment to each relative.

    The aligned residues; the probability that there is one; and for each window around the residue
    the fraction of visible residues equal to the aligned ones, the logarithm of their number, and
    the aligned fraction of the visible residues.
    """
    residues, bounds = alignment.residues, alignment.bounds
    visible = (alignment.visible < UNKNOWN).double()
    equal = residues.gather(1, alignment.visible[:, None])[:, 0] * visible
    covered = residues[:, :UNKNOWN].sum(1)
    sums = F.pad(torch.stack([equal, covered * visible, visible], 1).cumsum(0), (0, 0, 1, 0))
    line = torch.arange(len(residues), device=residues.device)
    pair = torch.bucketize(line, bounds[1:], right=True)
    first, last = bounds[pair], bounds[pair + 1]
    features = [residues, covered[:, None]]
    for reach in WINDOWS:
        start = first if reach is None else torch.maximum(line - reach, first)
        stop = last if reach is None else torch.minimum(line + reach + 1, last)
        agreeing, opposite, seen = (sums[stop] - sums[start]).float().unbind(1)
        ratio = (agreeing + 0.5) / (opposite + 1.5)  # a third if nothing is visible
        share = opposite / seen.clamp(min=1)
        features.append(torch.stack([ratio, 0.3 * torch.log1p(opposite.clamp(min=0)), share], 1))
    return torch.cat(features, dim=1)
