"""The baselines of each alphabet, and the nouns that its evaluations use.

Imports neither torch nor scipy, which the image that prepares data lacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from d2plm.core.vocabulary import Vocabulary

REFERENCE = "composition"  # depends on the amino acids of a protein, not on their order


@dataclass(frozen=True)
class Suite:
    """The baselines of an alphabet.

    Attributes:
        orders: orders of the n-grams.
        reference: the best baseline that ignores order: composition for a small alphabet with many
            sequences, otherwise the unigram.
        homology: whether to compute the figures of MMseqs2 and HMMER, which need proteins.
        unit: bits are also reported per this unit; None for proteins.
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
    """The nouns of an evaluation, by default those of proteins.

    Attributes:
        scored: a token that is predicted.
        letter: a kind of token.
        cluster: a cluster of sequences.
        reference, unit: see `Suite`.
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
        """The noun for a model of these sequences."""
        kind = "nucleotide sequence" if self.sequence == "sequence" else self.sequence
        return "protein language model" if self.unit is None else f"language model of {kind}s"

    @property
    def caveat(self) -> str:
        """What the figures of generated proteins do not show; "" for other sequences."""
        caveat = "No figure here says whether a generated protein folds or functions."
        return caveat if self.unit is None else ""


PROTEINS = Terms()


def terms_for(vocabulary: Vocabulary) -> Terms:
    suite, nouns = SUITES[vocabulary.name], vocabulary.nouns
    if suite.unit is None:
        return PROTEINS
    return Terms(*nouns, nouns.token, nouns.token, "cluster", suite.reference, suite.unit)


def terms_of(evaluation: Mapping[str, Any]) -> Terms:
    """The terms recorded in an evaluation or comparison; those of proteins if it has none."""
    return Terms(**evaluation.get("terms", {}))
