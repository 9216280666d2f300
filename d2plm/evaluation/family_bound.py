"""Bounds and baselines on members of a family that no model and no baseline has seen.

Every baseline is fitted on the training members only. The profile HMM is built from all of them; a
model that takes relatives is given the few that a search finds closest to each protein.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core.estimate import difference_text
from d2plm.core.palette import BLUE, SKY, new_figure, save_figure
from d2plm.core.progress import Progress
from d2plm.core.vocabulary import Tokens
from d2plm.data.family import Family
from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import fit_baselines
from d2plm.evaluation.likelihood import bound_of, compared_with
from d2plm.evaluation.plots import plot_bounds
from d2plm.evaluation.result import Bounds, Compared

ADAPTED, BASE = "adapted model", "base model"
FAMILY_PROFILE, WITH_PAIRS = "profile HMM", "profile HMM with pairs"
SHOWN = ("unigram", "5-gram", "composition", "composition × 5-gram")  # counting baselines


def baseline_nats(
    train: SequenceStore, proteins: Sequence[Tokens], longest: int
) -> dict[str, NDArray[np.float64]]:
    """−log p of each protein's canonical residues under each baseline, nats, float64 [N].

    `WITH_PAIRS`, the distribution of new members, is an upper bound and includes the length.

    Args:
        train: members on which the baselines are fitted.
        proteins: N proteins, uint8 residue tokens.
        longest: number of leading residues counted per training member.
    """
    from d2plm.families.designs import FamilyDesigns  # imports HMMER
    from d2plm.families.profile_hmm import members_nats

    with_pairs = np.zeros(len(proteins))
    with Progress(f"scoring the {WITH_PAIRS}") as progress:
        law = FamilyDesigns(Family.of(list(train), 1), lambda text: progress.update(0, note=text))
        for place, tokens in enumerate(proteins):
            with_pairs[place] = law.bound(tokens, np.random.default_rng(place))
            progress.update(place + 1, len(proteins))
    baselines = fit_baselines(train, max_residues=longest)
    counted = [baselines.score(tokens) for tokens in proteins]
    return {
        **{name: np.array([scores[name] for scores in counted]) for name in SHOWN},
        FAMILY_PROFILE: members_nats(list(train), proteins),
        WITH_PAIRS: with_pairs,
    }


def compare_on_family(
    nats: Mapping[str, NDArray[np.float64]],
    residues: NDArray[np.int64],
    clusters: NDArray[np.integer],
) -> Bounds:
    """The bounds of all models and baselines, the best last.

    Args:
        nats: name → float64 [N]; must contain `ADAPTED`.
        residues: int64 [N], canonical residues.
        clusters: integer [N]; intervals resample them.
    """
    within = residues, clusters
    bounds = {
        name: bound_of(own, *within)
        if name == ADAPTED
        else compared_with(nats[ADAPTED], own, *within)
        for name, own in nats.items()
    }
    return dict(sorted(bounds.items(), key=lambda row: -row[1].perplexity.value))


def family_verdict(bounds: Bounds) -> str:
    """The comparison of the adapted model with the best baseline or base model, as a sentence."""
    name, best = [(name, one) for name, one in bounds.items() if isinstance(one, Compared)][-1]
    perplexities = (bound.perplexity.value for bound in (bounds[ADAPTED], best))
    against = " against ".join(f"{perplexity:.2f}" for perplexity in perplexities)
    return (
        f"{best.difference.verdict} the best of the others, {name}: perplexity {against}, "
        f"{difference_text(best.difference)}, paired"
    )


def plot_family(bounds: Bounds, file: Path) -> None:
    """Plot the perplexities with their intervals; raises DataError if it cannot be written."""
    figure = new_figure(8, 0.5 * len(bounds) + 1)
    axes = figure.subplots()
    plot_bounds(axes, bounds, {ADAPTED: BLUE, BASE: SKY}, ADAPTED)
    axes.set(xlabel="perplexity of members that no model has seen, 95 % interval")
    save_figure(figure, file)
