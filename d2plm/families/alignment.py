"""The members of a family beside a protein: alignment, sequence weights and column profile.

Members are aligned to the protein's own single-sequence HMM, so that each residue of the protein is
a column. Letters are int8: 0 … 19 in the order of `CANONICAL`, GAP for all else.

Shape suffixes: N members, L columns, 20 letters.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pyhmmer.easel import Alphabet, TextMSA, TextSequence, VectorD
from pyhmmer.plan7 import Background

from d2plm.core.vocabulary import CANONICAL, CANONICAL_START, Tokens
from d2plm.families.profile_hmm import (
    aligned_columns,
    family_hmm,
    hmm_builder,
)

GAP = len(CANONICAL)
SAME_OBSERVATION = 0.8  # identity from which members share one weight (doi:10.1038/nbt.3769)
COVERAGE = 0.5  # members that fill less of the protein are left out
_BLOCK = 500  # members compared at once

Letters = NDArray[np.int8]
Floats = NDArray[np.float32]

_CODES = np.full(256, GAP, dtype=np.int8)
_CODES[np.frombuffer(CANONICAL.encode(), dtype=np.uint8)] = np.arange(GAP)


def letters_of(tokens: Tokens) -> Letters:
    """int8 [L] of residue tokens [L]."""
    codes = tokens.astype(np.int16) - CANONICAL_START
    return np.where((codes >= 0) & (codes < GAP), codes, GAP).astype(np.int8)


def align_to(protein: Tokens, members: Sequence[Tokens]) -> Letters:
    """int8 [N, L]: the distinct members beside the protein's residues, without the protein itself.

    Members that fill less than COVERAGE of the protein are left out, and members that are equal
    to the protein wherever they are aligned to it.
    """
    rows = aligned_columns(family_hmm([protein]), members)
    text = np.frombuffer("".join(rows).encode(), dtype=np.uint8)
    aligned = _CODES[text].reshape(len(rows), len(protein))
    filled, own = aligned < GAP, letters_of(protein)
    kept = (filled.mean(1) >= COVERAGE) & (filled & (aligned != own)).any(1)
    return np.unique(aligned[kept], axis=0)


def one_hot(letters: Letters) -> Floats:
    """float32 [N, L * 20] of int8 [N, L]; a gap is all zeros."""
    return (letters[..., None] == np.arange(GAP)).reshape(len(letters), -1).astype(np.float32)


def sequence_weights(aligned: Letters) -> NDArray[np.float64]:
    """float64 [N]: 1 / number of members at least SAME_OBSERVATION identical, itself included.

    Identity is over the columns that the member fills. Their sum is the effective number of
    members.
    """
    wanted, counts = SAME_OBSERVATION * (aligned < GAP).sum(1), np.zeros(len(aligned))
    blocks = range(0, len(aligned), _BLOCK)
    for a in blocks:
        first, own = one_hot(aligned[a : a + _BLOCK]), slice(a, a + _BLOCK)
        for b in blocks[blocks.index(a) :]:
            same, other = first @ one_hot(aligned[b : b + _BLOCK]).T, slice(b, b + _BLOCK)
            counts[own] += (same >= wanted[own, None]).sum(1)
            if b > a:
                counts[other] += (same >= wanted[None, other]).sum(0)
    return 1 / np.maximum(counts, 1)


def column_profile(aligned: Letters, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [L, 20]: the probability of each residue in each column.

    HMMER's match emissions with every column a match state: the weighted counts, as many
    observations as the weights sum to, and HMMER's mixture of Dirichlet priors (Sjölander et al.,
    doi:10.1093/bioinformatics/12.4.327).

    Args:
        aligned: int8 [N, L].
        weights: float64 [N], see `sequence_weights`.
    """
    alphabet = Alphabet.amino()
    symbols = np.frombuffer(f"{CANONICAL}-".encode(), dtype=np.uint8)
    rows = (bytes(symbols[row]).decode() for row in aligned)
    named = [TextSequence(name=str(i).encode(), sequence=row) for i, row in enumerate(rows)]
    text = TextMSA(name=b"family", sequences=named)
    text.reference = "x" * aligned.shape[1]  # which columns are match states, "hand"
    alignment = text.digitize(alphabet)
    alignment.sequence_weights = VectorD(weights * len(weights) / weights.sum())
    builder = hmm_builder(
        alphabet, architecture="hand", weighting="given", effective_number=float(weights.sum())
    )
    hmm, _, _ = builder.build_msa(alignment, Background(alphabet))
    emissions = hmm.match_emissions  # type: ignore[attr-defined]  # its stubs lack it
    emissions_L20 = np.array(emissions, dtype=np.float64)[1:]  # the first state is the begin
    emissions_L20 = emissions_L20[:, [alphabet.symbols.index(letter) for letter in CANONICAL]]
    return emissions_L20 / emissions_L20.sum(1, keepdims=True)
