"""The bound −log p(protein | relatives) of held-out proteins, compared with profile HMMs.

The relatives are found by a search of the held-out proteins with the protein itself, so this
measures predictions for members of known families. There are two controls: unrelated proteins of
the same lengths must not help, and the order of the relatives must not matter.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from d2plm.core.progress import Progress
from d2plm.core.vocabulary import Tokens
from d2plm.data.relatives import LONGEST_RELATIVE, RelativesIndex
from d2plm.evaluation.likelihood import SequenceScores, bound_of, compared_with, corpus_estimate
from d2plm.evaluation.result import ALIGNED, PROFILE, Compared, GivenRelatives, RelativesBelow
from d2plm.settings.evaluation import EvaluationSettings

BASELINES = (PROFILE, ALIGNED)
PROFILES_VERSION = 1  # version of the cached baselines
ORDER_SAMPLE = 64  # number of proteins also scored with their relatives in another order

Indices = list[list[int]]
Compute = Callable[[], NDArray[np.float64]]
# (progress text, proteins, relatives of each) → scores, with the same masks in every call
Score = Callable[[str, Sequence[Tokens], Sequence[Sequence[Tokens]]], SequenceScores]


def evenly_spaced(count: int, number: int | None) -> list[int]:
    """At most `number` of `count` indices, all if it is None."""
    number = min(number or count, count)
    return [index * count // number for index in range(number)]


def evaluate_given_relatives(
    score: Score,
    collection: Sequence[Tokens],
    clusters: NDArray[np.integer],
    index: RelativesIndex,
    settings: EvaluationSettings,
    longest: int | None = None,
    keep: Callable[[Compute], NDArray[np.float64]] = lambda compute: compute(),
) -> GivenRelatives:
    """Figures of proteins given their relatives, including proteins without relatives.

    Args:
        collection: N proteins, uint8 residue tokens.
        clusters: integer [N]; intervals resample them.
        index: the relatives of each protein within the collection.
        settings: which proteins are scored, and which relatives each is given.
        longest: number of leading residues scored per protein; None for all.
        keep: caches the result of the baselines, which do not depend on the model.
    """
    scored = evenly_spaced(len(collection), settings.relatives_proteins)
    targets = [collection[number][:longest] for number in scored]

    def of(which: Indices) -> list[list[Tokens]]:
        return [[collection[i] for i in own] for own in which]

    def nearest(identity: float, most: int) -> Indices:
        return [index.below(number, identity)[:most].tolist() for number in scored]

    most, widest_identity = settings.max_relatives, settings.relatives_below[0]
    chosen = {identity: nearest(identity, most) for identity in settings.relatives_below}
    profiles = keep(lambda: _profile_nats(targets, collection, [*chosen.values()]))
    alone = score("alone", targets, of([[] for _ in targets]))
    within = alone.residues, clusters[scored]
    rows = []
    for (identity, which), own_profiles in zip(chosen.items(), profiles, strict=True):
        nats = score(f"given relatives below {identity:.0%}", targets, of(which)).nats
        rows.append(
            RelativesBelow(
                identity,
                with_relatives=sum(1 for own in which if own),
                model=bound_of(nats, *within),
                baselines={
                    name: compared_with(nats, own, *within)
                    for name, own in zip(BASELINES, own_profiles, strict=True)
                },
            )
        )
    widest = chosen[widest_identity]
    by_depth = {}
    for depth in settings.relatives_depths:
        given = of(nearest(widest_identity, depth))
        scores = score(f"at most {depth} relatives", targets, given)
        by_depth[depth] = bound_of(scores.nats, *within)
    unrelated = unrelated_of_same_length(scored, widest, index, collection, clusters)
    with_unrelated = score("given unrelated proteins", targets, of(unrelated))
    change = corpus_estimate(with_unrelated.nats - alone.nats, *within)
    several = [n for n, own in enumerate(widest) if len(own) > 1][:ORDER_SAMPLE]
    return GivenRelatives(
        most,
        proteins=len(targets),
        alone=bound_of(alone.nats, *within),
        below=rows,
        unrelated=Compared(**vars(bound_of(with_unrelated.nats, *within)), difference=change),
        order_difference=_order_matters_by(score, several, of(widest), targets),
        by_depth=by_depth,
    )


def _profile_nats(
    targets: Sequence[Tokens], collection: Sequence[Tokens], chosen: Sequence[Indices]
) -> NDArray[np.float64]:
    """float64 [identities, BASELINES, N]: −log p of the targets given their relatives."""
    from d2plm.families.profile_hmm import (  # imports HMMER
        alignment_nats,
        log_ratios,
        mixture_nats,
    )

    collection = [one[:LONGEST_RELATIVE] for one in collection]
    pairs = {(n, i) for which in chosen for n, own in enumerate(which) for i in own}
    with Progress("scoring profile HMMs") as progress:
        ratios = log_ratios(targets, collection, sorted(pairs), progress=progress.update)
    # Many proteins are given the same relatives at several identities.
    distinct = sorted({(n, tuple(own)) for which in chosen for n, own in enumerate(which)})
    with Progress("scoring HMMs of alignments") as progress:
        nats = alignment_nats(
            [targets[n] for n, _ in distinct],
            [[collection[i] for i in own] for _, own in distinct],
            progress=progress.update,
        )
    aligned = dict(zip(distinct, nats.tolist(), strict=True))
    rows = [
        [mixture_nats(targets, which, ratios), [aligned[n, tuple(o)] for n, o in enumerate(which)]]
        for which in chosen
    ]
    return np.array(rows)


def unrelated_of_same_length(
    targets: Sequence[int],
    which: Indices,
    index: RelativesIndex,
    collection: Sequence[Tokens],
    clusters: NDArray[np.integer],
) -> Indices:
    """For each relative in `which`, a protein of similar length, no hit and in another cluster."""
    order = np.argsort([len(tokens) for tokens in collection], kind="stable")
    rank = np.argsort(order)
    found: Indices = []
    for target, own in zip(targets, which, strict=True):
        taken = {target, *index.below(target, np.inf).tolist()}
        chosen: list[int] = []
        for relative in own:
            place = int(rank[relative])
            by_distance = (
                int(order[p])
                for step in range(1, len(order))
                for p in (place - step, place + step)
                if 0 <= p < len(order)
            )
            free = (i for i in by_distance if i not in taken and clusters[i] != clusters[target])
            other = next(free, None)
            if other is not None:
                taken.add(other)
                chosen.append(other)
        found.append(chosen)
    return found


def _order_matters_by(
    score: Score,
    several: Sequence[int],
    given: Sequence[Sequence[Tokens]],
    sequences: Sequence[Tokens],
) -> float | None:
    """The largest change from reversing the order of the relatives, nats per residue."""
    if not several:
        return None
    own = [sequences[n] for n in several]
    ordered = score("relatives in order", own, [given[n] for n in several])
    reversed_ = score("relatives in reverse", own, [given[n][::-1] for n in several])
    differences = np.abs(ordered.nats - reversed_.nats) / np.maximum(ordered.residues, 1)
    return float(differences.max())
