"""Pairs of columns: what the other residues of a protein say about one, beyond profile and tree.

Members share residues by descent, not only because residues depend on each other. Pair counts are
therefore compared with those expected for independent residues given each member's nearest
relatives: for a family evolved on a tree with independent sites the log-odds almost vanish, and for
independent samples with coupled sites they are those of the columns.

Shape suffixes: N members, Q queries, L columns, 20 letters.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from d2plm.core.substitution import blosum62
from d2plm.families.alignment import GAP, SAME_OBSERVATION, Floats, Letters, column_profile, one_hot
from d2plm.families.profile_hmm import amino_frequencies

# Chosen by measurement, docs/science.md.
MATCH_WEIGHTS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)  # candidates, nats per equal residue
PRIOR = 3.0  # pseudo-counts of the profile in the neighbours' prediction
PAIR_PRIOR = 2.0  # pseudo-counts of independence
SUBSTITUTION_SHARE = 0.3  # share of counts borrowed from similar residues (BLOSUM62)
TOTAL_COUPLING = 3.5  # maximum sum of a residue's couplings
MEMBERS = 800  # larger families are sampled by weight
PREDICTED = 60, 150, 100  # number of members for match weight, evidence, mean preference
SPLITS = 8  # maximum number of splits into halves; large families need fewer
NO_EVIDENCE = 0.02  # nats per residue added to both gains

Frequencies = NDArray[np.floating]  # [L, 20] or [Q, L, 20]


def neighbours(
    queries: Letters,
    members: Letters,
    weights: NDArray[np.float64],
    profile: Frequencies,
    match_weight: float,
    places: NDArray[np.int64] | None = None,
) -> Frequencies:
    """float64 [Q, L, 20]: the members' prediction of each column of a sequence, that column hidden.

    Args:
        queries: int8 [Q, L].
        members: int8 [N, L], with weights float64 [N].
        profile: float64 [L, 20] prior, worth PRIOR observations.
        match_weight: increase of a member's log weight per equal residue.
        places: int64 [Q], the queries' own rows among the members, which are left out.
    """
    hot = one_hot(members).astype(np.float64)
    log_votes = np.log(weights) + match_weight * (one_hot(queries) @ hot.T)
    if places is not None:
        log_votes[np.arange(len(queries)), places] = -np.inf
    # float64, as only members with far smaller votes may have a letter in a column.
    votes = np.exp(log_votes - log_votes.max(1, keepdims=True))
    counts, squares = ((power @ hot).reshape(*queries.shape, GAP) for power in (votes, votes**2))
    query, column = np.nonzero(queries < GAP)
    own = query, column, queries[query, column]
    counts[own] *= np.exp(-match_weight)  # the hidden column is not a match
    squares[own] *= np.exp(-2 * match_weight)
    total = np.maximum(counts.sum(2, keepdims=True), 1e-100)
    depth = total**2 / np.maximum(squares.sum(2, keepdims=True), 1e-200)
    return np.asarray((depth * counts / total + PRIOR * profile) / (depth + PRIOR))


def best_match_weight(
    aligned: Letters,
    weights: NDArray[np.float64],
    profile: Frequencies,
    random: np.random.Generator,
) -> float:
    """The one of MATCH_WEIGHTS that predicts members best from all others."""
    places, shares = sampled(weights, PREDICTED[0], random)
    filled = aligned[places] < GAP
    letters, each = aligned[places][filled], np.broadcast_to(shares[:, None], filled.shape)[filled]

    def nats(match_weight: float) -> float:
        predicted = neighbours(aligned[places], aligned, weights, profile, match_weight, places)
        own = predicted[filled][np.arange(len(letters)), letters]
        return float(np.average(-np.log(own), weights=each))

    return min(MATCH_WEIGHTS, key=nats)


class PairTable:
    """Log-odds of the residues of every two columns, computed a column at a time.

    log_odds_i(a, j, b) = log q_ij(b | a) / r_ij(b | a), with q the members' weighted counts, and r
    their expectation given the members' neighbours; rare residues borrow the counts of similar
    ones. `coupling` [L, L] is softplus of the standard scores of the columns' information,
    corrected by the average product (Dunn et al., doi:10.1093/bioinformatics/btm604), mean 1.

    Args:
        aligned: int8 [N, L] members.
        weights: float64 [N].
        profile: float64 [L, 20].
        predicted: [N, L, 20], prediction of each member by its `neighbours`.
        advance: called after each column, by the constructor and by `terms`.
    """

    def __init__(
        self,
        aligned: Letters,
        weights: NDArray[np.float64],
        profile: Frequencies,
        predicted: Frequencies,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        filled = (aligned < GAP)[..., None]
        self.length, root = aligned.shape[1], np.sqrt(weights).astype(np.float32)[:, None]
        self.seen = one_hot(aligned) * root
        expected = np.where(filled, predicted, 0).reshape(len(aligned), -1) * root
        self.expected: Floats = expected.astype(np.float32)
        counts = (self.seen * root).sum(0).reshape(self.length, GAP)
        column = (counts + 2 * profile) / (counts.sum(1, keepdims=True) + 2)
        self.column: Floats = column.astype(np.float32)
        self.replaced = replacement().astype(np.float32)
        self.advance = advance
        information = np.zeros((self.length, self.length))
        for i in range(self.length - 1):
            information[i, i + 1 :] = information[i + 1 :, i] = self._information(i)
            advance()
        self.coupling = _coupling(information)

    def _counts(self, i: int, first: int = 0) -> tuple[Floats, Floats]:
        """float32 [20, L - first, 20]: seen and expected pairs of column i with columns ≥ first."""
        own = slice(GAP * i, GAP * (i + 1))
        seen: Floats = self.seen[:, own].T @ self.seen[:, GAP * first :]
        expected: Floats = self.expected[:, own].T @ self.expected[:, GAP * first :]
        return seen.reshape(GAP, -1, GAP), expected.reshape(GAP, -1, GAP)

    def _information(self, i: int) -> Floats:
        """float32 [L - i - 1]: Σ p log p / e over the pairs of column i with each later one."""
        seen, expected = (c + 1e-3 for c in self._counts(i, i + 1))
        p, e = (c / c.sum((0, 2), keepdims=True) for c in (seen, expected))
        return np.asarray((p * np.log(p / e)).sum((0, 2)))

    def log_odds(self, i: int) -> Floats:
        """float32 [20, L, 20]: log q / r of residue a in column i and b in column j."""
        counts, expected = self._counts(i)
        both = counts.sum(0)
        rate = (both + 2 * self.column) / (both.sum(1, keepdims=True) + 2)
        independent = self._given(expected, rate[None])
        return np.log(self._given(counts, independent) / independent).astype(np.float32)

    def _given(self, counts: Floats, prior: Frequencies) -> Frequencies:
        """[20, L, 20]: p(b in column j | a) from smoothed counts and PAIR_PRIOR pseudo-counts."""
        smoothed = counts + SUBSTITUTION_SHARE * np.tensordot(self.replaced, counts, 1)
        total = smoothed.sum(2, keepdims=True) + PAIR_PRIOR
        return np.asarray((smoothed + PAIR_PRIOR * prior) / total)

    def scales(self, i: int, visible: NDArray[np.bool_]) -> NDArray[np.float64]:
        """float64 [Q]: factor that limits the sum of visible couplings to column i."""
        total = visible @ self.coupling[i]
        return np.minimum(1, TOTAL_COUPLING / np.maximum(total, 1e-9))

    def terms(self, queries: Letters) -> NDArray[np.float64]:
        """float64 [Q, L, 20]: Σ_j coupling_ij log_odds_i(a, j, x_j) over all other residues x_j."""
        hot, visible = one_hot(queries), queries < GAP
        found = np.empty((*queries.shape, GAP))
        for i in range(self.length):
            weighted = self.log_odds(i) * self.coupling[i].astype(np.float32)[None, :, None]
            found[:, i] = hot @ weighted.reshape(GAP, -1).T * self.scales(i, visible)[:, None]
            self.advance()
        return found


def replacement() -> NDArray[np.float64]:
    """float64 [20, 20]: [a, d], the probability under BLOSUM62 that a replaces d."""
    joint = np.exp(blosum62()) * np.outer(amino_frequencies(), amino_frequencies())
    return joint / joint.sum(0)


def sampled(
    weights: NDArray[np.float64], most: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """At most `most` members drawn by weight, and their weights rescaled to the total."""
    number = min(most, len(weights))
    places = np.sort(random.choice(len(weights), number, False, weights / weights.sum()))
    return places, weights[places] * (weights.sum() / weights[places].sum())


def share_of_tree(
    aligned: Letters,
    weights: NDArray[np.float64],
    match_weight: float,
    random: np.random.Generator,
    advance: Callable[[], None] = lambda: None,
) -> float:
    """0 … 1: the share of the pairs' predictions that the tree may explain.

    One half of the family predicts the other, with clusters at SAME_OBSERVATION kept together. The
    gain of nearest relatives over the profile is the tree's, the further gain of pairs, scaled to
    predict best, theirs. Both are means over `splits` of the family.
    """
    clusters = _clusters(aligned)
    profiles, trees, pairs, letters, shares = [], [], [], [], []
    for number in range(2 * splits(len(aligned))):
        if number % 2 == 0:
            halves = random.integers(0, 2, clusters.max() + 1)[clusters]
        known, left_out = np.flatnonzero(halves != number % 2), np.flatnonzero(halves == number % 2)
        if len(known) < 2 or not len(left_out):
            continue
        places, given_shares = sampled(weights[left_out], PREDICTED[1] // 2, random)
        members, given, targets = aligned[known], weights[known], aligned[left_out[places]]
        profile, filled = column_profile(members, given), targets < GAP
        among = members, given, profile, match_weight
        table = PairTable(*among[:3], neighbours(members, *among, np.arange(len(known))), advance)
        profiles.append(np.broadcast_to(np.log(profile), (*targets.shape, GAP))[filled])
        trees.append(np.log(neighbours(targets, *among))[filled])
        pairs.append(table.terms(targets)[filled])
        letters.append(targets[filled])
        shares.append(np.broadcast_to(given_shares[:, None], filled.shape)[filled])
    if not letters:
        return 0.5
    profile_, tree, pair = (np.concatenate(one) for one in (profiles, trees, pairs))
    own, each = (np.arange(len(tree)), np.concatenate(letters)), np.concatenate(shares)

    def nats(logits: NDArray[np.float64]) -> float:
        return float(np.average(np.logaddexp.reduce(logits, axis=1) - logits[own], weights=each))

    scaled = minimize_scalar(lambda scale: nats(tree + scale * pair), bounds=(0, 4))
    of_tree = max(nats(profile_) - nats(tree), 0) + NO_EVIDENCE
    of_pairs = max(nats(tree) - float(scaled.fun), 0) + NO_EVIDENCE
    return of_tree / (of_tree + of_pairs)


def splits(members: int) -> int:
    """Number of splits into halves; chosen so that every family takes about as long."""
    return min(max(MEMBERS // members, 1), SPLITS)


def _coupling(information: NDArray[np.float64]) -> NDArray[np.float64]:
    length = len(information)
    mean = information.sum(0) / max(length - 1, 1)
    corrected = information - np.outer(mean, mean) / max(mean.mean(), 1e-12)
    others = corrected[~np.eye(length, dtype=np.bool_)]
    if not len(others):
        return np.zeros((length, length))
    coupling = np.logaddexp(0, (corrected - others.mean()) / max(others.std(), 1e-12))
    np.fill_diagonal(coupling, 0)
    return np.asarray(coupling / max(coupling.mean(), 1e-12))


def _clusters(aligned: Letters) -> NDArray[np.int64]:
    """int64 [N]: greedy clusters at SAME_OBSERVATION identity to their longest member."""
    hot, filled = one_hot(aligned), (aligned < GAP).sum(1)
    found, number = np.full(len(aligned), -1), 0
    for member in np.argsort(-filled, kind="stable"):
        if found[member] < 0:
            same = hot @ hot[member] >= SAME_OBSERVATION * np.minimum(filled, filled[member])
            found[same & (found < 0)] = found[member] = number
            number += 1
    return found
