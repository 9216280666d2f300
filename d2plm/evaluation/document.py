"""The evaluation's JSON document as everything that shows it reads it: names, order, intervals.

It is written by `report.summarise`. Nothing here needs torch, which the image that prepares the
data has not.
"""

from typing import Any

FORMAT_VERSION = 2
REFERENCE = "composition"  # the baseline that knows the amino acids of a protein, but no order
MODEL = "this model"


def likelihoods(evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The likelihoods by name: baselines, other models and the model, the best last."""
    rows = {**evaluation["baselines"], **evaluation["others"], MODEL: evaluation["model"]}
    return dict(sorted(rows.items(), key=lambda row: -row[1]["perplexity"]))


def likelihood_table(evaluation: dict[str, Any]) -> str:
    """`likelihoods` as a Markdown table, the model's row in bold."""
    lines = [
        "| | perplexity | 95 % interval | nats/residue |",
        "|:---|---:|:---:|---:|",
    ]
    for name, values in likelihoods(evaluation).items():
        cells = [
            name,
            f"{values['perplexity']:.3f}",
            interval_text(values["perplexity_interval"], ".3f"),
            f"{values['nelbo']:.4f}",
        ]
        shown = [f"**{cell}**" for cell in cells] if name == MODEL else cells
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def interval_text(interval: list[float] | None, form: str) -> str:
    """`[low, high]`; of one homology cluster there is none."""
    if interval is None:
        return "(one cluster)"
    low, high = interval
    return f"[{low:{form}}, {high:{form}}]"
