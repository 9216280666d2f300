"""Raw records of an input, their names, and the errors for invalid ones."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import PROTEIN, RESIDUES, Tokenised, Vocabulary
from d2plm.data.compressed import open_input
from d2plm.data.tables import LONGEST_WORD, NO_SEQUENCE, is_missing

ALIAS_SEPARATOR = b"\x01"  # between the names of equal sequences, as in NCBI's nr
PIECE_SEPARATOR = b"\x02"  # between the name of a record and the number of its piece
OF_TEXT = "; text is ingested with alphabet=bytes or tokenizer"
_MASKED_BASES = b"ACGTUNX \r\n"
PROSE = re.compile(rb"[a-z][.,;:!?]? [a-z]")
# Accession and entry name in headers of UniProt, UniRef and NCBI (not `gnl|database|name`).
_IDENTIFIERS = re.compile(
    rb"(?:gi\|\d+\|)?(?:sp|tr|ref|gb|emb|dbj|pir|prf|tp[dge])\|([^|]*)\|([^|]*)|UniRef\d+_(.+)"
)
_REGION = re.compile(rb"/\d+-\d+$")
_CONTROL = bytes({*range(32), 127} - {*ALIAS_SEPARATOR, *b"\t\n\v\f\r"})
WITHOUT_CONTROL = bytes.maketrans(_CONTROL, len(_CONTROL) * b"_")  # for names as they are read

# To tell nucleotides from proteins: letters of bases, tokens that only residues have, the least
# number of letters, and the least fraction of A, C, G, T, U and N, which is a quarter in proteins.
_BASES, _AMBIGUOUS = b"ACGTUN", b"RYSWKMBDHV"
_IS_OF_RESIDUES = np.isin(
    np.arange(256), PROTEIN.encode("".join({*RESIDUES} - {*"ACGTUNRYSWKMBDHV"}), "residues")
)
_LEAST_LETTERS, _SHARE = 50, 0.9
_GLANCE = 16  # tokens; nearly all proteins have a residue that is no base among these


@dataclass(frozen=True, slots=True)
class RawRecords:
    """n records of an input, before any cleaning.

    Attributes:
        sequences: n texts with their line breaks; empty if there are `tokens`.
        where: (record, offset in its text or None) → that place in the input, in words.
        done: fraction of the input read, 0 … 1.
        part: number of the part, from 0 on, if this is a part of a long record.
        tokens: for inputs that contain tokens instead of texts.
        aligned: whether the records are the rows of a whole alignment, equally long.
    """

    names: list[bytes]
    sequences: list[bytes]
    where: Callable[[int, int | None], str]
    done: float
    part: int | None = None
    tokens: Tokenised | None = None
    aligned: bool = False

    def tokenised(self, vocabulary: Vocabulary) -> Tokenised:
        """The tokens of the records, none for words such as "n/a".

        Raises `DataError` if nucleotides were read as residues.
        """
        if self.tokens is not None:
            return self.tokens
        found = vocabulary.tokenise(self.sequences)
        if not vocabulary.is_text:
            for index in np.flatnonzero(found.lengths <= LONGEST_WORD):
                if has_none(self.sequences[index]):
                    found.lengths[index], found.illegal[index] = 0, False
        if vocabulary == PROTEIN:
            _refuse_nucleotides(self, found)
        return found


def has_none(text: bytes) -> bool:
    """Whether a text is a word for a missing sequence, as in tables and databases."""
    return is_missing(text.decode("latin-1"), NO_SEQUENCE)


def readable(name: bytes) -> bytes:
    """A stored name as shown to users: piece 7 of the record `read` is `read/7`."""
    return name.replace(PIECE_SEPARATOR, b"/")


def first_words(headers: Iterable[bytes]) -> list[bytes]:
    """The name in each header (without `>`): its first word."""
    return [*map(_first_word, b"\n".join(headers).translate(WITHOUT_CONTROL).split(b"\n"))]


def _first_word(header: bytes) -> bytes:
    if ALIAS_SEPARATOR in header:  # names of equal sequences, as in NCBI's nr
        return ALIAS_SEPARATOR.join(map(_first_word, header.split(ALIAS_SEPARATOR)))
    words = header.split(maxsplit=1)
    return words[0] if words else b""


def shown(name: bytes) -> str:
    """The first name of a stored or raw record, as shown to users."""
    return readable(name).partition(ALIAS_SEPARATOR)[0].decode("utf-8", "replace")


def identifiers(name: bytes) -> list[bytes]:
    """A name and the identifiers in it: `P1` and `A_B` in `sp|P1|A_B`."""
    found = _IDENTIFIERS.fullmatch(name)
    return [name, *filter(None, found.groups())] if found else [name]


def places_by_name(names: Sequence[str], source: str | Path) -> Callable[[str], int | None]:
    """A function from a name to the index of its record in `source`, or to None if there is none.

    `P02185` and `MYG_PHYMC` also refer to `sp|P02185|MYG_PHYMC` and `UniRef90_P02185`, and these to
    each other, and `toy` to `toy/11-47`; a record without a name cannot be referred to. The
    function raises `DataError` for a name that may mean two records.
    """
    exact: defaultdict[str, list[int]] = defaultdict(list)
    by_reference: defaultdict[bytes, list[int]] = defaultdict(list)
    for place, name in enumerate(names):
        exact[name].append(place)
        for one in _references(name):
            by_reference[one].append(place)

    def place_of(name: str) -> int | None:
        others = {place for one in _references(name) for place in by_reference.get(one, ())}
        found = exact.get(name) or sorted(others)
        if name and len(found) > 1:
            raise DataError(
                f"{source}: {name!r} names {_described(found, names, source)} and is ambiguous; "
                "give each record a name of its own"
            )
        return found[0] if name and found else None

    return place_of


def require_distinct(names: Sequence[str], source: str | Path) -> None:
    """Raise `DataError` unless each record of `source` has a name of its own."""
    if unnamed := [place for place, name in enumerate(names) if not name]:
        where = _described(unnamed, names, source)
        raise DataError(f"{source}: no name: {where}; give each record one of its own")
    place_of = places_by_name(names, source)
    for name in names:
        place_of(name)


def _described(found: list[int], names: Sequence[str], source: str | Path) -> str:
    """The first two of these records, by line if the source is a FASTA file."""
    lines, meant = list[int](), {names[place] for place in found}
    with suppress(DataError):
        if Path(source).is_file():
            with open_input(Path(source)) as file:
                for number, line in enumerate(file.content, 1):
                    if line.startswith(b">") and shown(first_words([line[1:-1]])[0]) in meant:
                        lines.append(number)
    if len(lines) != len(found):
        return " and ".join(f"record {place + 1:,}" for place in found[:2])
    return " and ".join(f"the record on line {line:,}" for line in lines[:2])


def _references(name: str) -> set[bytes]:
    """Strings that refer to a name: its first word and identifiers, also without a region."""
    named = identifiers(_first_word(name.encode()))
    named += [one for word in named for one in identifiers(_REGION.sub(b"", word))]
    return {*named} - {b""}


def refuse(records: RawRecords, index: int, vocabulary: Vocabulary, advice: str = "") -> NoReturn:
    """Raise the `DataError` for an illegal or empty record, with `advice` besides correcting it."""
    name, text = records.names[index].decode("utf-8", "replace"), records.sequences[index]
    fault, place = "has no sequence; remove it", None
    if vocabulary.tokenise([text]).illegal[0] and not has_none(text):
        fault, place = vocabulary.fault(text)
    others = text.upper().translate(None, _MASKED_BASES)
    is_letter = place is not None and not vocabulary.is_text
    if is_letter and others and not PROTEIN.tokenise([text]).illegal[0]:
        advice += "; proteins are ingested with alphabet=protein"
    raise DataError(f"{records.where(index, place)}: record {name!r} {fault}{advice}")


def _refuse_nucleotides(records: RawRecords, found: Tokenised) -> None:
    """Reject records, or a whole block, of nucleotides (with IUPAC codes) read as residues."""
    long = np.flatnonzero((found.lengths >= _LEAST_LETTERS) & ~found.illegal)
    beginnings = found.tokens[found.starts[long][:, None] + np.arange(_GLANCE)]
    doubtful = long[~_IS_OF_RESIDUES[beginnings].any(axis=1)].tolist()
    of_bases = [i for i in doubtful if _is_of_bases(records.sequences[i])]
    if not of_bases and not _IS_OF_RESIDUES[found.tokens[:_LEAST_LETTERS]].any():
        short_ones = _is_of_bases(b"".join(records.sequences))
        of_bases = [*range(len(records.names))] if short_ones else []
    if of_bases:
        first, number = of_bases[0], len(records.names)
        name = records.names[first].decode("utf-8", "replace")
        raise DataError(
            f"{records.where(first, None)}: record {name!r} looks like nucleotides, as do "
            f"{len(of_bases):,} of {number:,} records here: A, C, G, T, U, N and IUPAC's codes for "
            "several; read them with alphabet=dna, rna or codon, or translate them"
        )


def _is_of_bases(text: bytes) -> bool:
    letters = b"".join(text.upper().split())
    others = letters.translate(None, _BASES)
    enough = len(letters) >= _LEAST_LETTERS and {*b"ACG"} <= {*letters}
    few = len(others) <= (1 - _SHARE) * len(letters)
    return enough and few and not others.translate(None, _AMBIGUOUS)
