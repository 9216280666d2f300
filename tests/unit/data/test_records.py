"""Cleaning of records: the rule, letter by letter, and what is said about what breaks it."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import ESM2_TOKENS, PROTEIN
from d2plm.data import records
from d2plm.data.records import first_words, places_by_name, refuse, require_distinct, shown

LETTERS = "ACDEFGHIKLMNPQRSTVWY" + "UOBZX"

# Mostly letters, so that legal texts are drawn as well; and any byte at all.
LEGAL = st.text(LETTERS + LETTERS.lower() + " \t\r\n-.*", max_size=30).map(str.encode)
TEXTS = st.lists(LEGAL | st.binary(max_size=8), max_size=8)


SURROUNDINGS = ((b"", b""), (b"M", b"K"), (b"MK", b""))
EVERY_BYTE = [start + bytes([n]) + end for n in range(256) for start, end in SURROUNDINGS]


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


def _records(*texts: bytes) -> records.RawRecords:
    names, where = [b"p%d" % n for n in range(len(texts))], "record {}, offset {}".format
    return records.RawRecords(names=names, sequences=list(texts), where=where, done=1.0)


@given(TEXTS)
@example([])
@example([b""])
@example([b"*", b"", b"*"])
@example([b"MK**", b"M*K", b"*M", b"MK*\n*"])
@example([b"\0", b"MK", b"\0\0M\0"])
@example([b"MK\xfe", b"\xff", b"MK"])
@example(EVERY_BYTE)
def test_texts_are_cleaned_as_letter_by_letter(texts: list[bytes]) -> None:
    cleaned = PROTEIN.tokenise(texts)
    assert len(cleaned.starts) == len(cleaned.lengths) == len(cleaned.illegal) == len(texts)
    for index, expected in enumerate(map(_clean_slowly, texts)):
        assert cleaned.illegal[index] == (expected is None)
        if expected is not None:
            assert cleaned[index].tolist() == expected
            assert cleaned.lengths[index] == len(expected)


@pytest.mark.parametrize(
    ("text", "offset", "letter"),
    [
        *((b"MK\nAJC\n", 4, "'J'"), (b"MK**", 2, "'*'"), (b"M\0K", 1, r"'\x00'")),
        *((b"mk-1.2", 3, "'1'"), (b"\xc3\xa9", 0, "'é'")),
    ],
)
def test_an_illegal_letter_is_named_with_its_place(text: bytes, offset: int, letter: str) -> None:
    with pytest.raises(DataError) as caught:
        refuse(_records(b"AC", text), 1, PROTEIN)
    assert str(caught.value).startswith(f"record 1, offset {offset}: record 'p1' holds {letter},")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        *(("MK...V", "a gap"), ("MJ", "'J'"), ("mα?", "'α'"), (" ", "empty"), (None, "NoneType")),
        *((["MKT"], "list"),),
    ],
)
def test_a_bad_sequence_from_elsewhere_is_rejected(sequence: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^reference 3: .*{message}"):
        PROTEIN.encode(sequence, "reference 3")


UNIPROT = ["sp|P02185|MYG_PHYMC", "tr|A0A0A0MRZ7|A0A0A0MRZ7_HUMAN", "UniRef90_Q9Y5X2", "toy/11-47"]
OTHERS = ["gi|129295|sp|P01013|OVAX_CHICK", "ref|NP_000508.1|", "pdb|1ABC|A", "UniRef90"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("sp|P02185|MYG_PHYMC", 0), ("MYG_PHYMC", 0), ("UniRef100_P02185", 0)),
        *(("sp|P02185|MYG_PHYMC Myoglobin OS=Physeter", 0), ("A0A0A0MRZ7", 1), ("Q9Y5X2", 2)),
        *(("sp|Q9Y5X2|SNX8_HUMAN", 2), ("toy", 3), ("toy/11-47", 3)),
        *(("P01013", 4), ("OVAX_CHICK", 4), ("NP_000508.1", 5), ("pdb|1ABC|A", 6)),
        *((name, None) for name in ("P0218", "sp", "HUMAN", "MYG", "", "toy/1", "TOY")),
        *((name, None) for name in ("129295", "1ABC", "A", "90")),
    ],
)
def test_a_record_is_found_by_its_name_or_an_identifier_in_it(name: str, place: int) -> None:
    assert places_by_name([*UNIPROT, *OTHERS, ""], "in.fasta")(name) == place


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["enz", "other", "enz"], "enz"),
        (["sp|P1|A_B", "x", "tr|P1|C_D"], "P1"),
        (["toy/1-20", "x", "toy/30-40"], "toy"),
        (["UniRef50_P1", "x", "sp|P1|A_B"], "tr|P1|A_B"),
    ],
)
def test_a_name_of_two_records_is_refused(tmp_path: Path, names: list[str], wanted: str) -> None:
    source = tmp_path / "in.fasta"
    source.write_text("".join(f">{name} words\nMKT\nAYI\n" for name in names))
    place_of = places_by_name(names, source)
    assert place_of("x" if "x" in names else "other") == 1
    for place, lines in ((place_of, "line 1 .*line 7"), (places_by_name(names, "x.csv"), "1 .*3")):
        with pytest.raises(DataError, match=lines):
            place(wanted)
    for name in {*names} - {"enz"}:  # whole, it means one
        assert place_of(name) == names.index(name)


def test_records_without_names_of_their_own_are_refused_where_names_matter(tmp_path: Path) -> None:
    (tmp_path / "in.fasta").write_text(">a\nMK\n>\nMK\n")
    with pytest.raises(DataError, match="line 3"):
        require_distinct(["a", ""], tmp_path / "in.fasta")
    with pytest.raises(DataError, match="'a' names"):
        require_distinct(["a", "a"], "x.csv")
    require_distinct(UNIPROT, "x.csv")


@given(st.binary(max_size=20))
def test_a_name_has_one_word_and_no_control_characters(header: bytes) -> None:
    name = shown(first_words([header])[0])
    assert not re.search(r"[\x00-\x20\x7f]", name)
    assert shown(first_words([b"first\x01second"])[0]) == "first"
