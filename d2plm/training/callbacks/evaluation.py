"""Evaluate: a learning curve of the bound on a fixed subset of the validation proteins (EMA)."""

import math
from typing import Self

import numpy as np
import torch

from d2plm.data.loader import Sequences
from d2plm.evaluation.baselines import composition_nats, counts_of, fit_composition, fit_unigram
from d2plm.evaluation.likelihood import score_sequences
from d2plm.evaluation.terms import REFERENCE, SUITES
from d2plm.settings.callbacks import EvaluationCallbackSettings
from d2plm.training.callbacks.callback import Callback, RunContext
from d2plm.training.trainer import Trainer

FITTED_SEQUENCES = 2000  # number of training sequences to fit the baseline


class Evaluate(Callback):
    """Estimate the validation perplexity every `every` steps and after the last.

    Args:
        max_length: number of tokens scored per sequence.
    """

    def __init__(
        self,
        validation_store: Sequences,
        max_length: int,
        settings: EvaluationCallbackSettings | None = None,
    ) -> None:
        settings = settings or EvaluationCallbackSettings()
        number = min(settings.sequences, len(validation_store))
        chosen = np.random.default_rng(0).choice(len(validation_store), number, replace=False)
        self.sequences = [validation_store[int(i)] for i in np.sort(chosen)]
        self.vocabulary = validation_store.vocabulary
        self.every, self.masks = settings.every, settings.masks_per_sequence
        self.max_length = max_length

    @classmethod
    def create(cls, settings: EvaluationCallbackSettings, context: RunContext) -> Self:
        return cls(context.validation, context.max_length, settings)

    @property
    def reference(self) -> str:
        """The best baseline that ignores order."""
        return SUITES[self.vocabulary.name].reference

    def reference_perplexity(self, train: Sequences) -> float:
        """The perplexity under the reference, fitted on a subset of the training sequences."""
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
