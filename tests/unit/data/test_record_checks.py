"""What stands where sequences should: kinds of files that people have, read right or refused."""

import logging
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import CANONICAL, DNA, decode
from d2plm.data.fasta import read_fasta
from d2plm.data.ingest import ingest
from d2plm.settings.data import Reading

A = "MKRTLVWGADENQSYPIHCFMKLLVVEADGTWRKQHPSGLIVDE"
B = "MSTNPKPQRKTKRNTNRRPQDVKFPGGGQIVGGVYLLPRRGPRLG"
DROP = Reading(on_illegal="drop")


def read(folder: Path, content: str | bytes) -> dict[str, str]:
    file = folder / "in.fasta"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return {record.name: decode(record.tokens) for record in read_fasta(file)}


def refusal(folder: Path, content: str | bytes) -> str:
    """The message of a file that is refused, also where bad records may be left out."""
    with pytest.raises(DataError) as caught:
        read(folder, content)
    message = str(caught.value)
    with pytest.raises(DataError) as caught:
        ingest(folder / "in.fasta", folder / "store", reading=DROP)
    assert str(caught.value) == message
    assert not (folder / "store").exists()
    assert "\n" not in message
    return message.removeprefix(str(folder / "in.fasta"))


@pytest.mark.parametrize(
    "line",
    [
        *("curl: (18) transfer closed", "Killed", "Done.", "  Terminated", "from Homo sapiens"),
        *("[Homo sapiens]", "Segmentation fault (core dumped)", "BROKEN PIPE, NO DATA", "Ala Gly"),
        *("connection reset", "MYOGLOBIN MUTANT", "CHAIN A", "tRNA ligase OS=Homo sapiens"),
    ],
)
def test_words_in_a_sequence_are_quoted_with_their_line(tmp_path: Path, line: str) -> None:
    quoted = f"record 'b': '{line.strip()}' is no sequence"
    for content, number in (
        (f">a\n{A}\n>b\n{B}\n{line}", 5),
        (f">b some\n{line}\n{B}\n>a\n{A}\n", 2),
    ):
        assert refusal(tmp_path, content).startswith(f", line {number}: {quoted}")


@pytest.mark.parametrize(
    "text",
    [
        "mkrtlvwgad enqsypihcf mkl",
        "MKRTL VWGAD\nENQSY PIHCF\nMKL",
        "MKRTLVWGADENQSYPIHCF MKL",
        "M K R T L V W G A D E N Q S Y P I H C F M K L",
        "m\nk\nr\nt\nlvwgadenqsypihcfmkl",
        "MKRTLVWGAD\tENQSYPIHCF\tMKL  ",
        "MKRTLVWGAD\nenqsypihcf\nMkl\n",  # soft-masked
        "MKRTlvwgadENQSYPIHCFMKL*\n",
        "MKRTLVWGADENQSYPIHCFMKL.\n",
        "MKRTLVWGAD ENQSYPIHCF MK\nL*",
        "\n MKRTLVWGADENQSYPIHCFMKL\n\x1a",
        "MKRTLVWGADENQSYPIHCFMKL\r\n\0",
    ],
)
def test_blanks_between_blocks_and_lower_case_are_no_words(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, f">a\n{text}") == {"a": "MKRTLVWGADENQSYPIHCFMKL"}


@settings(deadline=None)
@given(
    st.text(CANONICAL, min_size=25, max_size=300),
    st.integers(1, 80),
    st.integers(0, 30),
    st.booleans(),
)
def test_a_sequence_may_be_divided_and_masked_in_any_regular_way(
    tmp_path_factory: pytest.TempPathFactory, text: str, width: int, masked: int, blocks: bool
) -> None:
    shown = text[:masked].lower() + text[masked:]
    lines = [shown[i : i + width] for i in range(0, len(shown), width)]
    if blocks:
        lines = [" ".join(line[i : i + 10] for i in range(0, len(line), 10)) for line in lines]
    folder = tmp_path_factory.mktemp("fasta")
    assert read(folder, ">a\n" + "\n".join(lines) + f"\n>b\n{B}\n") == {"a": text, "b": B}


@pytest.mark.parametrize("word", ["n/a", "Sequence unavailable"])
def test_a_word_for_a_missing_sequence_is_none(tmp_path: Path, word: str) -> None:
    file = tmp_path / "in.fasta"
    file.write_text(f">a\n{A}\n>b\n{word}\n")
    with pytest.raises(DataError, match="line 3: record 'b'"):
        ingest(file, tmp_path / "store")
    manifest = ingest(file, tmp_path / "store", reading=DROP)
    assert manifest["provenance"]["dropped"]["no sequence"] == 1


