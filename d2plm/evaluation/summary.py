"""An evaluation's figures as one JSON document, and the document as text for a terminal."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.number_text import difference_text, interval_text
from d2plm.evaluation.findings import FORMAT_VERSION, MODEL, REFERENCE, against, judge, likelihoods
from d2plm.evaluation.given_relatives import relatives_table
from d2plm.evaluation.likelihood import (
    FRACTION_BINS,
    MASKING_VERSION,
    SequenceScores,
    bound_figures,
    corpus_estimate,
    paired_difference,
)
from d2plm.evaluation.nearest import IDENTITY_BINS, identity_bins
from d2plm.evaluation.quality import quality_table
from d2plm.generation.lengths import LengthHistogram


@dataclass(frozen=True)
class HeldOut:
    """The N proteins that every model is scored on.

    Attributes:
        lengths: integer [N], residues of each before any cut.
        clusters: integer [N], homology clusters; intervals resample these.
        baselines: name → nats [N].
        identities: float64 [N], to the nearest training protein; None where it was not asked for.
    """

    lengths: NDArray[np.integer]
    clusters: NDArray[np.integer]
    baselines: Mapping[str, NDArray[np.float64]]
    identities: NDArray[np.float64] | None = None


def summarise(
    scores: SequenceScores,
    others: Mapping[str, SequenceScores],
    held_out: HeldOut,
    lengths: LengthHistogram,
    *,
    given_relatives: dict[str, Any] | None = None,
    quality: dict[str, Any] | None,
    settings: dict[str, Any],
    digests: dict[str, str],
) -> dict[str, Any]:
    """Corpus-level figures, all on the same residues.

    Args:
        scores: the model's, of N sequences; `others`: those of further models, by name.
        lengths: histogram of the training proteins.
        given_relatives: from `evaluate_given_relatives`, or None.
        quality: from `compare_quality`, or None.
        settings: recorded as they are.
        digests: of the data; the masks' is added.

    Returns:
        JSON content: `model`, `others`, `baselines`, `paired` (model − each of these, nats per
        residue: below zero the model is better), `by_identity`, `calibration`, `quality`,
        counts, settings and digests. An interval is null for a single cluster.
    """
    residues, clusters = scores.residues, held_out.clusters
    rivals = {**held_out.baselines, **{name: other.nats for name, other in others.items()}}
    length_nats = float(lengths.nats(held_out.lengths).mean())
    return {
        "format_version": FORMAT_VERSION,
        "masking_version": MASKING_VERSION,
        "estimator": f"{scores.estimator}, nats per canonical residue, conditional on the length",
        "interval": "95 % bootstrap over homology clusters",
        "sequences": len(residues),
        "residues": int(residues.sum()),
        "clusters": len(np.unique(clusters)),
        "model": {**_model(scores, clusters), "length_nats_per_sequence": length_nats},
        "others": {name: _model(other, clusters) for name, other in others.items()},
        "baselines": {
            name: bound_figures(nats, residues, clusters)
            for name, nats in held_out.baselines.items()
        },
        "paired": {
            name: paired_difference(scores.nats, nats, residues, clusters)
            for name, nats in rivals.items()
        },
        "by_identity": None
        if held_out.identities is None
        else _by_identity(scores, held_out, held_out.identities),
        "calibration": {
            name: _calibration(one, clusters) for name, one in {MODEL: scores, **others}.items()
        },
        "given_relatives": given_relatives,
        "quality": quality,
        "settings": settings,
        "digests": {**digests, "masks": scores.masks_digest},
    }


def _model(scores: SequenceScores, clusters: NDArray[np.integer]) -> dict[str, Any]:
    return {
        **bound_figures(scores.nats, scores.residues, clusters),
        "estimator": scores.estimator,
        "perplexity_mlm15": None if scores.mlm15 is None else scores.mlm15.perplexity,
    }


def _by_identity(
    scores: SequenceScores, held_out: HeldOut, identities: NDArray[np.float64]
) -> dict[str, Any]:
    """The bound, and the composition baseline's, by identity to the nearest training protein."""
    reference, bins = held_out.baselines[REFERENCE], identity_bins(identities)
    rows: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(IDENTITY_BINS):
        chosen = bins == place
        rows[name] = {
            "sequences": int(chosen.sum()),
            "residues": int(scores.residues[chosen].sum()),
        }
        if rows[name]["residues"]:
            within = scores.residues[chosen], held_out.clusters[chosen]
            rows[name] |= {
                "clusters": len(np.unique(within[1])),
                "model": bound_figures(scores.nats[chosen], *within),
                REFERENCE: bound_figures(reference[chosen], *within),
                "paired": paired_difference(scores.nats[chosen], reference[chosen], *within),
            }
    return rows


