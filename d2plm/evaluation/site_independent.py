"""Site-independent profile of a protein and its relatives: the baseline of mutational effects.

Each position has its own distribution of residues, from an alignment of the relatives to the
protein. No residue is hidden when a mutation is scored, so the alignment may use the whole protein.
Dependencies between positions are not modelled.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pyhmmer.easel import Alphabet, TextMSA, TextSequence
from pyhmmer.plan7 import Background

from d2plm.core.vocabulary import CANONICAL, CANONICAL_START, Tokens
from d2plm.evaluation.mutations import Variant
from d2plm.evaluation.profile_hmm import aligned_columns, family_hmm, hmm_builder, hmmer_letters

# Sequences above this identity count as one observation (Hopf et al., doi:10.1038/nbt.3769).
SAME_OBSERVATION = 0.8


def site_independent_effects(
    wild_type: Tokens, variants: Sequence[Variant], relatives: Sequence[Tokens]
) -> NDArray[np.float64]:
    """float64 [N]: Σ_i log p_i(mutant_i) − log p_i(wild type_i), p_i the profile's at position i.

    Args:
        wild_type: uint8 [L], residue tokens.
        variants: N of them; see `mutations.place`.
        relatives: uint8 residue tokens, unaligned, of any length; the wild type among them is
            ignored, as it is part of the profile.
    """
    others = [one for one in relatives if not np.array_equal(one, wild_type)]
    log_p_L20 = site_log_probabilities(wild_type, others)
    effects = np.zeros(len(variants))
    for index, variant in enumerate(variants):
        positions = np.array(variant.positions, dtype=np.int64)
        mutants = np.array(variant.mutants, dtype=np.int64) - CANONICAL_START
        unchanged = wild_type[positions].astype(np.int64) - CANONICAL_START
        change = log_p_L20[positions, mutants] - log_p_L20[positions, unchanged]
        effects[index] = change.sum()
    return effects


def site_log_probabilities(wild_type: Tokens, relatives: Sequence[Tokens]) -> NDArray[np.float64]:
    """float64 [L, 20]: log p(residue) at each position of the wild type.

    HMMER aligns each relative to the profile HMM of the wild type alone. Every position of the wild
    type then becomes a match state: its emissions are the residue counts of the alignment with
    position-based sequence weights (Henikoff & Henikoff, doi:10.1016/0022-2836(94)90032-9), which
    add up to the number of clusters at SAME_OBSERVATION, and HMMER's mixture of Dirichlet priors
    (Sjölander et al., doi:10.1093/bioinformatics/12.4.327).

    Args:
        wild_type: uint8 [L], residue tokens.
        relatives: uint8 residue tokens, unaligned, of any length.
    """
    alphabet = Alphabet.amino()
    # The reference line, "hand", says which columns are match states.
    builder = hmm_builder(
        alphabet, architecture="hand", effective_number="clust", eid=SAME_OBSERVATION
    )
    aligned = aligned_columns(family_hmm([wild_type]), relatives)
    rows = [hmmer_letters(wild_type), *(row for row in aligned if {*row} != {"-"})]
    named = [TextSequence(name=str(i), sequence=row) for i, row in enumerate(rows)]
    alignment = TextMSA(name="sites", sequences=named)
    alignment.reference = "x" * len(wild_type)
    background = Background(alphabet)
    hmm, _, _ = builder.build_msa(alignment.digitize(alphabet), background)
    emissions = hmm.match_emissions  # type: ignore[attr-defined]  # its stubs lack it
    emissions_L20 = np.array(emissions, dtype=np.float64)[1:]  # the first state is the begin
    return np.log(emissions_L20[:, [alphabet.symbols.index(letter) for letter in CANONICAL]])
