"""Whether generated proteins are members of the family that the model was given.

HMMER decides membership with an HMM of the members given to the model. Natural members that were
not given, and proteins of the family's composition without order, are classified in the same way.
The identity to a given member comes from a pairwise alignment. A fast but incomplete alignment of
all proteins to the family's HMM finds the candidates and the average identity within a set.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyhmmer.plan7 import HMM

from d2plm.core.vocabulary import CANONICAL, Tokens, encode
from d2plm.data.family import Family
from d2plm.evaluation.quality import GENERATED, NATURAL
from d2plm.evaluation.terms import REFERENCE
from d2plm.families.alignment import (
    GAP,
    Letters,
    aligned_columns,
    family_hmm,
    letters_of,
    one_hot,
    text_of,
)
from d2plm.families.profile_hmm import domain_hits

MAX_E_VALUE = 1e-3  # largest E-value of a member, in a search of this many proteins
DATABASE = 1_000_000
SIMULATED = 200  # sequences, to calibrate E-values: HMMER's own number
CANDIDATES = 10  # given members to which a protein is aligned pairwise
COMPARED = 500  # first proteins of a set whose mutual identity is averaged
CONSERVED = 0.8  # least share of the given members with the same residue in a conserved column
SHOWN = 10  # proteins of a set in the alignment


def describe_members(
    generated: Sequence[Tokens],
    names: Sequence[str],
    given: Family,
    held_out: Family,
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare each generated protein, and two reference sets, with the family.

    Args:
        generated: uint8 residue tokens.
        given: the members that the model was given; the HMM is theirs.
        held_out: natural members that it was not given; may be empty.
        seed: of the composition samples, which have the generated proteins' lengths.

    Returns:
        JSON content: `given`, members; `columns`, of the HMM; the threshold; `sets`, of each
        the `proteins` — name, length, bits under the HMM (0 where HMMER finds no domain), E-value,
        whether it is a member, nearest given member, identity to it, share of the HMM's columns
        it fills, share of the conserved columns in which it has their residue (None where no column
        is conserved) — the number of `members`, the means of coverage, conserved columns and the
        identity of two proteins; and `alignment`, the columns of the first members of each.
    """
    settings: dict[str, Any] = {"effective_number": "entropy", "simulated": SIMULATED}
    hmm = family_hmm(given.members, given.columns, **settings)
    samples = _composition_samples(generated[:COMPARED], given.members, seed)
    sets: dict[str, tuple[Sequence[str], Sequence[Tokens]]] = {
        GENERATED: (names, generated),
        NATURAL: (held_out.names, held_out.members),
        REFERENCE: ([f"composition_{number + 1}" for number in range(len(samples))], samples),
    }
    of_given = aligned_columns(hmm, given.members)
    columns = {name: aligned_columns(hmm, proteins) for name, (_, proteins) in sets.items()}
    natural = (held_out.names, columns[NATURAL]) if held_out.members else (given.names, of_given)
    shown = {GENERATED: (names, columns[GENERATED]), NATURAL: natural}
    return {
        "seed": seed,
        "given": len(given.members),
        "columns": hmm.M,
        "max_e_value": MAX_E_VALUE,
        "database": DATABASE,
        "threshold_bits": _threshold_bits(hmm),
        "sets": {
            name: _described(hmm, *own, columns[name], given, of_given)
            for name, own in sets.items()
        },
        "alignment": [
            {"set": name, "name": own, "columns": text_of(row)}
            for name, (own_names, rows) in shown.items()
            for own, row in zip(own_names[:SHOWN], rows[:SHOWN], strict=True)
        ],
    }


def identities(rows: Letters, others: Letters) -> NDArray[np.float64]:
    """float64 [N, M]: identical canonical residues ÷ columns that either protein fills.

    Args:
        rows, others: as of `aligned_columns`, of N and of M proteins.
    """
    same = one_hot(rows).astype(np.float64) @ one_hot(others).T
    empty = (rows == GAP).astype(np.float64) @ (others == GAP).T
    return np.asarray(same / np.maximum(rows.shape[1] - empty, 1))


def conserved_columns(rows: Letters) -> Letters:
    """int8 [L]: the residue that CONSERVED of the rows have in a column; GAP if there is none."""
    counts = one_hot(rows).sum(0).reshape(-1, GAP)
    return np.where(counts.max(1) >= CONSERVED * len(rows), counts.argmax(1), GAP).astype(np.int8)


def identities_to(members: Sequence[Tokens], protein: Tokens) -> NDArray[np.float64]:
    """float64 [N]: residues of the protein aligned to the same residue ÷ its residues.

    Each member is aligned to the single-sequence HMM of the protein.
    """
    rows, own = aligned_columns(family_hmm([protein]), members), letters_of(protein)
    return ((rows == own) & (own < GAP)).mean(axis=1)


def _described(
    hmm: HMM,
    names: Sequence[str],
    proteins: Sequence[Tokens],
    rows: Letters,
    given: Family,
    of_given: Letters,
) -> dict[str, Any]:
    if not proteins:
        means = dict.fromkeys(("mean_coverage", "mean_conserved", "mean_identity"))
        return {"proteins": [], "members": 0, **means}
    to_given, conserved = identities(rows, of_given), conserved_columns(of_given)
    has_conserved = bool((conserved < GAP).any())
    found = domain_hits(hmm, proteins, Z=DATABASE)  # as of `hmmsearch --max`
    described = []
    for number, (protein, row) in enumerate(zip(proteins, rows, strict=True)):
        hit = found.get(number)
        bits, e_value = (0.0, None) if hit is None else (hit.score, hit.evalue)
        candidates = np.argsort(-to_given[number], kind="stable")[:CANDIDATES]
        to_candidates = identities_to([given.members[i] for i in candidates], protein)
        nearest = int(to_candidates.argmax())
        described.append(
            {
                "name": names[number],
                "length": len(protein),
                "bits": bits,
                "e_value": e_value,
                "member": e_value is not None and e_value <= MAX_E_VALUE,
                "nearest": given.names[candidates[nearest]],
                "identity": float(to_candidates[nearest]),
                "coverage": float((row < GAP).mean()),
                "conserved": _mean((row == conserved)[conserved < GAP]),
            }
        )
    compared = rows[:COMPARED]
    among = identities(compared, compared)[np.triu_indices(len(compared), 1)]
    return {
        "proteins": described,
        "members": sum(one["member"] for one in described),
        "mean_coverage": _mean([one["coverage"] for one in described]),
        "mean_conserved": _mean([one["conserved"] for one in described if has_conserved]),
        "mean_identity": _mean(among),
    }


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _threshold_bits(hmm: HMM) -> float:
    """The score at MAX_E_VALUE: P(score > s) = exp(−λ (s − τ)) (Eddy, 2008)."""
    fit = hmm.evalue_parameters
    return float(fit.f_tau - np.log(MAX_E_VALUE / DATABASE) / fit.f_lambda)


def _composition_samples(
    generated: Sequence[Tokens], members: Sequence[Tokens], seed: int
) -> list[Tokens]:
    """Residues drawn by the members' composition, of the generated proteins' lengths."""
    counts = np.bincount(np.concatenate(members), minlength=256)[encode(CANONICAL)]
    random = np.random.default_rng(seed)
    share = counts / counts.sum()
    return [
        random.choice(encode(CANONICAL), len(one), p=share).astype(np.uint8) for one in generated
    ]
