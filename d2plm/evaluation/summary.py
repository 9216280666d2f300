"""The figures of an evaluation from the nats of each sequence."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.evaluation.likelihood import (
    FRACTION_BINS,
    MASKING_VERSION,
    SequenceScores,
    bound_of,
    compared_with,
    corpus_estimate,
)
from d2plm.evaluation.nearest import IDENTITY_BINS, identity_bins
from d2plm.evaluation.result import (
    MODEL,
    Evaluation,
    FractionBin,
    GivenRelatives,
    IdentityBin,
    Quality,
)
from d2plm.evaluation.terms import PROTEINS, REFERENCE, Terms
from d2plm.generation.lengths import LengthHistogram


@dataclass(frozen=True)
class HeldOut:
    """The N sequences on which every model is scored.

    Attributes:
        lengths: integer [N], tokens before truncation.
        clusters: integer [N], clusters of similar sequences; intervals resample them.
        baselines: name → nats [N].
        identities: float64 [N], identity to the nearest training protein; None if not requested.
        units: int64 [N], bytes or bases of the scored tokens; None for proteins.
    """

    lengths: NDArray[np.integer]
    clusters: NDArray[np.integer]
    baselines: Mapping[str, NDArray[np.float64]]
    identities: NDArray[np.float64] | None = None
    units: NDArray[np.int64] | None = None
    terms: Terms = PROTEINS


def summarise(
    scores: SequenceScores,
    others: Mapping[str, SequenceScores],
    held_out: HeldOut,
    lengths: LengthHistogram,
    *,
    given_relatives: GivenRelatives | None = None,
    quality: Quality | None,
    settings: dict[str, Any],
    digests: dict[str, str],
) -> Evaluation:
    """Corpus-level figures, all on the same residues.

    Args:
        scores: scores of the model.
        others: name → scores of another model.
        lengths: histogram of the training proteins.
        settings: recorded unchanged.
        digests: digests of the data; that of the masks is added.
    """
    residues, clusters, terms = scores.residues, held_out.clusters, held_out.terms
    within = residues, clusters, held_out.units

    def of_model(one: SequenceScores) -> dict[str, Any]:
        mlm15 = None if one.mlm15 is None else one.mlm15.perplexity
        return {"estimator": one.estimator, "perplexity_mlm15": mlm15}

    return Evaluation(
        estimator=f"{scores.estimator}, nats per {terms.scored}, conditional on the length",
        interval=f"95 % bootstrap over {terms.cluster}s",
        sequences=len(residues),
        residues=int(residues.sum()),
        clusters=len(np.unique(clusters)),
        model=replace(bound_of(scores.nats, *within), **of_model(scores)),
        length_nats=float(lengths.nats(held_out.lengths).mean()),
        baselines={
            name: compared_with(scores.nats, nats, *within)
            for name, nats in held_out.baselines.items()
        },
        others={
            name: replace(compared_with(scores.nats, other.nats, *within), **of_model(other))
            for name, other in others.items()
        },
        by_identity=None
        if held_out.identities is None
        else _by_identity(scores, held_out, held_out.identities),
        calibration={
            name: _calibration(one, clusters) for name, one in {MODEL: scores, **others}.items()
        },
        given_relatives=given_relatives,
        quality=quality,
        settings=settings,
        digests={**digests, "masks": scores.masks_digest},
        masking_version=MASKING_VERSION,
        terms=terms,
    )


def _by_identity(
    scores: SequenceScores, held_out: HeldOut, identities: NDArray[np.float64]
) -> dict[str, IdentityBin]:
    reference, bins = held_out.baselines[REFERENCE], identity_bins(identities)
    rows = {}
    for place, name in enumerate(IDENTITY_BINS):
        chosen = bins == place
        nats, within = scores.nats[chosen], (scores.residues[chosen], held_out.clusters[chosen])
        counts = int(chosen.sum()), int(within[0].sum()), len(np.unique(within[1]))
        bounds = (
            (bound_of(nats, *within), compared_with(nats, reference[chosen], *within))
            if counts[1]
            else (None, None)
        )
        rows[name] = IdentityBin(*counts, *bounds)
    return rows


def _calibration(scores: SequenceScores, clusters: NDArray[np.integer]) -> list[FractionBin]:
    rows = []
    for place in range(FRACTION_BINS):
        nats, residues = scores.calibration.nats[:, place], scores.calibration.residues[:, place]
        drawn = residues > 0
        if drawn.any():
            estimate = corpus_estimate(nats[drawn], residues[drawn], clusters[drawn])
            ends = place / FRACTION_BINS, (place + 1) / FRACTION_BINS
            rows.append(FractionBin(*ends, int(residues.sum()), estimate))
    return rows
