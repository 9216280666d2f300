"""Soft alignments of corrupted proteins to their relatives, from the visible residues alone.

A pair hidden Markov model (Durbin et al., Biological Sequence Analysis, 1998, chapter 4) gives the
probability that a residue of a protein is aligned to a residue of a relative. Masked residues emit
every residue with weight 1, so the alignment uses only the residues that the model may see, and the
bound remains a bound. The alignment probabilities are fixed, because a small model takes long to
learn to align; the encoder that uses them is learnt.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2plm.core.batch import Alignment, Relatives
from d2plm.core.substitution import blosum62
from d2plm.core.vocabulary import CANONICAL, CANONICAL_START, ESM2_TOKENS

TASKS_OF_A_THREAD = 8  # balances the threads, as pairs differ in length
LETTERS = len(CANONICAL) + 1  # the twenty residues, and one class for all other tokens
UNKNOWN = len(CANONICAL)
# Probabilities of the pair model. On 600 pairs of relatives, changing them by a factor of two
# changes the log-odds by less than 1 %.
GAP_OPENED, GAP_EXTENDED = 0.01, 0.75
WINDOWS = (2, 8, 24, None)  # residues to either side over which agreement is measured; None: all
FEATURES = LETTERS + 1 + 3 * len(WINDOWS)
BEGUN_INSIDE = 0.01  # weight of beginning or ending inside both proteins, not at an end


def align(tokens: Tensor, cu_seqlens: Tensor, relatives: Relatives) -> Alignment:
    """Align segments of a packed row to the relatives of each.

    Computed on the host, with torch's number of threads; the result is on the device of `tokens`.
    The features of each row: the probability that the position is aligned to each type of residue,
    [21] (the rest is that of a gap); the probability that it is aligned to one of the twenty; and
    for each of `WINDOWS` the fraction of visible residues equal to the aligned ones, the logarithm
    of their number, and the aligned fraction of the visible residues.

    Args:
        tokens: uint8 [T], corrupted tokens of the packed row.
        cu_seqlens: int32 [S + 1] segment bounds.
    """
    from d2plm.model.alignment_kernel import align_pairs  # Numba takes half a second to import

    letters, bounds = _letters()[tokens.cpu().numpy()], cu_seqlens.cpu().numpy().astype(np.int64)
    segments, count = relatives.segments, len(relatives.segments)
    lines = np.concatenate([[0], np.cumsum(np.diff(bounds)[segments])]).astype(np.int64)
    features = np.empty((lines[-1], FEATURES), dtype=np.float32)
    of_relatives, odds = _letters()[relatives.tokens], _odds()
    windows = np.array([len(letters) if reach is None else reach for reach in WINDOWS])

    def align_some(which: NDArray[np.int64]) -> None:
        if not len(which):
            return
        first, last = which[0], which[-1] + 1
        align_pairs(
            *(letters, bounds, segments[which], of_relatives, relatives.bounds, which),
            *(odds, GAP_OPENED, GAP_EXTENDED, BEGUN_INSIDE, windows),
            *(features[lines[first] : lines[last]], lines[first : last + 1] - lines[first]),
        )

    threads = torch.get_num_threads()
    if threads == 1:
        align_some(np.arange(count))
    else:
        parts = np.array_split(np.arange(count), TASKS_OF_A_THREAD * threads)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(align_some, parts))
    pairs = np.repeat(np.arange(count), np.diff(lines))
    places = np.arange(lines[-1]) - lines[pairs] + bounds[segments[pairs]]
    arrays = (features, places, lines)
    return Alignment(*(torch.from_numpy(array).to(tokens.device) for array in arrays))


@cache
def _letters() -> NDArray[np.uint8]:
    """uint8 [33]: the letter of each token."""
    letters = np.full(len(ESM2_TOKENS), UNKNOWN, dtype=np.uint8)
    letters[CANONICAL_START : CANONICAL_START + UNKNOWN] = np.arange(UNKNOWN)
    return letters


@cache
def _odds() -> NDArray[np.float64]:
    """float64 [21, 21]: odds that two letters are aligned to each other, relative to chance."""
    odds = np.ones((LETTERS, LETTERS))
    odds[:UNKNOWN, :UNKNOWN] = np.exp(blosum62())
    return odds
