"""One reader of tables: every dialect gives the same rows, or one line that says what is wrong."""

import io
import math
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2plm.core.errors import DataError
from d2plm.data.foreign import refuse_foreign
from d2plm.data.tables import is_missing, number, open_table
from tests.conftest import Logged

COLUMNS, ROWS = ["mutant", "score"], [["K2A", "-0.3"], ["L4P", "1"]]
COMMA = "mutant,score\nK2A,-0.3\nL4P,1\n"


def read(path: Path) -> tuple[list[str], list[list[str]]]:
    with open_table(path) as table:
        return table.columns, [cells for _, cells in table.rows()]


def saved(folder: Path, content: bytes | str) -> Path:
    path = folder / "table.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        COMMA,
        *(COMMA.replace(",", delimiter) for delimiter in ";\t "),
        COMMA.removesuffix("\n"),
        *(COMMA.replace("\n", end) for end in ("\r", "\r\n")),
        COMMA.encode("utf-8-sig"),
        *(COMMA.encode(code) for code in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")),
        *(COMMA + end for end in ("\x1a", "\0" * 500, "# that was all\n", ",\n,\n\n")),
        "\n\n" + COMMA,
        "# project: toy, 2 replicates, filtered\n#\n" + COMMA,
        '"# project: toy, 2 replicates",\n' + COMMA,
        "#" + COMMA,
        '"sep=;"\r\n' + COMMA.replace(",", ";"),
        COMMA.replace("\n", ",,\n") + ",,,\n",
        '"mutant","score"\n"K2A","-0.3"\n"L4P","1"\n',
        '"mutant"\t"score"\n"K2A"\t"-0.3"\n"L4P"\t1\n',
        '"mutant" "score"\n"K2A" -0.3\n"L4P" 1\n',
        " mutant , score\nK2A,-0.3\nL4P,1\n",
    ],
)
def test_every_dialect_gives_the_same_rows(tmp_path: Path, content: bytes | str) -> None:
    assert read(saved(tmp_path, content)) == (COLUMNS, ROWS)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", " "])
def test_row_names_of_r_are_a_column_without_a_name(tmp_path: Path, delimiter: str) -> None:
    content = '"mutant","score"\n"1","K2A",-0.3\n"2","L4P",1\n'.replace(",", delimiter)
    assert read(saved(tmp_path, content)) == (["", *COLUMNS], [["1", *ROWS[0]], ["2", *ROWS[1]]])


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ('n\tx\n"early\t1\nlate"\t2\nok\t3\n', [['"early', "1"], ['late"', "2"], ["ok", "3"]]),
        ('n\tx\n5"-UTR\t1\n"\t2\n""\t3\n', [['5"-UTR', "1"], ['"', "2"], ["", "3"]]),
        ('n\tx\n"say ""x"""\t1\n', [['say "x"', "1"]]),
        (
            'n\tx\n"two\nlines"\t1\n"a\ttab"\t2\nz\t3\n',
            [["two\nlines", "1"], ["a\ttab", "2"], ["z", "3"]],
        ),
        ('n,x\n"two\nlines",1\n"a, b",2\n', [["two\nlines", "1"], ["a, b", "2"]]),
        ("n\nM1A,K2G\nM1A\n", [["M1A,K2G"], ["M1A"]]),
        ("n;x\nM1A,K2G;0,5\n", [["M1A,K2G", "0,5"]]),
    ],
)
def test_quotation_marks(tmp_path: Path, content: str, rows: list[list[str]]) -> None:
    assert read(saved(tmp_path, content))[1] == rows


@given(
    st.lists(
        st.tuples(*[st.text("ab\"' ,;#", max_size=5)] * 3).filter(
            lambda row: {*"ab"} & {*"".join(row)} and row[0][:1] != "#"
        ),
        min_size=1,
    )
)
def test_no_row_of_a_table_with_tabs_is_lost(rows: list[tuple[str, str, str]]) -> None:
    content = "\n".join(map("\t".join, [("a", "b", "c"), *rows]))
    stream = io.TextIOWrapper(io.BufferedReader(io.BytesIO(content.encode())))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", stream)
        with open_table(Path("-")) as table:
            found = list(table.rows())
    assert [line for line, _ in found] == [*range(2, len(rows) + 2)]
    for (_, cells), row in zip(found, rows, strict=True):
        for cell, written in zip(cells, row, strict=True):
            assert cell == written or written[0] == written[-1] == '"'


