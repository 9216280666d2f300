"""A whole evaluation: a model's bound beside baselines and other models, on the same residues."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.progress import Progress
from d2plm.data.store import SequenceStore, clusters_of
from d2plm.evaluation.baselines import Baselines, fit_baselines
from d2plm.evaluation.document import MODEL
from d2plm.evaluation.likelihood import SequenceScores, score_sequences
from d2plm.evaluation.report import HeldOut, summarise
from d2plm.export.exported_model import ExportedModel
from d2plm.paradigms.base import Denoiser, Paradigm


def evaluate(
    exported: ExportedModel,
    train: SequenceStore,
    held_out: SequenceStore,
    *,
    masks_per_sequence: int = 16,
    seed: int = 0,
    token_budget: int = 16384,
    precision: str = "auto",
    baselines: Baselines | None = None,
    others: Mapping[str, tuple[Denoiser, Paradigm]] | None = None,
    identities: NDArray[np.float64] | None = None,
    quality: Callable[[], dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
    digests: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Evaluate an exported model, and put the figures into its folder and its model card.

        prepared = open_prepared(Path("prepared"))
        evaluation = evaluate(exported, prepared.splits["train"], prepared.splits["validation"])
        print(d2plm.evaluation.report.table(evaluation))

    Of longer proteins the first residues are scored, as many as the model takes.

    Args:
        train: what the baselines are fitted on; `held_out`: what is scored.
        masks_per_sequence: draws of the bound for each protein.
        seed: of the draws; models are compared on the same ones.
        token_budget: tokens of a forward pass.
        precision: of the matrix work, as of `d2plm.core.precision`.
        baselines: fitted ones; None fits them on `train`.
        others: further models to score, by name.
        identities: float64 [N], of each held-out protein to the nearest training protein.
        quality: gives what `compare_quality` gives; called last, as it is what takes long.
        settings, digests: recorded as they are; None records those of here.

    Returns:
        What `summarise` gives.

    Raises:
        ConfigError: on a value out of range.
        DataError: if the folder cannot be written.
        ModelError: if a bound is not finite.
    """
    max_residues = exported.max_residues
    if baselines is None:
        baselines = fit_baselines(train, max_residues=max_residues)
    sequences = [tokens[:max_residues] for tokens in held_out]
    per_sequence = [baselines.score(tokens) for tokens in sequences]
    proteins = HeldOut(
        lengths=held_out.lengths,
        clusters=clusters_of(held_out),
        baselines={
            name: np.array([scores[name] for scores in per_sequence]) for name in baselines.scorers
        },
        identities=identities,
    )
    draws = {"masks_per_sequence": masks_per_sequence, "seed": seed, "token_budget": token_budget}

    def score(name: str, denoiser: Denoiser, paradigm: Paradigm) -> SequenceScores:
        with Progress(f"evaluating {name}") as progress:
            return score_sequences(
                denoiser,
                paradigm,
                sequences,
                max_length=exported.max_length,
                device=exported.model.device,
                unigram=baselines.unigram,
                data_digest=held_out.digest,
                progress=progress.update_of,
                **draws,
            )

    scores = score(MODEL, exported.denoiser(precision), exported.paradigm)
    evaluation = summarise(
        scores,
        {name: score(name, *other) for name, other in (others or {}).items()},
        proteins,
        exported.lengths,
        quality=None if quality is None else quality(),
        settings=settings or {**draws, "precision": precision},
        digests=digests or {"train": train.digest, "validation": held_out.digest},
    )
    exported.add_evaluation(
        evaluation, nats=scores.nats, residues=scores.residues, clusters=proteins.clusters
    )
    return evaluation
