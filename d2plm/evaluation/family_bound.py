"""Bounds and baselines on members of a family that neither models nor baselines have seen.

Every baseline is fitted only on the training members. The profile HMM is built from all of them; a
model that takes relatives is given a few for each protein, the closest ones found by a search.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.number_text import difference_text, interval_text
from d2plm.core.palette import BLUE, GREY, SKY, new_figure, save_figure
from d2plm.core.vocabulary import Tokens
from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import fit_baselines
from d2plm.evaluation.findings import against
from d2plm.evaluation.likelihood import bound_figures, paired_difference

ADAPTED, BASE = "adapted model", "base model"
FAMILY_PROFILE = "profile HMM"
SHOWN = ("unigram", "5-gram", "composition", "composition × 5-gram")  # of the counting baselines


def baseline_nats(
    train: SequenceStore, proteins: Sequence[Tokens], longest: int
) -> dict[str, NDArray[np.float64]]:
    """−log p of each protein's canonical residues under each baseline, nats, float64 [N].

    Args:
        train: the members on which the baselines are fitted.
        proteins: uint8 residue tokens.
        longest: number of residues counted of a training member, from its start.
    """
    from d2plm.families.profile_hmm import members_nats  # HMMER, where it is needed

    baselines = fit_baselines(train, max_residues=longest)
    counted = [baselines.score(tokens) for tokens in proteins]
    return {
        **{name: np.array([scores[name] for scores in counted]) for name in SHOWN},
        FAMILY_PROFILE: members_nats(list(train), proteins),
    }


def compare_on_family(
    nats: Mapping[str, NDArray[np.float64]],
    residues: NDArray[np.int64],
    clusters: NDArray[np.integer],
) -> dict[str, Any]:
    """Figures of all scores of N proteins, the best last.

    Args:
        nats: float64 [N] by name, `ADAPTED` among them.
        residues: int64 [N], canonical residues.
        clusters: integer [N]; intervals resample these.

    Returns:
        JSON content: by name the nats per residue and the perplexity, each with its 95 % interval,
        and the paired difference of the adapted model from it, nats per residue, with its interval.
    """
    figures = {
        name: bound_figures(own, residues, clusters)
        | paired_difference(nats[ADAPTED], own, residues, clusters)
        for name, own in nats.items()
    }
    return dict(sorted(figures.items(), key=lambda row: -row[1]["perplexity"]))


def verdict(figures: Mapping[str, Any]) -> str:
    """The adapted model against the best of the baselines and the base model, as a sentence."""
    others = [name for name in figures if name != ADAPTED]
    best = others[-1]
    _, _, outcome = against({"paired": figures}, best)
    standing = {"better": "better than", "worse": "worse than"}
    perplexity, other = (figures[name]["perplexity"] for name in (ADAPTED, best))
    return (
        f"{standing.get(outcome, 'not shown to differ from')} the best of the others, {best}: "
        f"perplexity {perplexity:.2f} against {other:.2f}, {difference_text(figures[best])}, paired"
    )


def family_table(figures: Mapping[str, Any]) -> str:
    """The figures as a Markdown table, the best last."""
    lines = [
        "| | perplexity | 95 % interval | adapted model's difference, nats/residue |",
        "|:---|---:|:---:|:---|",
    ]
    for name, row in figures.items():
        interval = interval_text(row["perplexity_interval"], ".2f")
        shown = "" if name == ADAPTED else difference_text(row).replace(" nats/residue", "")
        lines.append(f"| {name} | {row['perplexity']:.2f} | {interval} | {shown} |")
    return "\n".join(lines)


def plot_family(figures: Mapping[str, Any], file: Path) -> None:
    """Draw the perplexities with their intervals.

    Raises:
        DataError: if the file cannot be written.
    """
    figure = new_figure(8, 0.5 * len(figures) + 1)
    axes = figure.subplots()
    for place, (name, row) in enumerate(figures.items()):
        colour = BLUE if name == ADAPTED else SKY if name == BASE else GREY
        low, high = row["perplexity_interval"] or [row["perplexity"]] * 2
        error = [[row["perplexity"] - low], [high - row["perplexity"]]]
        axes.barh(place, row["perplexity"], color=colour, xerr=error)
        axes.text(high + 0.2, place, f"{row['perplexity']:.2f}", va="center", fontsize=9)
    axes.set_yticks(range(len(figures)), list(figures))
    axes.set(xlabel="perplexity of members that no model has seen", ylim=(len(figures) - 0.5, -0.5))
    save_figure(figure, file)
