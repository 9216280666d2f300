"""Hashes of all n-grams of a document."""

import numpy as np
from numpy.typing import NDArray

from d2plm.core.vocabulary import Tokens

_BASE = 0x9E3779B97F4A7C15  # odd, without a pattern in its bits
_FINALIZER = tuple(map(np.uint64, (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)))  # of MurmurHash3


def ngram_hashes(tokens: Tokens, length: int) -> NDArray[np.uint64]:
    """uint64 [max(L − length, 0) + 1]: a hash of every `length` consecutive tokens (or all L).

    The hash is Σ xᵢ Bⁿ⁻ⁱ mod 2⁶⁴, then mixed. The sum of a run combines those of its two halves, so
    the number of passes over the tokens grows with log n.

    Args:
        tokens: [L], at least one.
    """
    single = tokens.astype(np.uint64)
    sums, run = single, 1
    for bit in f"{min(length, len(tokens)):b}"[1:]:
        sums = sums[:-run] * np.uint64(pow(_BASE, run, 1 << 64)) + sums[run:]
        run *= 2
        if bit == "1":
            sums = sums[:-1] * np.uint64(_BASE) + single[run:]
            run += 1
    for factor in _FINALIZER:
        sums = (sums ^ (sums >> np.uint64(33))) * factor
    return sums ^ (sums >> np.uint64(33))
