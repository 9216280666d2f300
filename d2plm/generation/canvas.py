"""Canvas: a packed batch whose masks are to be filled, as the samplers see it.

The residues that a step may change are known before the model is evaluated, and only the segments
that contain such residues go through it: a finished sequence costs nothing. Shapes therefore change
from step to step, which would be expensive in a compiled model; here it is not compiled.

The wanted residues of a sequence go through the whole process, from its prior to its data. The
model is given another time: the one at which, in training, as large a share of the sequence's
residues is corrupted as is expected to be now. Where a tenth of the residues is wanted, a tenth is
masked at the start; the time of "everything is masked" would contradict the input. For generation
from scratch the two times agree. With a uniform source, too, the given residues count as clean.
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
    """The N wanted residues in S segments of T tokens, and the model that predicts them.

    Attributes:
        places: int64 [N], the positions of the wanted residues in the row.
        segments: int64 [N], the segment of each.
        indices: int64 [N] each, the keys of each one's draws: its sequence and its position.
        token_segments: int64 [T], the segment of each token.
        mask: the token that marks them.
        wanted: int64 [S], the number of wanted residues in each segment.
        share: float64 [S], their share of the segment's residues that can be corrupted.
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
        """log p(residue | the other positions) at M of the wanted places, float64 [M, K].

        Args:
            tokens: integer [T], as of `PackedBatch.computable`.
            corrupted: the expected corrupted share of the wanted residues, of all segments or
                float64 [S].
            step: counted from 0.
            asked: int64 [M], indices into the N.

        Raises:
            ModelError: if the model's logits are not finite at a wanted place of a segment that
                goes through it.
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
        """`indices` of M of the wanted places."""
        sequences, positions = self.indices
        return sequences[asked], positions[asked]

    def lowest(self, values: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
        """bool [N]: in each segment, the `count` [S] eligible places with the lowest values.

        Args:
            values: float64 [N] in [0, 1]; of equal ones the first in the sequence is the lowest.
            eligible: bool [N].
        """
        bounds = F.pad(self.wanted.cumsum(0), (1, 0))
        ranked = torch.where(eligible, values / 2, 1.0)  # the others after them all
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
    """int64 [S]: the number of wanted residues in each segment."""
    wanted = (batch.computable() == vocabulary.mask).long()
    return segment_sum(wanted, batch.segment_ids(), batch.num_segments)
