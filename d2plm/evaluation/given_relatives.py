"""The bound of held-out proteins given their relatives, beside profile HMMs of the same relatives.

What is bounded is −log p(protein | relatives): the relatives are those that a search found with the
protein itself, among the held-out ones, so the figure says how well a member of a known family is
predicted, and nothing of a protein without relatives. Two controls go with it: unrelated proteins
of the same lengths must give nothing, and the order of the relatives must not matter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import require, require_number
from d2plm.core.number_text import difference_text, interval_text
from d2plm.core.progress import Progress
from d2plm.data.relatives import RelativesIndex
from d2plm.evaluation.likelihood import SequenceScores, corpus_estimate

PROFILE = "profile HMMs"
ORDER_SAMPLE = 64  # proteins whose relatives are given in another order, too

Tokens = NDArray[np.uint8]
Indices = list[list[int]]
# (what is scored, proteins, relatives of each) → scores with the same masks at every call
Score = Callable[[str, Sequence[Tokens], Sequence[Sequence[Tokens]]], SequenceScores]


@dataclass(frozen=True, slots=True)
class RelativesChoice:
    """Which relatives a protein is given.

    Attributes:
        identities: bounds of the alignment's identity, each evaluated by itself, 0 … 1.
        most: of each protein, the surest first.
        masks_per_sequence: draws of the bound.
    """

    identities: tuple[float, ...] = (0.9, 0.7, 0.5)
    most: int = 8
    masks_per_sequence: int = 2

    def __post_init__(self) -> None:
        for identity in self.identities:
            require_number("identities", identity, low=0, high=1, low_open=True)
        ordered = sorted({*self.identities}, reverse=True)
        require([*self.identities] == ordered, "identities", self.identities, "falling numbers")
        require_number("most", self.most, integer=True, low=1)
        require_number("masks_per_sequence", self.masks_per_sequence, integer=True, low=1)


def evaluate_given_relatives(
    score: Score,
    sequences: Sequence[Tokens],
    clusters: NDArray[np.integer],
    index: RelativesIndex,
    choice: RelativesChoice = RelativesChoice(),
) -> dict[str, Any]:
    """Figures of every protein given its relatives, those without any included.

    Args:
        score: of the model.
        sequences: what is scored of each of N proteins.
        clusters: integer [N]; intervals resample these.
        index: the relatives of each protein among the others.

    Returns:
        JSON content: `below`, a row for each identity with the model, the profile HMMs and their
        paired difference, nats per residue; `controls`.
    """

    from d2plm.evaluation.profile import log_ratios, mixture_nats  # HMMER, where it is needed

    def of(which: Indices) -> list[list[Tokens]]:
        return [[sequences[i] for i in own] for own in which]

    chosen = {
        identity: [
            index.below(number, identity)[: choice.most].tolist()
            for number in range(len(sequences))
        ]
        for identity in choice.identities
    }
    pairs = {(n, i) for which in chosen.values() for n, own in enumerate(which) for i in own}
    with Progress("scoring profile HMMs") as progress:
        ratios = log_ratios(sequences, sequences, sorted(pairs), progress=progress.update)
    alone = score("alone", sequences, of([[] for _ in sequences]))
    residues = alone.residues

    def figures(nats: NDArray[np.float64]) -> dict[str, Any]:
        estimate = corpus_estimate(nats, residues, clusters)
        return {
            "nelbo": estimate.value,
            "perplexity": estimate.exp().value,
            "perplexity_interval": estimate.exp().interval,
        }

    def paired(nats: NDArray[np.float64], other: NDArray[np.float64]) -> dict[str, Any]:
        estimate = corpus_estimate(nats - other, residues, clusters)
        return {"nelbo_difference": estimate.value, "interval": estimate.interval}

    rows = []
    for identity, which in chosen.items():
        given = score(f"given relatives below {identity:.0%}", sequences, of(which))
        profile = mixture_nats(sequences, which, ratios)
        rows.append(
            {
                "identity": identity,
                "with_relatives": sum(1 for own in which if own),
                "model": figures(given.nats),
                PROFILE: figures(profile),
                "paired": {
                    PROFILE: paired(given.nats, profile),
                    "alone": paired(given.nats, alone.nats),
                },
            }
        )
    widest = chosen[choice.identities[0]]
    unrelated = unrelated_of_same_length(widest, index, sequences, clusters)
    with_unrelated = score("given unrelated proteins", sequences, of(unrelated))
    several = [n for n, own in enumerate(widest) if len(own) > 1][:ORDER_SAMPLE]
    return {
        "choice": {
            "identities": [*choice.identities],
            "most": choice.most,
            "masks_per_sequence": choice.masks_per_sequence,
        },
        "alone": figures(alone.nats),
        "below": rows,
        "controls": {
            "unrelated": {
                "model": figures(with_unrelated.nats),
                "paired": {"alone": paired(with_unrelated.nats, alone.nats)},
            },
            "order": _order_matters_by(score, several, of(widest), sequences),
        },
    }


def unrelated_of_same_length(
    which: Indices,
    index: RelativesIndex,
    sequences: Sequence[Tokens],
    clusters: NDArray[np.integer],
) -> Indices:
    """In place of each relative the protein nearest in length of no hit and of another cluster."""
    order = np.argsort([len(tokens) for tokens in sequences], kind="stable")
    rank = np.argsort(order)
    found: Indices = []
    for target, own in enumerate(which):
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
) -> dict[str, Any]:
    """The largest difference that turning the relatives' order makes, nats per residue."""
    if not several:
        return {"sequences": 0, "largest_difference": None}
    own = [sequences[n] for n in several]
    forth = score("relatives in order", own, [given[n] for n in several])
    back = score("relatives turned", own, [given[n][::-1] for n in several])
    differences = np.abs(forth.nats - back.nats) / np.maximum(forth.residues, 1)
    return {"sequences": len(own), "largest_difference": float(differences.max())}


def relatives_table(given: Mapping[str, Any]) -> list[str]:
    """The figures as lines of text."""
    head = f"{'given relatives':26}{'proteins':>9}{'perplexity':>12}  {'95 % interval':^17}"
    lines = [f"{head}{PROFILE:>14}   difference"]
    for row in given["below"]:
        interval = interval_text(row["model"]["perplexity_interval"], "7.3f")
        difference = row["paired"][PROFILE]
        text = difference_text(difference["nelbo_difference"], difference["interval"])
        below = f"identity below {row['identity']:.0%}"
        lines.append(
            f"{below:26}{row['with_relatives']:9,}"
            f"{row['model']['perplexity']:12.3f}  {interval:17}"
            f"{row[PROFILE]['perplexity']:14.3f}   {text}"
        )
    lines.append(f"{'none':35}{given['alone']['perplexity']:12.3f}")
    unrelated = given["controls"]["unrelated"]
    change = unrelated["paired"]["alone"]
    text = difference_text(change["nelbo_difference"], change["interval"])
    lines.append(
        f"{'unrelated proteins instead':35}{unrelated['model']['perplexity']:12.3f}"
        f"   from none: {text}"
    )
    order = given["controls"]["order"]
    if order["sequences"]:
        lines.append(
            "another order of the relatives changes at most "
            f"{order['largest_difference']:.1e} nats per residue"
        )
    return lines
