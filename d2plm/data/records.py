"""Raw records of an input, which a vocabulary makes tokens of, and the error for a bad one."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import PROTEIN, Tokenised, Vocabulary

ALIAS_SEPARATOR = b"\x01"  # between the names of equal sequences, as in NCBI's nr
PIECE_SEPARATOR = b"\x02"  # between the name of a record and the number of its piece
OF_TEXT = "; text is ingested with alphabet=bytes or tokenizer"
_BASES = b"ACGTUNX \r\n"  # and what masks them
PROSE = re.compile(rb"[a-z][.,;:!?]? [a-z]")


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
        """The tokens of the records, in the vocabulary that they were read for."""
        return vocabulary.tokenise(self.sequences) if self.tokens is None else self.tokens


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
    if place is not None and not vocabulary.is_text:  # a letter is illegal
        if PROSE.search(text):
            advice += OF_TEXT
        elif not PROTEIN.tokenise([text]).illegal[0] and text.upper().translate(None, _BASES):
            advice += "; proteins are ingested with alphabet=protein"
    raise DataError(f"{records.where(index, place)}: record {name!r} {fault}{advice}")
