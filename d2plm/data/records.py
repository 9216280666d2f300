"""Raw records of an input, and their cleaning into residue tokens.

All records of a block are cleaned by one `bytes.translate`, without a Python object per residue.
One rule applies to every input: upper and lower case are accepted; whitespace, the gaps `-` and
`.`, and one trailing stop `*` are removed; U, O, B, Z and X are kept; all else is illegal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from d2plm.core.alphabet import RESIDUES, encode
from d2plm.core.errors import DataError

ALIAS_SEPARATOR = b"\x01"  # between the names of equal sequences, as in NCBI's nr

_SEPARATOR, _STOP, _ILLEGAL = 0, 0xFE, 0xFF  # no token of a residue is one of them
_BLANKS_AND_GAPS = b" \t\r\n\v\f-."
_TABLE = bytearray([_ILLEGAL] * 256)
for _letter in RESIDUES:
    _TABLE[ord(_letter)] = _TABLE[ord(_letter.lower())] = encode(_letter)[0]
_TABLE[ord("*")] = _STOP
_TABLE[_SEPARATOR] = _SEPARATOR


@dataclass(frozen=True, slots=True)
class RawRecords:
    """Some records of an input, n of them, uncleaned.

    Attributes:
        sequences: n texts of residue letters, line breaks and all.
        where: (record, offset in its text or None) → that place in the input, in words.
        done: share of the input read, 0 … 1.
    """

    names: list[bytes]
    sequences: list[bytes]
    where: Callable[[int, int | None], str]
    done: float


@dataclass(frozen=True, slots=True)
class CleanSequences:
    """The cleaned sequences of some records, n of them, in one array.

    Attributes:
        text: M bytes, residue tokens (and, between the sequences, something else).
        starts, lengths: int64 [n], where in `text` each begins and how many residues it has.
        illegal: bool [n], true where a letter is no residue; its tokens are then meaningless.
    """

    text: bytes
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    illegal: NDArray[np.bool_]

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        start, length = int(self.starts[index]), int(self.lengths[index])
        return np.frombuffer(self.text, dtype=np.uint8, count=length, offset=start)


def clean(sequences: list[bytes]) -> CleanSequences:
    """Clean texts of residue letters; see the module for the rule."""
    text = b"\0".join([*sequences, b""])
    if text.count(b"\0") != len(sequences):
        text = b"\0".join([*(sequence.replace(b"\0", b"?") for sequence in sequences), b""])
    text = text.translate(_TABLE, _BLANKS_AND_GAPS)
    tokens = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(tokens == _SEPARATOR)
    starts = np.zeros_like(ends)
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts
    # What stands before an empty sequence is a separator, and the last one is before the first.
    lengths -= tokens[ends - 1] == _STOP
    illegal = np.zeros(len(sequences), dtype=np.bool_)
    wrong = np.flatnonzero(tokens >= _STOP)
    owner = np.searchsorted(ends, wrong)
    illegal[owner[wrong < (starts + lengths)[owner]]] = True
    return CleanSequences(text, starts, lengths, illegal)


def refuse(records: RawRecords, index: int, advice: str = "") -> NoReturn:
    """Raise the `DataError` of a record that holds an illegal letter, or no sequence at all.

    Args:
        advice: an alternative to correcting the record.
    """
    name, text = records.names[index].decode("utf-8", "replace"), records.sequences[index]
    wrong = _illegal_letter(text)
    where = records.where(index, None if wrong is None else text.index(wrong))
    letter = None if wrong is None else wrong.decode("latin-1")
    raise DataError(
        f"{where}: record {name!r} {_fault(letter, 'has no sequence; remove it')}{advice}"
    )


def encode_residues(sequence: str, where: str) -> NDArray[np.uint8]:
    """One sequence that did not come from a file, as residue tokens [L]; cleaned like a record.

    Raises:
        DataError: it is not a string, is empty, or contains a letter that is not a residue.
    """
    if not isinstance(sequence, str):
        raise DataError(f"{where}: {type(sequence).__name__} is not a string of residue letters")
    raw = sequence.encode("latin-1", "replace")
    cleaned = clean([raw])
    if cleaned.illegal[0] or not cleaned.lengths[0]:
        wrong = _illegal_letter(raw)  # of the text: one byte of `raw` is one letter of it
        letter = None if wrong is None else sequence[raw.index(wrong)]
        raise DataError(f"{where}: the sequence {_fault(letter, 'is empty')}")
    return cleaned[0].copy()


def _fault(letter: str | None, empty: str) -> str:
    if letter is None:
        return empty
    return f"holds {letter!r}, which is not a residue letter; write X for an unknown residue"


def _illegal_letter(text: bytes) -> bytes | None:
    letters = text.translate(None, _BLANKS_AND_GAPS).removesuffix(b"*")
    legal = RESIDUES.encode()
    return letters.translate(None, legal + legal.lower())[:1] or None