@pytest.mark.parametrize(
    "text",
    [
        *(A[:20] + gap + A[20:] for gap in ("...", ".", "-")),
        *(A + end for end in ("...", "-")),
    ],
)
@pytest.mark.parametrize("others", ["", f">b\n{B}{B}\n", f">b\n{B}{B}.\n"])
def test_gaps_and_ellipses_are_refused_outside_alignments(
    tmp_path: Path, text: str, others: str
) -> None:
    message = refusal(tmp_path, f">a\n{text}\n{others}")
    assert message.startswith(", line 2: record 'a'")
    assert ("left out" in message) == ("..." in text)


@pytest.mark.parametrize(
    "rows",
    [
        ["MKT--LV", "M-TAALV", "--T----"],  # aligned FASTA
        ["MKTLV", "M-taaTL-", "--TLV"],  # A3M
        ["MKT..LV", "M-TaaLV", "-KT..--"],  # A2M
        ["MK\nT--\nLV", "M-\nTAA\nLV"],
    ],
)
def test_alignments_may_hold_gaps(tmp_path: Path, rows: list[str]) -> None:
    text = "".join(f">r{n}\n{row}\n" for n, row in enumerate(rows))
    bare = [row.translate(str.maketrans("", "", "-.\n")).upper() for row in rows]
    assert list(read(tmp_path, text).values()) == bare
    assert " within the sequence" in refusal(tmp_path, text + ">one more\nMKT-AAAAA\n")


STOCKHOLM = """# STOCKHOLM 1.0
#=GF ID toy
#=GS a/1-5 AC P1
a/1-5  MKT..LV
b      M-Taa-V
#=GC SS_cons  HHHHHHH

a/1-5  AA
b      -A
//
"""
CLUSTAL = """CLUSTAL O(1.2.4) multiple sequence alignment


a/1-5      MKT--LV 5
b          M-TAA-V 5
           * *   *

a/1-5      AA 7
b          -A 6
            *
"""


