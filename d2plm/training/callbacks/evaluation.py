"""Evaluate: the bound on a fixed part of the validation proteins, on EMA weights, during training.

A part is enough for a curve to steer by; the result is the full evaluation after training.
"""

import math

import numpy as np
import torch

from d2plm.core.alphabet import is_canonical
from d2plm.core.errors import require_number
from d2plm.data.store import SequenceStore
from d2plm.data.synthetic import SyntheticSequences
from d2plm.evaluation.likelihood import score_sequences
from d2plm.training.callbacks.callback import Callback
from d2plm.training.trainer import Trainer


class Evaluate(Callback):
    """Estimate the validation perplexity every `every` steps and after the last.

    Args:
        every: optimizer steps between evaluations.
        sequences: their number, a fixed random choice.
        masks_per_sequence: masks of each.
        max_length: tokens of a sequence that are scored.
    """

    def __init__(
        self,
        validation_store: SequenceStore | SyntheticSequences,
        *,
        max_length: int,
        every: int = 500,
        sequences: int = 256,
        masks_per_sequence: int = 2,
    ) -> None:
        require_number("every", every, integer=True, low=1)
        require_number("sequences", sequences, integer=True, low=1)
        number = min(sequences, len(validation_store))
        chosen = np.random.default_rng(0).choice(len(validation_store), number, replace=False)
        self.sequences = [validation_store[int(i)] for i in np.sort(chosen)]
        self.every, self.masks, self.max_length = every, masks_per_sequence, max_length

    def frequency_perplexity(self) -> float:
        """The least perplexity of a model that ignores order: exp(−Σ p log p).

        p are the frequencies of the residues in these proteins.
        """
        counts = np.bincount(np.concatenate(self.sequences))
        residues = counts[is_canonical(np.arange(len(counts), dtype=np.uint8))]
        frequencies = residues[residues > 0] / residues.sum()
        return math.exp(-float(np.sum(frequencies * np.log(frequencies))))

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.step % self.every and not trainer.is_last_step:
            return
        with trainer.ema.swapped_in(), trainer.evaluating() as denoiser:
            scores = score_sequences(
                denoiser,
                trainer.paradigm,
                self.sequences,
                masks_per_sequence=self.masks,
                max_length=self.max_length,
                token_budget=trainer.loader.sampler.token_budget,
                device=trainer.device,
                rank=trainer.process.rank,
                world_size=trainer.process.world_size,
            )
        both = torch.tensor([scores.nats.sum(), scores.residues.sum()], dtype=torch.float64)
        nats, residues = trainer.process.sum(both.to(trainer.device)).tolist()
        nelbo = nats / residues
        trainer.report_evaluation(
            {"validation_nelbo": nelbo, "validation_perplexity": math.exp(nelbo)}
        )
