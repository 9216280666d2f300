"""An evaluation's figures as one JSON document, and the document as text for a terminal."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.number_text import difference_text
from d2plm.evaluation.findings import (
    FORMAT_VERSION,
    MODEL,
    against,
    judge,
    known_interval,
    likelihoods,
)
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
from d2plm.evaluation.terms import PROTEINS, REFERENCE, Terms, terms_of
from d2plm.generation.lengths import LengthHistogram


@dataclass(frozen=True)
class HeldOut:
    """The N sequences that every model is scored on.

    Attributes:
        lengths: integer [N], tokens of each before any cut.
        clusters: integer [N], clusters of similar ones; intervals resample these.
        baselines: name → nats [N].
        identities: float64 [N], to the nearest training protein; None where it was not asked for.
        units: int64 [N], bytes or bases of the tokens scored; None where there is no such unit.
        terms: what the evaluation calls things.
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
    residues, clusters, terms = scores.residues, held_out.clusters, held_out.terms
    rivals = {**held_out.baselines, **{name: other.nats for name, other in others.items()}}
    length_nats = float(lengths.nats(held_out.lengths).mean())
    return {
        "format_version": FORMAT_VERSION,
        "masking_version": MASKING_VERSION,
        "estimator": f"{scores.estimator}, nats per {terms.scored}, conditional on the length",
        "interval": f"95 % bootstrap over {terms.cluster}s",
        "sequences": len(residues),
        "residues": int(residues.sum()),
        "clusters": len(np.unique(clusters)),
        "model": {**_model(scores, held_out), "length_nats_per_sequence": length_nats},
        "others": {name: _model(other, held_out) for name, other in others.items()},
        "baselines": {
            name: _figures(nats, residues, held_out) for name, nats in held_out.baselines.items()
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
        **({} if held_out.units is None else {"terms": asdict(terms)}),
    }


def _figures(
    nats: NDArray[np.float64], residues: NDArray[np.integer], held_out: HeldOut
) -> dict[str, Any]:
    """The figures of nats [N], per token and per unit."""
    figures = bound_figures(nats, residues, held_out.clusters)
    if held_out.units is not None:
        bits = corpus_estimate(nats / np.log(2), held_out.units, held_out.clusters)
        key = f"bits_per_{held_out.terms.unit}"
        figures |= {key: bits.value, f"{key}_interval": bits.interval}
    return figures


def _model(scores: SequenceScores, held_out: HeldOut) -> dict[str, Any]:
    return {
        **_figures(scores.nats, scores.residues, held_out),
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
    parts = [bounds_table(evaluation)]
    if evaluation["by_identity"] is not None:
        parts.append("\n".join(_identity_table(evaluation["by_identity"])))
    if evaluation["given_relatives"] is not None:
        parts.append("\n".join(relatives_table(evaluation["given_relatives"])))
    if evaluation["quality"] is not None:
        parts.append(quality_table(evaluation["quality"]))
    return "\n\n".join(parts)


def bounds_table(evaluation: dict[str, Any]) -> str:
    """The likelihoods as lines of text, best last, and the model's comparison with each other."""
    rows, terms = likelihoods(evaluation), terms_of(evaluation)
    width = max(map(len, rows)) + 1
    per_unit = f"bits_per_{terms.unit}"
    heading = f"{'':{width}} {'perplexity':>10}  {'95 % interval':^17}  nats/{terms.token}"
    lines = [heading + ("" if terms.unit is None else f"  bits/{terms.unit}")]
    for name, values in rows.items():
        interval = known_interval(evaluation, name, "perplexity", "7.3f")
        line = f"{name:{width}} {values['perplexity']:10.3f}  {interval:18}  {values['nelbo']:.4f}"
        if per_unit in values:
            interval = known_interval(evaluation, name, per_unit, ".4f")
            line += f"  {values[per_unit]:12.4f} {interval}"
        lines.append(line.rstrip())
    finding = judge(evaluation)
    lines += [finding.headline, *finding.details]
    lines += [_rival(evaluation, name) for name in evaluation["others"]]
    mlm15 = evaluation["model"]["perplexity_mlm15"]
    lines.append(
        f"{evaluation['residues']:,} {terms.token}s of {evaluation['sequences']:,} "
        f"{terms.sequence}s in "
        f"{evaluation['clusters']:,} clusters"
        + ("" if mlm15 is None else f"; MLM-15 perplexity {mlm15:.3f}")
    )
    return "\n".join(lines)


def _rival(evaluation: dict[str, Any], name: str) -> str:
    _, _, outcome = against(evaluation, name)
    verdict = "not shown to differ" if outcome == "undecided" else outcome
    difference = difference_text(evaluation["paired"][name], terms_of(evaluation).token)
    return f"{MODEL} against {name}: {difference}: {verdict}"


def _identity_table(by_identity: dict[str, Any]) -> list[str]:
    lines = [f"{'nearest training protein':26}{'proteins':>9}{'perplexity':>12}{REFERENCE:>13}"]
    for name, row in by_identity.items():
        figures = ""
        if row["residues"]:
            perplexities = f"{row['model']['perplexity']:12.3f}{row[REFERENCE]['perplexity']:13.3f}"
            figures = f"{perplexities}   {difference_text(row['paired'])}"
        lines.append(f"{'identity ' + name:26}{row['sequences']:9,}{figures}")
    return lines