@pytest.mark.parametrize("text", [STOCKHOLM, CLUSTAL, CLUSTAL.replace("CLUSTAL O", "MUSCLE ")])
def test_stockholm_and_clustal_are_read_without_their_gaps(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == {"a/1-5": "MKTLVAA", "b": "MTAAVA"}
    number = text.splitlines().index(next(x for x in text.splitlines() if x.startswith("b"))) + 1
    with pytest.raises(DataError, match=f"line {number}: record 'b' holds 'J'"):
        read(tmp_path, text.replace("M-T", "M-J"))
    cut = text[: text.rindex("b ")] + ("//\n" if "STOCK" in text else "")
    for torn in (cut, text.removesuffix("//\n") if "STOCK" in text else cut):
        with pytest.raises(DataError, match=r"not whole|no end"):
            read(tmp_path, torn)


@pytest.mark.parametrize("code", ["P1", "F1"])
def test_titles_of_pir_are_no_sequence(tmp_path: Path, code: str) -> None:
    text = f">{code};ABC\nalcohol dehydrogenase - fragment\n{A}*\n"
    assert read(tmp_path, text + text.replace("ABC", "DE")) == {"ABC": A, "DE": A}
    with pytest.raises(DataError, match="line 3: record 'ABC' holds '1'"):
        read(tmp_path, text.replace("MKR", "M1R"))


@pytest.mark.parametrize(
    "name",
    [
        *("ss_pred", "aa_dssp", "ss_conf PSIPRED", "Consensus", "101M:A:secstr"),
    ],
)
def test_annotation_by_its_whole_name_is_left_out_and_told_of(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    text = f">q\n{A}\n>{name}\n{'H' * len(A)}\n>r\n{B}\n"
    assert read(tmp_path, text) == {"q": A, "r": B}
    assert [f"no sequence: {name.split()[0]}" in line for line in caplog.messages] == [True]
    real = read(tmp_path, f">Pangolin_GD-consensus_EPI1\n{A}\n>ss_predictor\n{B}\n")
    assert list(real) == ["Pangolin_GD-consensus_EPI1", "ss_predictor"]


@pytest.mark.parametrize("dna", ["gattaca" * 9, "GATTACAGANR" * 6, "ACGU" * 20])
def test_nucleotides_among_proteins_are_refused(tmp_path: Path, dna: str) -> None:
    assert "line 1: record 'd' looks like nucleotides" in refusal(tmp_path, f">d\n{dna}\n")
    message = refusal(tmp_path, f">a\n{A}\n>d\n{dna}\n>b\n{B}\n")
    assert "line 3: record 'd' looks like nucleotides, as do 1 of 3 records here" in message
    file = tmp_path / "in.fasta"
    file.write_text(f">d\n{dna}\n")
    assert ingest(file, tmp_path / "dna", vocabulary=DNA)["sequences"] == 1


@pytest.mark.parametrize("line", ["MKV>b", "MKV >b here"])
def test_a_lost_line_break_before_a_header_is_named(tmp_path: Path, line: str) -> None:
    message = refusal(tmp_path, f">a\n{line}\n{B}\n")
    assert message.startswith(", line 2: record 'a': holds '>'")


@pytest.mark.parametrize(
    "text",
    [
        f"#A3M#\n>a\n{A}\n>b\n{B}\n",
        f"#44\t1\n; by hand\n\n>a\n{A}\n! a remark\n>b\n# another; MKV\n{B}\n",
        f"\ufeff>a\n{A}\n>b\n;here\n{B}",
        f">a\r{A}\r>b\r{B}\r",
        f">a\r\n{A}\r\n>b\r\n{B}\r\n",
    ],
)
@pytest.mark.parametrize("size", [1, 50, 1 << 18])
def test_comments_and_line_ends_of_any_kind(
    tmp_path: Path, text: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d2plm.data.fasta._BLOCK_BYTES", size)
    assert read(tmp_path, text) == {"a": A, "b": B}


def test_old_line_ends_are_those_of_records_when_these_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d2plm.data.fasta._MAX_RECORD_BYTES", 200)
    monkeypatch.setattr("d2plm.data.fasta._BLOCK_BYTES", 64)
    file = tmp_path / "old.fasta"
    file.write_bytes(b"".join(b">r%d\r%b\r" % (n, A[: n + 5].encode()) for n in range(30)))
    manifest = ingest(file, tmp_path / "store", window=20)
    assert manifest["provenance"]["records"] == 30


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("MetLysThrAlaTyrIleAla", "three-letter codes"),
        ("MET LYS THR\nALA TYR ILE ALA LYS GLN", "three-letter codes"),
        ("METLYSTHRALATYR", "three-letter codes"),
        (f"{A}\nlysozyme\n{B}", "'lysozyme' is no sequence"),
        (f"{A}\nsp|P2|B_HUMAN\n{B}", "'sp|P2|B_HUMAN' is no sequence"),
        (f"{A}\n\0>c\n{B}", "NULs of MMseqs2"),
        ("K.MKTAYIAK.Q\n>p2\nR.MKTAYIAR.S", "peptide"),
        (f"{A}\n>ss of a\n{'H' * 20}{'C' * 24}", "as long as the sequence before it"),
        (f"{A}:{B}", "holds ':'"),
        (f"{A}–{B}", "holds '–'"),
        (f"{A}7{B}", "holds '7'"),
        (f"{A}\n{'S' * 20}{'O' * 24}", "line 3: record 'a'"),
        (f"{A}\n{'C' * 5}{'H' * 20}{'C' * 9}{'E' * 10}", "line 3: record 'a'"),
    ],
)
def test_what_looks_like_a_sequence_and_is_none_is_refused(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        read(tmp_path, f">a\n{text}\n")
    assert read(tmp_path, f">a\n{A}\n{A}\n") == {"a": A + A}


def test_alignments_of_complexes_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, f"#44,45\t1,1\n>101\t102\n{A}{B}\n>101\n{A}{'-' * 45}\n")
    assert message.startswith(", line 1: ")


def test_soft_masked_sequences_may_begin_a_line_with_a_capital(tmp_path: Path) -> None:
    text = ">a\nMKRTLVWGADENQSYPIHCF\nTgtgg\n>b\nMSTNPKPQRKTKRNTNRRPQ\nqqqq\n>c\nGppgppgpp\n"
    expected = {"a": "MKRTLVWGADENQSYPIHCFTGTGG", "b": "MSTNPKPQRKTKRNTNRRPQQQQQ"}
    assert read(tmp_path, text) == {**expected, "c": "GPPGPPGPP"}
    assert "'Tgtgg' is no sequence" in refusal(tmp_path, text[: text.index(">b")])


def test_pir_without_a_title_is_refused(tmp_path: Path) -> None:
    assert "line 2: record 'P1;CRAB'" in refusal(tmp_path, f">P1;CRAB\n{A}\n{B}*\n")


def test_two_rows_of_one_name_are_not_joined(tmp_path: Path) -> None:
    text = "# STOCKHOLM 1.0\n\ns1 MKTA\ns1 MKTE\n//\n"
    with pytest.raises(DataError, match="line 4: two rows of a block have the name 's1'"):
        read(tmp_path, text)
    assert read(tmp_path, "\ufeff" + text.replace("s1 MKTE", "s2 MKTE")) == {
        "s1": "MKTA",
        "s2": "MKTE",
    }
