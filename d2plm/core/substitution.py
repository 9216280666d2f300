"""BLOSUM62: log-odds of residue substitutions in related proteins."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from d2plm.core.vocabulary import CANONICAL

# 2 · log2 odds (Henikoff & Henikoff, doi:10.1073/pnas.89.22.10915): the lower triangle, in the
# order of `CANONICAL`.
_BLOSUM62 = """
4
-1 4
-4 0 6
1 0 -3 4
-2 1 0 -2 4
-3 -1 -2 -2 0 5
-2 -1 -2 -3 -1 0 5
-1 0 -2 0 1 -1 -1 5
2 -1 -4 3 -2 -3 -3 -1 4
-4 -2 -1 -3 0 2 -2 -1 -3 6
-3 -1 -2 -2 -1 -1 -2 -1 -3 -1 7
-2 -1 -2 -2 0 1 2 -1 -3 -1 -1 5
-2 -1 -2 -2 0 2 1 -1 -3 0 -1 1 5
-3 -2 0 -3 1 0 0 0 -3 1 -2 0 0 6
0 -2 -3 -1 -2 -3 -3 -2 0 -3 -4 -3 -3 -3 6
-1 -2 -3 -1 -2 -2 -2 -2 -1 -3 -3 -2 -1 -2 3 7
2 -1 -3 1 -1 -2 -1 -1 1 -3 -2 -1 0 -2 0 -1 5
-3 -2 -2 -3 -1 0 0 -2 -3 -1 -2 -1 0 1 -1 2 -2 8
-2 -3 -2 -3 -3 -3 -3 -2 -3 -4 -4 -3 -2 -4 1 2 -1 -2 11
-1 0 -3 -1 -1 -4 -3 -1 -1 -3 -3 -3 -3 -3 -2 -2 -1 -3 -2 9
"""


@cache
def blosum62() -> NDArray[np.float64]:
    """float64 [20, 20]: log-odds of aligning two residues, in nats and `CANONICAL` order."""
    scores = np.zeros((len(CANONICAL), len(CANONICAL)))
    for row, line in enumerate(_BLOSUM62.split("\n")[1:-1]):
        scores[row, : row + 1] = scores[: row + 1, row] = [float(one) for one in line.split()]
    return scores * np.log(2) / 2
