"""Raw records of an input, which a vocabulary makes tokens of, and the error for a bad one."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import PROTEIN, RESIDUES, Tokenised, Vocabulary

ALIAS_SEPARATOR = b"\x01"  # between the names of equal sequences, as in NCBI's nr
PIECE_SEPARATOR = b"\x02"  # between the name of a record and the number of its piece
OF_TEXT = "; text is ingested with alphabet=bytes or tokenizer"
_MASKED_BASES = b"ACGTUNX \r\n"
PROSE = re.compile(rb"[a-z][.,;:!?]? [a-z]")

# Letters of nucleotides, tokens of residues alone, the least number of letters that tells the two
# apart, and the least fraction of A, C, G, T, U and N, which is a quarter in proteins.
_BASES = b"ACGTUNacgtun"
_IS_OF_RESIDUES = np.isin(
    np.arange(256), PROTEIN.encode("".join({*RESIDUES} - {*"ACGTUNRYSWKMBDHV"}), "residues")
)
_LEAST_LETTERS, _SHARE = 50, 0.9


@dataclass(frozen=True, slots=True)
class RawRecords:
    """Some records of an input, n of them, before any cleaning.

    Attributes:
        sequences: n texts, line breaks and all; none if there are `tokens`.
        where: (record, offset in its text or None) → that place in the input, in words.
        done: share of the input read, 0 … 1.
        part: where these are not n whole records but a part of a long one, the number of the part,
            from 0 on.
        tokens: of inputs that hold these instead of texts.
    """

    names: list[bytes]
    sequences: list[bytes]
    where: Callable[[int, int | None], str]
    done: float
    part: int | None = None
    tokens: Tokenised | None = None

    def tokenised(self, vocabulary: Vocabulary) -> Tokenised:
        """The tokens of the records, in the vocabulary that they were read for.

        Raises:
            DataError: nucleotides were read as residues.
        """
        if self.tokens is not None:
            return self.tokens
        found = vocabulary.tokenise(self.sequences)
        if vocabulary == PROTEIN:
            _refuse_nucleotides(self, found)
        return found


def readable(name: bytes) -> bytes:
    """A stored name as people see it: piece 7 of the record `read` is `read/7`."""
    return name.replace(PIECE_SEPARATOR, b"/")


def places_by_name(names: Iterable[str], source: str | Path) -> dict[str, int]:
    """Each name → its place among the records of `source`, for what refers to them by name.

    Raises:
        DataError: two records have the same name.
    """
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        first = places.setdefault(name, place)
        if first != place:
            raise DataError(
                f"{source}: records {first + 1:,} and {place + 1:,} are both named {name!r}, "
                "so the name does not say which is meant; rename one"
            )
    return places


def refuse(records: RawRecords, index: int, vocabulary: Vocabulary, advice: str = "") -> NoReturn:
    """Raise the `DataError` of a record that is not of this vocabulary, or holds no sequence.

    Args:
        advice: an alternative to correcting the record.
    """
    name, text = records.names[index].decode("utf-8", "replace"), records.sequences[index]
    fault, place = "has no sequence; remove it", None
    if vocabulary.tokenise([text]).illegal[0]:
        fault, place = vocabulary.fault(text)
    others = text.upper().translate(None, _MASKED_BASES)
    is_letter = place is not None and not vocabulary.is_text
    if is_letter and others and not PROTEIN.tokenise([text]).illegal[0]:
        advice += "; proteins are ingested with alphabet=protein"
    raise DataError(f"{records.where(index, place)}: record {name!r} {fault}{advice}")


def _refuse_nucleotides(records: RawRecords, found: Tokenised) -> None:
    """Refuse nucleotides, IUPAC's codes included, that were read as residues.

    Raises:
        DataError: a record has nothing else, or the records all together.
    """
    if not len(found.starts):
        return
    of_residues = np.logical_or.reduceat(_IS_OF_RESIDUES[found.tokens], found.starts)
    doubtful = ~of_residues & ~found.illegal & (found.lengths > 0)
    if not doubtful.all():
        doubtful &= found.lengths >= _LEAST_LETTERS
    which = np.flatnonzero(doubtful).tolist()
    texts = [b"".join(records.sequences[i].upper().split()) for i in which]
    if not doubtful.all():
        of_bases = [i for i, text in zip(which, texts, strict=True) if _is_of_bases(text)]
    else:
        of_bases = which if _is_of_bases(b"".join(texts)) else []
    if of_bases:
        first, number = of_bases[0], len(records.names)
        name = records.names[first].decode("utf-8", "replace")
        raise DataError(
            f"{records.where(first, None)}: record {name!r} looks like nucleotides, as do "
            f"{len(of_bases):,} of {number:,} records here: A, C, G, T, U, N and IUPAC's codes for "
            "several; read them with alphabet=dna, rna or codon, or translate them"
        )


def _is_of_bases(text: bytes) -> bool:
    others = len(text.translate(None, _BASES))
    return (
        len(text) >= _LEAST_LETTERS and {*b"ACG"} <= {*text} and others <= (1 - _SHARE) * len(text)
    )
