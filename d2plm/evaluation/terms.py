"""What an alphabet's evaluations measure beside the model, and what they call things.

This module does not need torch or scipy, which the image that prepares data lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from d2plm.core.vocabulary import Vocabulary

REFERENCE = "composition"  # depends on the amino acids of a protein but not on their order


@dataclass(frozen=True)
class Suite:
    """The baselines of an alphabet.

    Attributes:
        orders: of the n-grams.
        reference: the best baseline that ignores order: composition where many sequences of a small
            alphabet fit it, else the unigram.
        homology: whether MMseqs2's and HMMER's figures, made for proteins, are measured.
        unit: by which bits are counted; None where text has no such unit.
    """

    orders: tuple[int, ...]
    reference: str = REFERENCE
    homology: bool = False
    unit: str | None = None


_NUCLEOTIDES = Suite((1, 2, 4, 6, 8, 11), unit="base")
SUITES = {
    "protein": Suite((1, 2, 3, 4, 5), homology=True),
    "dna": _NUCLEOTIDES,
    "rna": _NUCLEOTIDES,
    "codon": Suite((1, 2, 3), unit="base"),
    "bytes": Suite((1, 2, 3, 4, 5, 6, 8), reference="unigram", unit="byte"),
    "tokenizer": Suite((1, 2, 3, 4), reference="unigram", unit="byte"),
}


@dataclass(frozen=True)
class Terms:
    """What an evaluation calls things; by default proteins.

    Attributes:
        sequence, token: the vocabulary's nouns.
        scored: a token that is predicted; `letter`: a kind of token; `cluster`: of sequences.
        reference: the best baseline that ignores order.
        unit: bits are counted per unit, too; None for proteins.
    """

    sequence: str = "protein"
    token: str = "residue"  # noqa: S105  # no password
    scored: str = "canonical residue"
    letter: str = "amino acid"
    cluster: str = "homology cluster"
    reference: str = REFERENCE
    unit: str | None = None

    @property
    def model(self) -> str:
        """What a model of these sequences is called."""
        kind = "nucleotide sequence" if self.sequence == "sequence" else self.sequence
        return "protein language model" if self.unit is None else f"language model of {kind}s"

    @property
    def caveat(self) -> str:
        """What the figures of generated proteins do not say; "" of others."""
        caveat = "No figure here says whether a generated protein folds or functions."
        return caveat if self.unit is None else ""


PROTEINS = Terms()


def terms_for(vocabulary: Vocabulary) -> Terms:
    """What evaluations of a vocabulary's sequences call things."""
    suite, nouns = SUITES[vocabulary.name], vocabulary.nouns
    if suite.unit is None:
        return PROTEINS
    return Terms(*nouns, nouns.token, nouns.token, "cluster", suite.reference, suite.unit)


def terms_of(evaluation: Mapping[str, Any]) -> Terms:
    """The terms recorded in an evaluation or comparison, proteins' where there are none."""
    return Terms(**evaluation.get("terms", {}))
