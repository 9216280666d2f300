"""Effects of mutations from the alignment of a protein's relatives, without any training.

score = log profile + k · pairs + 0.3 · BLOSUM62, mutant minus wild type, with k increasing with the
effective number of members. Pair terms also prefer the residues that a protein has by descent, most
in variable columns, which says nothing about effects. The members' mean preference for their own
residues is therefore subtracted, weighted by the tree's share in predicting left-out members
(`share_of_tree`).

Shape suffixes: L columns, 20 letters.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
from numpy.typing import NDArray

from d2plm.core.number_text import counted
from d2plm.core.substitution import blosum62
from d2plm.core.vocabulary import CANONICAL_START, Tokens
from d2plm.families.alignment import (
    COVERAGE,
    GAP,
    Letters,
    align_to,
    column_profile,
    letters_of,
    observations,
    sequence_weights,
)
from d2plm.families.pairs import (
    MEMBERS,
    PREDICTED,
    PairTable,
    best_match_weight,
    neighbours,
    sampled,
    share_of_tree,
    splits,
)
from d2plm.families.variants import Variant

# Chosen by measurement, docs/science.md.
MOST_PAIRS, HALF_OF_PAIRS = 2.0, 40.0  # maximum k, effective number with half of it
BLOSUM_SHARE = 0.3
FEWEST_MEMBERS = 4  # minimum number of members for pairs

log = logging.getLogger(__name__)

Table = NDArray[np.float64]


@dataclass(frozen=True)
class FamilyEffects:
    """The scores of a protein's substitutions.

    Attributes:
        letters: int8 [L], the protein.
        aligned: int8 [N, L], the members used, see `observations`.
        weights: float64 [N]; their sum is the effective number of members.
        note: called with a progress message; thousands of members take minutes.
    """

    letters: Letters
    aligned: Letters
    weights: Table
    note: Callable[[str], None] = lambda text: None

    @classmethod
    def of(
        cls,
        protein: Tokens,
        relatives: Sequence[Tokens],
        columns: NDArray[np.uint8] | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> "FamilyEffects":
        """From relatives aligned to a protein, uint8 [L]; copies of the protein are left out."""
        beside, letters = align_to(protein, relatives, columns, note), letters_of(protein)
        aligned = observations(letters, beside)
        note(f"comparing {len(aligned):,} relatives")
        found = cls(letters, aligned, sequence_weights(aligned), note)
        short = int(((beside < GAP).mean(1) < COVERAGE).sum())
        log.log(
            logging.INFO if len(aligned) >= FEWEST_MEMBERS else logging.WARNING,
            "%s %s: %s used, effective number %.1f; not used: %s with less than half of the "
            "protein, %s equal to it or to another%s",
            counted(len(relatives), "relative"),
            "aligned to the protein" if columns is None else "in their file's alignment",
            f"{len(aligned):,}",
            found.effective_number,
            f"{short:,}",
            f"{len(relatives) - short - len(aligned):,}",
            "" if len(aligned) >= FEWEST_MEMBERS else "; too few for pairs of columns",
        )
        return found

    @property
    def effective_number(self) -> float:
        return float(self.weights.sum())

    def effects(self, variants: Sequence[Variant]) -> dict[str, Table]:
        """float64 [N]: `score` and each of its terms, higher for likelier variants."""
        pairs = np.zeros(len(variants))
        if len(self.aligned) >= FEWEST_MEMBERS:
            pairs = summed_changes(self._pairs[1], self.letters, variants)
            pairs += self._interactions(variants)
        found = {
            "profile": summed_changes(self.log_profile, self.letters, variants),
            "pairs": self._pair_scale * pairs,
            "blosum62": blosum62_effects(self.letters, variants),
        }
        score = found["profile"] + found["pairs"] + BLOSUM_SHARE * found["blosum62"]
        return {"score": score, **found}

    @cached_property
    def log_profile(self) -> Table:
        """float64 [L, 20]: log of the column profile; of the protein alone without members."""
        if not len(self.aligned):
            return np.log(column_profile(self.letters[None], np.ones(1)))
        return np.log(column_profile(self.aligned, self.weights))

    @property
    def _pair_scale(self) -> float:
        return MOST_PAIRS * self.effective_number / (self.effective_number + HALF_OF_PAIRS)

    @cached_property
    def _pairs(self) -> tuple[PairTable, Table]:
        """The pairs, and their term [L, 20] of the protein with its own residues lowered."""
        random, profile_L20 = np.random.default_rng(0), np.exp(self.log_profile)
        chosen, weights = sampled(self.weights, MEMBERS, random)
        aligned = self.aligned[chosen]
        match_weight = best_match_weight(aligned, weights, profile_L20, random)
        among = aligned, weights, profile_L20
        predicted = neighbours(aligned, *among, match_weight, np.arange(len(aligned)))
        done, total = count(1), 2 * (2 * splits(len(aligned)) + 1) * len(self.letters)

        def advance() -> None:
            self.note(f"pairs of columns, {next(done) / total:.0%}")

        table = PairTable(*among, predicted, advance)
        places, shares = sampled(weights, PREDICTED[2], random)
        sample = aligned[places]
        terms_L20, *of_sample = table.terms(np.concatenate([self.letters[None], sample]))
        terms, filled = np.array(of_sample), shares[:, None] * (sample < GAP)
        own = np.take_along_axis(terms, np.minimum(sample, GAP - 1)[..., None], 2)[..., 0]
        preferred = (filled * (own - (terms * profile_L20).sum(2))).sum(0)
        mean_L = preferred / np.maximum(filled.sum(0), 1e-9)
        share = share_of_tree(aligned, weights, match_weight, random, advance)
        known = np.flatnonzero(self.letters < GAP)
        terms_L20[known, self.letters[known]] -= share * mean_L[known]
        return table, terms_L20

    def _interactions(self, variants: Sequence[Variant]) -> Table:
        """float64 [N]: the interactions between the changes of a variant.

        Half of the change of each changed column's term due to the other changes: for symmetric
        log-odds, the sum is the difference of energy.
        """
        added = np.zeros(len(variants))
        of_column: dict[int, list[int]] = {}
        for number, variant in enumerate(variants):
            for i in variant.positions if len(variant.positions) > 1 else ():
                of_column.setdefault(i, []).append(number)
        (table, _), letters = self._pairs, self.letters
        for i, numbers in of_column.items():
            odds = table.log_odds(i) * table.coupling[i][None, :, None]
            odds *= table.scales(i, (letters < GAP)[None])[0] / 2
            odds = np.pad(odds, ((0, 1), (0, 0), (0, 1)))  # for non-canonical residues
            for number in numbers:
                places, mutants = (np.array(one) for one in _parts(variants[number]))
                change = odds[mutants[places == i][0]] - odds[letters[i]]
                added[number] += (change[places, mutants] - change[places, letters[places]]).sum()
        return added


def blosum62_effects(letters: Letters, variants: Sequence[Variant]) -> Table:
    """float64 [N]: Σ_i of BLOSUM62's log-odds of mutant and wild type, minus that of no change."""
    return summed_changes(np.pad(blosum62(), ((0, 1), (0, 0)))[letters], letters, variants)


def summed_changes(term: Table, letters: Letters, variants: Sequence[Variant]) -> Table:
    """float64 [N]: Σ_i term[i, mutant] − term[i, own] over the changes of each variant.

    Args:
        term: float64 [L, 20]; 0 for own residues that are not canonical.
        letters: int8 [L], the own residues.
    """
    padded = np.pad(term, ((0, 0), (0, 1)))
    change = term - padded[np.arange(len(term)), letters][:, None]
    return np.array([change[_parts(variant)].sum() for variant in variants])


def _parts(variant: Variant) -> tuple[list[int], list[int]]:
    return [*variant.positions], [mutant - CANONICAL_START for mutant in variant.mutants]
