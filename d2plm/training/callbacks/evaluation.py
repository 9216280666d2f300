"""Evaluate: the bound on a fixed part of the validation proteins, on EMA weights, during training.

The part suffices for a learning curve; the result is the full evaluation after training.
"""

import math

import numpy as np
import torch

from d2plm.core.errors import require_number
from d2plm.data.loader import Sequences
from d2plm.evaluation.baselines import composition_nats, counts_of, fit_composition, fit_unigram
from d2plm.evaluation.likelihood import score_sequences
from d2plm.evaluation.terms import REFERENCE, SUITES
from d2plm.training.callbacks.callback import Callback
from d2plm.training.trainer import Trainer

FITTED_SEQUENCES = 2000  # of the training's, for the baseline without order


class Evaluate(Callback):
    """Estimate the validation perplexity every `every` steps and after the last.

    Args:
        every: optimizer steps between evaluations.
        sequences: number of sequences, a fixed random choice.
        max_length: number of tokens scored per sequence.
    """

    def __init__(
        self,
        validation_store: Sequences,
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
        self.vocabulary = validation_store.vocabulary
        self.every, self.masks, self.max_length = every, masks_per_sequence, max_length

    @property
    def reference(self) -> str:
        """The best baseline that ignores order."""
        return SUITES[self.vocabulary.name].reference

    def reference_perplexity(self, train: Sequences) -> float:
        """The perplexity of these sequences under the reference.

        It is fitted on a subset of the training sequences, which takes a second.
        """
        residues = self.max_length - 2
        counts = [counts_of(tokens[:residues], self.vocabulary) for tokens in self.sequences]
        if self.reference == REFERENCE:
            alpha = fit_composition(train, residues, FITTED_SEQUENCES)
            nats = sum(composition_nats(each, alpha) for each in counts)
        else:
            unigram = fit_unigram(train, residues, FITTED_SEQUENCES)
            nats = float(-sum(counts) @ np.log(unigram))
        return math.exp(nats / max(sum(int(each.sum()) for each in counts), 1))

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
                rank=trainer.process.data_rank,
                world_size=trainer.process.data_ranks,
            )
        both = torch.tensor([scores.nats.sum(), scores.residues.sum()], dtype=torch.float64)
        nats, residues = trainer.process.sum(both.to(trainer.device)).tolist()
        nelbo = nats / residues
        trainer.report_evaluation(
            {"validation_nelbo": nelbo, "validation_perplexity": math.exp(nelbo)}
        )
