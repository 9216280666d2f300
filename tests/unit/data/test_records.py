"""Cleaning of records: the rule, letter by letter, and what is said about what breaks it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import ESM2_TOKENS, PROTEIN, decode
from d2plm.data.records import RawRecords, refuse

LETTERS = "ACDEFGHIKLMNPQRSTVWY" + "UOBZX"

# Mostly letters, so that legal texts are drawn as well; and any byte at all.
TEXTS = st.lists(
    st.one_of(
        st.text(LETTERS + LETTERS.lower() + " \t\r\n-.", max_size=30).map(str.encode),
        st.lists(
            st.sampled_from(
                [b"M", b"k", b"*", b"\0", b"-", b".", b"\r\n", b" ", b">", b"J", b"\xff"]
            ),
            max_size=8,
        ).map(b"".join),
        st.binary(max_size=8),
    ),
    max_size=8,
)


def _clean_slowly(text: bytes) -> list[int] | None:
    """Tokens of a text, letter by letter; None where a letter is no residue."""
    letters = [chr(byte) for byte in text if chr(byte) not in " \t\r\n\v\f-."]
    if letters and letters[-1] == "*":
        letters.pop()
    tokens = []
    for letter in letters:
        if letter.upper() not in LETTERS or not letter.isascii():
            return None
        tokens.append(ESM2_TOKENS.index(letter.upper()))
    return tokens


def _records(*texts: bytes) -> RawRecords:
    return RawRecords(
        names=[b"p%d" % index for index in range(len(texts))],
        sequences=list(texts),
        where=lambda record, offset: f"record {record}, offset {offset}",
        done=1.0,
    )


@settings(deadline=None)
@given(TEXTS)
@example([])
@example([b""])
@example([b"*", b"", b"*"])
@example([b"MK**", b"M*K", b"*M", b"MK*\n*"])
@example([b"\0", b"MK", b"\0\0M\0"])
@example([b"MK\xfe", b"\xff", b"MK"])
def test_texts_are_cleaned_as_letter_by_letter(texts: list[bytes]) -> None:
    cleaned = PROTEIN.tokenise(texts)
    assert len(cleaned.starts) == len(cleaned.lengths) == len(cleaned.illegal) == len(texts)
    for index, expected in enumerate(map(_clean_slowly, texts)):
        assert cleaned.illegal[index] == (expected is None)
        if expected is not None:
            assert cleaned[index].tolist() == expected
            assert cleaned.lengths[index] == len(expected)


def test_every_byte_alone_and_within_a_sequence() -> None:
    letters = [bytes([byte]) for byte in range(256)]
    texts = [text for letter in letters for text in (letter, b"M" + letter + b"K", b"MK" + letter)]
    cleaned = PROTEIN.tokenise(texts)
    for index, expected in enumerate(map(_clean_slowly, texts)):
        assert cleaned.illegal[index] == (expected is None)
        if expected is not None:
            assert cleaned[index].tolist() == expected


def test_a_bad_record_does_not_touch_its_neighbours() -> None:
    cleaned = PROTEIN.tokenise([b"MK", b"A\0C", b"LV*", b"", b"W!", b"Y"])
    assert cleaned.illegal.tolist() == [False, True, False, False, True, False]
    assert [decode(cleaned[index]) for index in (0, 2, 3, 5)] == ["MK", "LV", "", "Y"]


@pytest.mark.parametrize(
    ("text", "offset", "letter"),
    [
        (b"MK\nAJC\n", 4, "'J'"),
        (b"MK\n*A*\n", 3, "'*'"),
        (b"MK**", 2, "'*'"),
        (b"M\0K", 1, r"'\x00'"),
        (b"mk-1.2", 3, "'1'"),
        (b"\xc3\xa9", 0, "'Ã'"),
    ],
)
def test_an_illegal_letter_is_named_with_its_place(text: bytes, offset: int, letter: str) -> None:
    with pytest.raises(DataError) as caught:
        refuse(_records(b"AC", text), 1, PROTEIN)
    assert str(caught.value).startswith(f"record 1, offset {offset}: record 'p1' holds {letter},")
    assert "\n" not in str(caught.value)


@settings(deadline=None)
@given(TEXTS)
def test_whatever_is_illegal_or_empty_is_rejected_in_one_line(texts: list[bytes]) -> None:
    cleaned = PROTEIN.tokenise(texts)
    for index in np.flatnonzero(cleaned.illegal | (cleaned.lengths == 0)).tolist():
        with pytest.raises(DataError) as caught:
            refuse(_records(*texts), index, PROTEIN)
        assert "\n" not in str(caught.value)
        assert ("has no sequence" in str(caught.value)) == (not cleaned.illegal[index])


@pytest.mark.parametrize("text", [b"", b"\r\n \n", b"*", b"-..-\n*\n"])
def test_a_record_without_sequence_is_named(text: bytes) -> None:
    with pytest.raises(DataError, match="record 0, offset None: record 'p0' has no sequence"):
        refuse(_records(text), 0, PROTEIN)


def test_a_name_that_is_not_a_text_is_shown_on_one_line() -> None:
    records = RawRecords([b"a\n\xff"], [b""], lambda record, offset: "here", 1.0)
    with pytest.raises(DataError, match=r"here: record 'a\\n\ufffd' has no sequence"):
        refuse(records, 0, PROTEIN)


def test_a_sequence_from_elsewhere_is_cleaned_like_a_record() -> None:
    assert decode(PROTEIN.encode("mk-v\n*", "reference")) == "MKV"


@pytest.mark.parametrize(
    ("sequence", "message"),
    [("MJ", "holds 'J', which is not a residue letter"), ("mα?", "holds 'α'"), (" ", "is empty")],
)
def test_a_bad_sequence_from_elsewhere_is_rejected(sequence: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        PROTEIN.encode(sequence, "reference 3")
    assert str(caught.value).startswith("reference 3: the sequence ")
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [5, None, ["MKT"]])
def test_what_is_not_a_string_is_rejected(value: Any) -> None:
    with pytest.raises(DataError, match=r"^protein 3: .* is not a string"):
        PROTEIN.encode(value, "protein 3")
