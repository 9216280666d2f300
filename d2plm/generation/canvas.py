"""Canvas: a packed batch whose masks are to be filled, as the samplers see it.

The residues that a step may change are known before the forward pass, and only segments that
contain some go through the model: a finished sequence costs nothing. Shapes vary from step to step,
so the model is not compiled here.

The residues to generate go through the whole process, from prior to data, but the model is given
another time: the one at which, in training, the expected corrupted fraction of the sequence is the
present one. If a tenth of the residues is to be generated, a tenth is masked at the start, and the
time of "everything is masked" would contradict the input. From scratch, both times agree. With a
uniform source, too, the given residues count as clean.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from d2plm.core.batch import PackedBatch, Relatives, segment_sum
from d2plm.core.errors import ModelError
from d2plm.core.noise import Key, categorical
from d2plm.core.vocabulary import FIRST, Vocabulary
from d2plm.generation.kernels import tempered
from d2plm.generation.sampler_settings import Sampling
from d2plm.paradigms.masked import rank_in_segment
from d2plm.paradigms.paradigm import Denoiser, Paradigm


class Canvas:
    """The N residues to generate in S segments of T tokens, and the model that predicts them.

    Attributes:
        places: int64 [N], their positions in the row.
        segments: int64 [N], their segments.
        indices: (int64 [N], int64 [N]), sequence and position, which key the draws.
        token_segments: int64 [T], the segment of each token.
        mask: the mask token.
        wanted: int64 [S], number of residues to generate per segment.
        share: float64 [S], their fraction of the segment's corruptible residues.
    """

    def __init__(
        self, model: Denoiser, paradigm: Paradigm, sampling: Sampling, batch: PackedBatch
    ) -> None:
        self.model, self.paradigm, self.sampling, self.batch = model, paradigm, sampling, batch
        self.mask = paradigm.vocabulary.mask
        self.token_segments = batch.segment_ids()
        self.wanted = wanted_in(batch, paradigm.vocabulary)
        self.places = (batch.computable() == self.mask).nonzero()[:, 0]
        self.segments = self.token_segments[self.places]
        self.indices = (batch.draw_ids[self.segments], batch.positions()[self.places])
        given = segment_sum(
            paradigm.maskable(batch).long(), self.token_segments, batch.num_segments
        )
        self.share = self.wanted.double() / (self.wanted + given).clamp(min=1)

    def log_probabilities(
        self, tokens: Tensor, corrupted: Tensor | float, step: int, asked: Tensor
    ) -> Tensor:
        """log p(residue | the other positions) of M residues to generate, float64 [M, K].

        Args:
            tokens: integer [T], as from `PackedBatch.computable`.
            corrupted: expected corrupted fraction of the residues to generate, scalar or float64
                [S].
            step: 0-based.
            asked: int64 [M], indices into the N.

        Raises:
            ModelError: if a logit of a segment that goes through the model is not finite.
        """
        if not len(asked):
            residues = self.paradigm.vocabulary.predicted
            return torch.empty(0, residues, dtype=torch.float64, device=tokens.device)
        batch, goes = self.batch, torch.zeros_like(self.wanted, dtype=torch.bool)
        goes[self.segments[asked]] = True
        kept = goes[self.token_segments].nonzero()[:, 0]
        cu_seqlens = F.pad(batch.cu_seqlens.diff()[goes].cumsum(0), (1, 0)).to(torch.int32)
        times = self.paradigm.time_at_corrupted_fraction(self.share * corrupted).float()[goes]
        given: tuple[Relatives, ...] = ()
        if batch.relatives is not None:
            given = (batch.relatives.of_segments(goes.cpu().numpy()),)
        logits = self.model(tokens[kept], cu_seqlens, batch.max_seqlen, times, *given)
        row = torch.empty_like(self.token_segments)
        row[kept] = torch.arange(len(kept), device=kept.device)
        log_p = self.paradigm.log_probabilities(logits)
        present = goes[self.segments].nonzero()[:, 0]
        self._require_finite(log_p[row[self.places[present]]], present, step)
        return log_p[row[self.places[asked]]].double()

    def draw(self, key: Key, log_p: Tensor, asked: Tensor) -> Tensor:
        """int64 [M]: a residue for each place `asked`, after temperature, top-k and top-p."""
        probabilities = tempered(log_p, self.sampling).exp()
        drawn = categorical(key.stream("residue"), probabilities, *self.indices_of(asked))
        return drawn + FIRST

    def indices_of(self, asked: Tensor) -> tuple[Tensor, Tensor]:
        sequences, positions = self.indices
        return sequences[asked], positions[asked]

    def lowest(self, values: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
        """bool [N]: the `count` [S] eligible places per segment with the lowest values, 0 … 1."""
        bounds = F.pad(self.wanted.cumsum(0), (1, 0))
        ranked = torch.where(eligible, values / 2, 1.0)  # all others rank last
        rank = rank_in_segment(ranked, bounds, self.segments)
        return eligible & (rank < count[self.segments])

    def with_residues(self, tokens: Tensor, residues: Tensor, asked: Tensor) -> Tensor:
        """Integer [T]: `tokens` with `residues` [M] at the places `asked`."""
        return tokens.index_copy(0, self.places[asked], residues.to(tokens.dtype))

    def _require_finite(self, log_p: Tensor, present: Tensor, step: int) -> None:
        finite = log_p.isfinite().all(-1)
        if not finite.all():
            first = present[int((~finite).nonzero()[0])]
            sequence, residue = (int(index[first]) for index in self.indices)
            raise ModelError(
                f"the logits at step {step + 1} of {self.sampling.sampler} are not finite "
                f"(sequence {sequence}, residue {residue}): the model is damaged, or overflows in "
                "its precision; try precision=fp32"
            )


def wanted_in(batch: PackedBatch, vocabulary: Vocabulary) -> Tensor:
    """int64 [S]: number of residues to generate in each segment."""
    wanted = (batch.computable() == vocabulary.mask).long()
    return segment_sum(wanted, batch.segment_ids(), batch.num_segments)
