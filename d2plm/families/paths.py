"""Paths of proteins through their family's profile HMM: int32 [n], the column of each residue.

L stands for a residue between columns.

Shape suffixes: L columns, S = 2 L + 1 states, n residues.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pyhmmer.plan7 import HMM
from scipy.sparse import csr_array

from d2plm.core.vocabulary import Tokens
from d2plm.families.alignment import GAP, Letters, aligned_rows, match_emissions
from d2plm.families.profile_hmm import amino_frequencies

FamilyPath = NDArray[np.int32]

UNSEEN_END = 0.5  # total pseudo-count of ends


def paths_of(hmm: HMM, proteins: Sequence[Tokens]) -> list[FamilyPath]:
    found = []
    for row in aligned_rows(hmm, proteins):
        symbols = np.frombuffer(row.encode(), dtype=np.uint8)
        matched = (symbols >= ord("A")) & (symbols <= ord("Z"))
        column = np.cumsum(matched | (symbols == ord("-"))) - 1
        residue = matched | ((symbols >= ord("a")) & (symbols <= ord("z")))
        found.append(np.where(matched, column, hmm.M)[residue].astype(np.int32))
    return found


def in_columns(path: FamilyPath, letters: Letters, length: int) -> Letters:
    """int8 [L]: the letters [n] of a protein in the columns of its path."""
    columns = np.full(length + 1, GAP, dtype=np.int8)
    columns[path] = letters
    return columns[:-1]


class PathSampler:
    """Samples paths from their posterior, given the length of a protein and some of its residues.

    HMMER's profile HMM without silent states: 0 the residues before the first column, 1 … L the
    columns, L + k the residues after column k, 2 L those after the last column of a path. Paths
    begin and end at the columns where those of the members do.

    Args:
        paths: paths of at least one member.
    """

    def __init__(self, hmm: HMM, paths: Sequence[FamilyPath]) -> None:
        length = hmm.M
        inside = [path[path < length] for path in paths]
        ends = [own[[0, -1]] for own in inside if len(own)] or [np.array([0, length - 1])]
        first, last = (np.bincount(one, minlength=length) for one in np.array(ends).T)
        begin = (first + UNSEEN_END / length) / (first.sum() + UNSEEN_END)
        behind = (last + UNSEEN_END / length)[::-1].cumsum()[::-1]
        stop = (last + UNSEEN_END / length) / behind  # conditional on reaching the column
        flanks = np.mean([len(path) - len(own) for path, own in zip(paths, inside, strict=True)])
        more = flanks / (flanks + 2)  # P(a flank continues); nearly all insertions are flanks
        self.length = length
        self.transitions_SS, self.stop_S = _transitions(hmm, begin, stop, max(float(more), 0.01))
        self.sparse_SS = csr_array(self.transitions_SS.T)  # an eighth of the entries is non-zero
        self.odds_L20 = match_emissions(hmm) / amino_frequencies()
        self._last = b"", np.empty((0, 0))

    def sample(
        self, letters: Letters, number: int, random: np.random.Generator
    ) -> NDArray[np.int32]:
        """int32 [number, n]: paths of a protein with these letters [n]; GAP allows any letter."""
        length, transitions = self.length, self.transitions_SS
        if self._last[0] != letters.tobytes():  # a template is usually sampled repeatedly
            self._last = letters.tobytes(), self._forward(letters)
        forward = self._last[1]
        drawn, paths = np.empty(number, dtype=np.int64), np.empty((number, len(letters)), np.int32)
        following = np.broadcast_to(self.stop_S, (number, len(transitions)))
        for i in reversed(range(len(letters))):
            cumulative = (forward[i] * following).cumsum(1)
            draws = random.random((number, 1)) * cumulative[:, -1:]
            drawn = (cumulative <= draws).sum(1)
            paths[:, i] = np.where((drawn > 0) & (drawn <= length), drawn - 1, length)
            following = transitions[:, drawn].T
        return paths

    def log_p(self, path: FamilyPath) -> float:
        """log p(path), including its columns, insertions and length."""
        inside = path < self.length
        last = np.maximum.accumulate(np.where(inside, path + 1, 0))  # 0 before the first column
        state = np.where(inside | (last == 0), last, self.length + last)
        state[len(path) - inside[::-1].argmax() :] = 2 * self.length
        steps = self.transitions_SS[np.append(0, state[:-1]), state]
        with np.errstate(divide="ignore"):
            return float(np.log(steps).sum() + np.log(self.stop_S[state[-1]]))

    def _forward(self, letters: Letters) -> NDArray[np.float64]:
        """float64 [n, S]: p(state of residue i | the letters up to it)."""
        known = letters < GAP
        found = np.ones((len(letters), len(self.transitions_SS)))
        found[known, 1 : self.length + 1] = self.odds_L20[:, letters[known]].T
        state = np.eye(1, found.shape[1])[0]
        for own in found:
            state = (self.sparse_SS @ state) * own
            own[:] = state = state / state.sum()
        return found


def _transitions(
    hmm: HMM, begin: NDArray[np.float64], stop: NDArray[np.float64], more: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64 [S, S] transition probabilities between the states of residues, [S] of ending."""
    length = hmm.M
    probabilities = hmm.transition_probabilities  # type: ignore[attr-defined]  # its stubs lack it
    mm, mi, md, im, ii, dm, dd = np.array(probabilities, dtype=np.float64).T
    found = np.zeros((2 * length + 1, 2 * length + 1))
    found[0, 0], found[0, 1 : length + 1] = more, (1 - more) * begin
    goes_on = 1 - stop
    # From column j to k with deletions in between: md_j · Π dd · dm_{k−1}.
    with np.errstate(divide="ignore"):
        in_gap = np.concatenate([[0.0], np.log(dd[1:]).cumsum()])  # Σ_{l ≤ k} log dd_l
        log_md, log_dm = np.log(md), np.log(dm)
    j, k = np.triu_indices(length, 2)  # columns j + 1 and k + 1, at least one between
    with np.errstate(invalid="ignore"):
        deleted = np.exp(log_md[j + 1] + in_gap[k - 1] - in_gap[j + 1] + log_dm[k])
    found[j + 1, k + 1] = goes_on[j] * np.nan_to_num(deleted)
    inner = np.arange(1, length)
    found[inner, inner + 1] = goes_on[:-1] * mm[1:-1]
    found[inner, length + inner] = goes_on[:-1] * mi[1:-1]
    found[length + inner, inner + 1], found[length + inner, length + inner] = im[1:-1], ii[1:-1]
    ends = np.zeros(2 * length + 1)
    found[1 : length + 1, -1], ends[1 : length + 1] = stop * more, stop * (1 - more)
    found[-1, -1], ends[-1] = more, 1 - more
    return found, ends
