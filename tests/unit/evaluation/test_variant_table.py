"""Tables of variants as people write them: read, left out with a reason, or refused in a line."""

import logging
import re
from pathlib import Path

import pytest

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import encode
from d2plm.data.fasta import FastaRecord
from d2plm.evaluation.variant_table import Placed, VariantTable, read_variants
from d2plm.families.variants import INDEL, STOP, UNKNOWN, UNSURE
from tests.conftest import Logged

WILD_TYPE = FastaRecord("toy", encode("MKTAYIAKQR"))


def table(folder: Path, *lines: str) -> VariantTable:
    path = folder / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_variants(path)


def placed(given: VariantTable) -> Placed:
    return given.place([WILD_TYPE], {0: [*range(len(given.cells))]}, 0, False)[0]


RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
NAMES = re.findall("...", "AlaArgAsnAspCysGlnGluGlyHisIleLeuLysMetPheProSerThrTrpTyrVal")
HEADER = "mutant,score,sd"


@pytest.mark.parametrize(
    ("message", "lines"),
    [
        # Thousands that may be decimals.
        (r"line \d: score '", ["mutant\tscore", "K2A\t1,234", "K2A\t12,000", "K2A\t980"]),
        (r"line \d: score '", ["mutant;score", "K2A;1,234", "K2A;2,345"]),
        (r"line \d: score '", ["mutant,score", "K2A,1.234", "K2A,12.000", "K2A,980"]),
        (r"line \d: score '", ["mutant\tscore", "K2A\t1.200", "K2A\tNA", "K2A\t1,5"]),
        ("line 3: score 'high'", ["mutant,score", "K2A,1", "T3S,high"]),
        ("no header row", ["p.Lys2Ala;-0.5", "p.Thr3Ser;0.1"]),
        ("no header row", ["MKTAYIAKQR,1", "MATAYIAKQR,2"]),
        ("no header row", ["0.5,K2A", "0.1,T3S"]),
        ("matrix", [",".join(["pos", *RESIDUES]), *(f"{n}{',0.1' * 20}" for n in range(1, 60))]),
        ("matrix", [",".join(["wt", *NAMES]), *(f"K{n}{',0.1' * 20}" for n in range(1, 60))]),
        ("matrix", ["aa,K2,T3,Y5", *(f"{one},0,1,2" for one in RESIDUES)]),
        ("matrix", ["aa,2,3,5", *(f"{one},0,1,2" for one in NAMES)]),
        ("matrix", [",".join(RESIDUES), *(",".join(["0.1"] * 20) for _ in range(60))]),
        ("Markdown", ["| mutant | score |", "|---|---|", "| K2A | 1 |"]),
        ("FASTA", [">toy", "MKTAYIAKQR"]),
        ("JSON", ['[{"mutant": "K2A"}]']),
        ("'score'", ["mutant,score,score", "K2A,1,2"]),
        ("several columns", ["mutant,score,,mutant,score", "K2A,1,,T3S,2"]),
        ("line 2", ["Table S1. Effects", HEADER, "K2A,1,2"]),
        ("line 2", [",Library,", HEADER, "K2A,1,2"]),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, message: str, lines: list[str]) -> None:
    with pytest.raises(DataError, match=message):
        table(tmp_path, *lines).measured()


CLEAR = ["\t 0,123 1,234", "; 1,25 1,234", ", 1.234 2.345 0", ", 1.234 2.5", ", 980 1000"]


@pytest.mark.parametrize("clear", CLEAR)
def test_numbers_that_are_clear_are_measured(tmp_path: Path, clear: str) -> None:
    delimiter, *cells = clear.split(" ")
    rows = [delimiter.join(("K2A", cell)) for cell in cells]
    found = table(tmp_path, delimiter.join(("mutant", "score")), *rows).measured()
    assert found and found[1].tolist() == [float(cell.replace(",", ".")) for cell in cells]


@pytest.mark.parametrize("again", ["mutant, score", "\ufeffmutant,score", "#mutant,score"])
def test_a_repeated_header_is_no_row(tmp_path: Path, caplog: Logged, again: str) -> None:
    caplog.set_level(logging.INFO)
    given = table(tmp_path, "mutant,score", "K2A,1", again, "T3S,2", again, "Y5F,3")
    assert given.texts == ["K2A", "T3S", "Y5F"]
    assert caplog.text.count("line 3 repeats the header") == caplog.text.count("repeats") == 1


def test_what_has_no_score_is_left_out_by_reason(tmp_path: Path) -> None:
    given = table(tmp_path, "mutant", "K2A", "p.0?", "T3S", "K8stop", "Y5Δ", "p.?")
    assert placed(given).rows.tolist() == [0, 2]
    lines = {reason: [line for line, _ in rows] for reason, rows in given.left_out.items()}
    assert lines == {UNSURE: [3, 7], STOP: [5], INDEL: [6]}


def test_three_columns_as_pandas_writes_them(tmp_path: Path) -> None:
    given = table(tmp_path, "wt,pos,mut", "K,2.0,A", "T,3.0,S", "Y,,F", "Y,5.0,-", "Y,5.0,")
    assert placed(given).rows.tolist() == [0, 1]
    assert {reason: len(rows) for reason, rows in given.left_out.items()} == {
        "without a variant": 2,
        INDEL: 1,
    }


def test_sequences_with_unknown_residues_are_left_out(tmp_path: Path, caplog: Logged) -> None:
    rows = ["MATAYIAKQR", "MKTXYIAKQR", "MKTAYIAAKQR", "MKTAYIAKQB"]
    caplog.set_level(logging.INFO)
    given = table(tmp_path, "mutated_sequence", *rows * 5, "MKTAY1AKQR")
    found = placed(given)
    assert found.sequences is not None and len(found.sequences) == len(found.rows) == 10
    assert len(given.left_out[UNKNOWN]) == 10
    given.report({0: found}, ["toy"], "")
    assert caplog.text.count("table.csv, line") == 0
