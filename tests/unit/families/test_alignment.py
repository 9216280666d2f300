"""The alignment of a family: in the columns of its file, and its HMM without any target."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from d2plm.core.vocabulary import decode, encode
from d2plm.data.family import read_family
from d2plm.families import alignment
from d2plm.families.alignment import GAP, align_to, letters_of, text_of
from tests.unit.families.known_sites import aligned_rows, likeliest, members

ROWS = ["MKTAYIA-KQ", "MKSA--AWKQ", "-KSAYVAWRQ", "MRTGYIA-K-"]
FORMS: dict[str, tuple[str, Callable[[str], str], str]] = {  # before, of a row, after
    "aligned FASTA": ("", lambda row: f">r\n{row}\n", ""),
    "A2M": ("", lambda row: f">r\n{row.replace('W', 'w')}*\n", ""),
    "Stockholm": ("# STOCKHOLM 1.0\n", lambda row: f"r{row} {row.replace('-', '.')}\n", "//\n"),
    "Clustal": ("CLUSTAL W\n\n", lambda row: f"r{row} {row}\n", ""),
    # Whose insertions have no column.
    "A3M": ("", lambda row: f">r\n{row[:7]}{row[7].lower().strip('-')}{row[8:]}\n", ""),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_family_keeps_the_columns_of_its_file(form: str, tmp_path: Path) -> None:
    before, of_row, after = FORMS[form]
    (tmp_path / "family").write_text(before + "".join(map(of_row, ROWS)) + after)
    family = read_family(tmp_path / "family", 8)
    assert [decode(one) for one in family.members] == [row.replace("-", "") for row in ROWS]
    assert family.columns is not None
    shown = [row[:7] + row[8:] for row in ROWS] if form == "A3M" else ROWS
    assert [text_of(row) for row in letters_of(family.columns)] == shown
    given = family.given_to(family.members[1])
    assert given.columns is not None
    assert [text_of(row) for row in letters_of(given.columns)] == [shown[0], *shown[2:]]


def test_sequences_that_are_no_alignment_have_no_columns(tmp_path: Path) -> None:
    for rows in (["MKTAYIAKQ", "MKSAYIAKQ"], ["MKTAYIAKQ", "MKSAY"]):
        (tmp_path / "family").write_text("".join(f">r{i}\n{row}\n" for i, row in enumerate(rows)))
        assert read_family(tmp_path / "family", 8).columns is None


def test_a_protein_in_the_file_has_its_columns_whatever_hmmer_thinks(tmp_path: Path) -> None:
    """The rows are shifted against each other, which no aligner would do."""
    rows = [f"{decode(one)}--" for one in members(6)[::2]]
    rows.append(f"--{decode(likeliest())}")
    (tmp_path / "family").write_text("".join(f">r{i}\n{row}\n" for i, row in enumerate(rows)))
    family = read_family(tmp_path / "family", 8)
    beside = align_to(likeliest(), family.members, family.columns)
    assert [text_of(row) for row in beside] == [row[2:] for row in rows]
    found = alignment.observations(letters_of(likeliest()), beside)
    assert {text_of(row) for row in found} == {row[2:] for row in rows[:-1]}  # without the protein


def test_another_protein_is_aligned_to_the_file_s_hmm_once() -> None:
    """Its insertion has no members, its deletion none of their residues."""
    family = [decode(one) for one in members(40)[::2]]
    rows = [f"{text}-" for text in family]
    columns = np.array([[*encode(text), 1] for text in family], np.uint8)
    protein = encode(f"{rows[0][:20]}WWW{rows[0][20:40]}{rows[0][42:60]}")
    beside = align_to(protein, [encode(text) for text in family], columns)
    assert (beside[:, 18:25] == GAP).all(0).sum() == 3
    outside = [*range(18), *range(25, 38), *range(50, len(protein))]  # away from the changes
    expected = aligned_rows(*(f"{row[:20]}---{row[20:40]}{row[42:60]}" for row in rows))
    assert (beside == expected)[:, outside].mean() > 0.97


def test_an_hmm_has_the_columns_that_half_of_the_members_fill() -> None:
    own = [*members(20)[::2]]
    columns = np.array([[*one, 1, 1] for one in own], np.uint8)
    columns[0, -2] = columns[1, 3]
    assert len(likeliest()) == alignment.family_hmm(own, columns).M