def test_a_cell_of_another_encoding_is_read_with_a_notice(tmp_path: Path, caplog: Logged) -> None:
    caplog.set_level("INFO")
    path = saved(tmp_path, "mutant,IC50 (µM)\nK2A,±1\nL4P,2\n".encode("latin-1"))
    assert read(path) == (["mutant", "IC50 (µM)"], [["K2A", "±1"], ["L4P", "2"]])
    assert "Windows-1252" in caplog.text


@pytest.mark.parametrize(
    ("content", "place"),
    [
        *(("", "is empty"), ("\n \n# only a comment\n", "is empty")),
        ("a,b\nx,2,3\n", "line 2: has 3"),
        *(("a,b\n1,2\n1,2,3\n", "line 3: has 3"), ("# c\na,b\n\n1,2\n1\n", "line 5: has 1")),
        *(('a,b\n1,"1"2\n', "line 2: not"), ('a,b\n"1,2\n1,2\n', "line 3: not")),
    ],
)
def test_what_is_no_table_is_named_with_its_line(tmp_path: Path, content: str, place: str) -> None:
    with pytest.raises(DataError, match=place):
        read(saved(tmp_path, content))


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        *(("-0.3", -0.3), ("-0,3", -0.3), ("−1.5", -1.5), (" +2e-3 ", 0.002), (".5", 0.5)),
        *(("5.", 5.0), ("1,25e1", 12.5), ("0,345", 0.345), ("-1,2345", -1.2345)),
        *((cell, math.nan) for cell in ("", " ", "n/a", "#N/A", "NaN", "NULL", "n.d.", "—")),
    ],
)
def test_a_measured_value_is_read(cell: str, value: float) -> None:
    assert number(cell) == pytest.approx(value, nan_ok=True)
    assert is_missing(cell) == math.isnan(value)


@pytest.mark.parametrize(
    "cell",
    [
        *("inf", "1e400", "1 000", "1_000", "1.234,5", "1,234.5", "1,2,3", "1,234", "high"),
        *("<0.1", "50%", "--1", "1e", ",", "TRUE"),
    ],
)
def test_what_is_no_finite_number_is_refused(cell: str) -> None:
    assert number("1,234", ";") == pytest.approx(1.234)  # else like thousands
    with pytest.raises(DataError, match=re.escape(repr(cell))):
        number(cell, ",")


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (
            b"PK\x03\x04".ljust(30, b"\0") + b"[Content_Types].xml PK xl/workbook.xml",
            "a spreadsheet",
        ),
        (b"PK\x03\x04".ljust(30, b"\0") + b"a.csv", "a zip archive"),
        (b"a.csv".ljust(257, b"\0") + b"ustar", "a tar archive"),
        (b"\n<!DOCTYPE html><html>", "an HTML page"),
        (b'\xef\xbb\xbf{\n  "a": 1}', "JSON"),
        (b"HEADER    OXYGEN TRANSPORT                        22-JAN-98   1A6M\n", "PDB"),
        (b"data_1A6M\n#\n_entry.id 1A6M\n", "mmCIF"),
        (b"LOCUS       NP_000198     110 aa            linear PRI 01-JAN\n", "GenPept"),
        (b"ID   MYG_PHYMC               Reviewed;         154 AA.\n", "UniProt"),
        (b"@read1\nACGT\n+\nFFFF\n", "FASTQ"),
        (">a\nMK\n".encode("utf-16-le"), "UTF-16"),
    ],
)
def test_files_of_other_programs_are_named(start: bytes, named: str) -> None:
    with pytest.raises(DataError, match=named) as caught:
        refuse_foreign(Path("folder/given.dat"), start)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "start",
    [
        *(b"", b">sp|P1|X\nMKT\n", b"# STOCKHOLM 1.0\n", b"CLUSTAL W\n", b"mutant,score\nK2A,1\n"),
        *(b">P1;X\ntitle\nMKT*\n", b"; comment\n>a\nMK", b"ID,sequence\n", b"#12\t1\n"),
        *(b"PKTL", b"MM", b"BM,score", b"data,score\n"),
    ],
)  # fmt: skip
def test_what_may_be_sequences_or_a_table_passes(start: bytes) -> None:
    refuse_foreign(Path("a"), start)