def _calibration(scores: SequenceScores, clusters: NDArray[np.integer]) -> list[dict[str, Any]]:
    """Cross-entropy against the corrupted fraction: a row for each bin that holds a residue."""
    rows = []
    for place in range(FRACTION_BINS):
        nats, residues = scores.calibration.nats[:, place], scores.calibration.residues[:, place]
        drawn = residues > 0
        if drawn.any():
            estimate = corpus_estimate(nats[drawn], residues[drawn], clusters[drawn])
            rows.append(
                {
                    "fraction": [place / FRACTION_BINS, (place + 1) / FRACTION_BINS],
                    "predicted": int(residues.sum()),
                    "cross_entropy": estimate.value,
                    "interval": estimate.interval,
                }
            )
    return rows


def table(evaluation: dict[str, Any]) -> str:
    """The figures as lines of text: the likelihoods, best last, then what else was measured."""
    rows = likelihoods(evaluation)
    width = max(map(len, rows)) + 1
    lines = [f"{'':{width}} {'perplexity':>10}  {'95 % interval':^17}  nats/residue"]
    for name, values in rows.items():
        interval = interval_text(values["perplexity_interval"], "7.3f")
        lines.append(
            f"{name:{width}} {values['perplexity']:10.3f}  {interval:18}  {values['nelbo']:.4f}"
        )
    finding = judge(evaluation)
    lines += [finding.headline, *finding.details]
    lines += [_rival(evaluation, name) for name in evaluation["others"]]
    mlm15 = evaluation["model"]["perplexity_mlm15"]
    lines.append(
        f"{evaluation['residues']:,} residues of {evaluation['sequences']:,} proteins in "
        f"{evaluation['clusters']:,} clusters"
        + ("" if mlm15 is None else f"; MLM-15 perplexity {mlm15:.3f}")
    )
    if evaluation["by_identity"] is not None:
        lines += ["", *_identity_table(evaluation["by_identity"])]
    if evaluation.get("given_relatives") is not None:  # missing in those of earlier versions
        lines += ["", *relatives_table(evaluation["given_relatives"])]
    if evaluation["quality"] is not None:
        lines += ["", quality_table(evaluation["quality"])]
    return "\n".join(lines)


def _rival(evaluation: dict[str, Any], name: str) -> str:
    difference, interval, outcome = against(evaluation, name)
    verdict = "not shown to differ" if outcome == "undecided" else outcome
    return f"{MODEL} against {name}: {difference_text(difference, interval)}: {verdict}"


def _identity_table(by_identity: dict[str, Any]) -> list[str]:
    lines = [f"{'nearest training protein':26}{'proteins':>9}{'perplexity':>12}{REFERENCE:>13}"]
    for name, row in by_identity.items():
        figures = ""
        if row["residues"]:
            difference = difference_text(
                row["paired"]["nelbo_difference"], row["paired"]["interval"]
            )
            perplexities = f"{row['model']['perplexity']:12.3f}{row[REFERENCE]['perplexity']:13.3f}"
            figures = f"{perplexities}   {difference}"
        lines.append(f"{'identity ' + name:26}{row['sequences']:9,}{figures}")
    return lines
