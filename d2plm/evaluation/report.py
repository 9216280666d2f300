"""The evaluation as one JSON document, as a table for people and as a picture."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.errors import DataError
from d2plm.evaluation.likelihood import MASKING_VERSION, Estimate, SequenceScores, corpus_estimate
from d2plm.generation.lengths import LengthHistogram

FORMAT_VERSION = 1
REFERENCE = "composition"
SMOOTHED_PARTS = 8  # the training curve is a running mean over this share of the run


def summarise(
    scores: SequenceScores,
    baselines: dict[str, NDArray[np.float64]],
    clusters: NDArray[np.integer],
    lengths: LengthHistogram,
    sequence_lengths: NDArray[np.integer],
    settings: dict[str, Any],
    digests: dict[str, str],
) -> dict[str, Any]:
    """Corpus-level figures, all on the same residues.

    Args:
        scores: the model's, of N sequences.
        baselines: name → nats [N].
        clusters: integer [N], homology clusters; intervals resample these.
        lengths: histogram of the training proteins.
        sequence_lengths: integer [N], residues of each sequence before any cut.
        settings: recorded as they are.
        digests: of the data; the masks' is added.

    Returns:
        JSON content: `model`, `baselines`, `paired` (model minus baseline, nats per residue: below
        zero the model is better), counts, settings and digests.
    """
    residues = scores.residues

    def likelihood(nats: NDArray[np.float64]) -> dict[str, Any]:
        estimate = corpus_estimate(nats, residues, clusters)
        perplexity = estimate.exp()
        return {
            "nelbo": estimate.value,
            "nelbo_interval": [estimate.low, estimate.high],
            "perplexity": perplexity.value,
            "perplexity_interval": [perplexity.low, perplexity.high],
        }

    return {
        "format_version": FORMAT_VERSION,
        "masking_version": MASKING_VERSION,
        "estimator": "exact-k bound, nats per canonical residue, conditional on the length",
        "interval": "95 % bootstrap over homology clusters",
        "sequences": len(residues),
        "residues": int(residues.sum()),
        "clusters": len(np.unique(clusters)),
        "model": {
            **likelihood(scores.nats),
            "perplexity_mlm15": float(np.exp(scores.mlm_nats.sum() / scores.mlm_residues.sum())),
            "length_nats_per_sequence": float(lengths.nats(sequence_lengths).mean()),
        },
        "baselines": {name: likelihood(nats) for name, nats in baselines.items()},
        "paired": {
            name: _difference(corpus_estimate(scores.nats - nats, residues, clusters))
            for name, nats in baselines.items()
        },
        "settings": settings,
        "digests": {**digests, "masks": scores.masks_digest},
    }


def _difference(estimate: Estimate) -> dict[str, Any]:
    return {
        "nelbo_difference": estimate.value,
        "interval": [estimate.low, estimate.high],
        "model_is_better": bool(estimate.high < 0),
    }


def table(evaluation: dict[str, Any]) -> str:
    """The figures as lines of text, best last."""
    rows = [(name, values) for name, values in evaluation["baselines"].items()]
    rows.append(("this model", evaluation["model"]))
    rows.sort(key=lambda row: -row[1]["perplexity"])
    lines = [f"{'':14} {'perplexity':>10}  {'95 % interval':^17}  nats/residue"]
    for name, values in rows:
        low, high = values["perplexity_interval"]
        lines.append(
            f"{name:14} {values['perplexity']:10.3f}  [{low:7.3f}, {high:7.3f}]"
            f"  {values['nelbo']:.4f}"
        )
    paired = evaluation["paired"][REFERENCE]
    low, high = paired["interval"]
    verdict = "below" if paired["model_is_better"] else "NOT significantly below"
    lines.append(
        f"model - {REFERENCE}: {paired['nelbo_difference']:+.4f} nats/residue "
        f"[{low:+.4f}, {high:+.4f}]: {verdict} the composition baseline"
    )
    lines.append(
        f"{evaluation['residues']:,} residues of {evaluation['sequences']:,} proteins in "
        f"{evaluation['clusters']:,} clusters; MLM-15 perplexity "
        f"{evaluation['model']['perplexity_mlm15']:.3f}"
    )
    return "\n".join(lines)


def read_metrics(file: Path) -> list[dict[str, float]]:
    """The rows that training logged, or none if there is no such file.

    Raises:
        DataError: if the file is damaged.
    """
    if not file.is_file():
        return []
    try:
        return [json.loads(line) for line in file.read_text().splitlines()]
    except ValueError as error:
        raise DataError(f"{file}: {error}; delete it, it is only a log") from error


def plot(
    evaluation: dict[str, Any], metrics: Sequence[dict[str, float]], file: Path, title: str
) -> None:
    """Training curve beside the baselines, and the final bound with its interval, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curve, bars) = pyplot.subplots(
        1, 2, figsize=(11, 4.2), width_ratios=(1.6, 1), layout="constrained"
    )
    shown = {name: evaluation["baselines"][name] for name in ("unigram", "5-gram", REFERENCE)}
    colours = {"unigram": "#999999", "5-gram": "#56B4E9", REFERENCE: "#E69F00"}
    trained = [(m["step"], m["loss"]) for m in metrics if "loss" in m]
    validated = [
        (m["step"], m["validation_perplexity"]) for m in metrics if "validation_perplexity" in m
    ]
    if trained:
        steps, losses = np.array(trained).T
        window = max(len(losses) // SMOOTHED_PARTS, 1)
        smooth = np.convolve(losses, np.full(window, 1 / window), "valid")
        curve.plot(
            steps[window - 1 :],
            np.exp(smooth),
            color="#0072B2",
            alpha=0.35,
            label="training (running mean)",
        )
    if validated:
        curve.plot(
            *zip(*validated, strict=True), "o-", color="#0072B2", label="held-out subset (EMA)"
        )
    for name, values in shown.items():
        curve.axhline(values["perplexity"], color=colours[name], ls="--", label=name)
    final = evaluation["model"]["perplexity"]
    curve.set(xlabel="optimizer step", ylabel="perplexity", title=title, ylim=(final - 0.3, 20.2))
    curve.legend(fontsize=8)
    rows = {**evaluation["baselines"], "this model": evaluation["model"]}
    for place, (name, values) in enumerate(rows.items()):
        low, high = values["perplexity_interval"]
        centre = values["perplexity"]
        colour = "#0072B2" if name == "this model" else colours.get(name, "#999999")
        bars.errorbar(
            [centre],
            [place],
            xerr=[[centre - low], [high - centre]],
            fmt="o",
            color=colour,
            capsize=3,
        )
        bars.annotate(
            f"{centre:.2f}",
            (centre, place),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    bars.set_yticks(range(len(rows)), list(rows))
    bars.set(xlabel="perplexity on held-out proteins (95 % interval)", xlim=(final - 0.5, 20.4))
    bars.invert_yaxis()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
