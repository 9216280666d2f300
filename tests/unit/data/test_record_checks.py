"""What stands where sequences should: kinds of files that people have, read right or refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import CANONICAL, DNA, decode
from d2plm.data.fasta import read_fasta
from d2plm.data.ingest import ingest
from d2plm.settings.data import Reading
from tests.conftest import MonkeyPatch

A = "MKRTLVWGADENQSYPIHCFMKLLVVEADGTWRKQHPSGLIVDE"
B = "MSTNPKPQRKTKRNTNRRPQDVKFPGGGQIVGGVYLLPRRGPRLG"
SHORT = "MKRTLVWGADENQSYPIHCFMKL"
DNAS = ("gattaca" * 9, "GATTACAGANR" * 6, "ACGU" * 20)
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
MUSCLE = CLUSTAL.replace("CLUSTAL O", "MUSCLE ")
PIR = f">P1;ABC\nalcohol dehydrogenase - fragment\n{A}*\n"
BOTH, ROWS = {"a": A, "b": B}, {"a/1-5": "MKTLVAA", "b": "MTAAVA"}


def read(folder: Path, content: str | bytes) -> dict[str, str]:
    file = folder / "in.fasta"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return {record.name: decode(record.tokens) for record in read_fasta(file)}


@pytest.mark.parametrize(
    "text",
    [
        "MKRTLVWGAD\tENQSYPIHCF\tMKL  ",
        "MKRTlvwgadENQSYPIHCFMKL*\n",
        "MKRTLVWGADENQSYPIHCFMKL.\n",
        "MKRTLVWGAD ENQSYPIHCF MK\nL*",
        "\n MKRTLVWGADENQSYPIHCFMKL\n\x1a",
        "MKRTLVWGADENQSYPIHCFMKL\r\n\0",
    ],
)
def test_blanks_between_blocks_and_lower_case_are_no_words(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, f">a\n{text}") == {"a": SHORT}


@given(st.text(CANONICAL, min_size=25), st.integers(1, 80), st.integers(0, 30), st.booleans())
def test_a_sequence_may_be_divided_and_masked_in_any_regular_way(
    tmp_path_factory: pytest.TempPathFactory, text: str, width: int, masked: int, blocks: bool
) -> None:
    shown = text[:masked].lower() + text[masked:]
    lines = [shown[i : i + width] for i in range(0, len(shown), width)]
    if blocks:
        lines = [" ".join(line[i : i + 10] for i in range(0, len(line), 10)) for line in lines]
    folder = tmp_path_factory.mktemp("fasta")
    assert read(folder, ">a\n" + "\n".join(lines) + f"\n>b\n{B}\n") == {"a": text, "b": B}


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
    tmp_path: Path, text: str, size: int, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("d2plm.data.fasta._BLOCK_BYTES", size)
    assert read(tmp_path, text) == {"a": A, "b": B}


@pytest.mark.parametrize(
    ("text", "records"),
    [
        (f">a\n{A}\n{A}\n", {"a": A + A}),
        *((f">a\n{A}\n>{one}\n{'H' * 44}\n>b\n{B}\n", BOTH) for one in ("ss_pred", "Consensus")),
        *((f">a\n{A}\n>{one}\n{B}\n", {"a": A, one: B}) for one in ("x-consensus_1", "ss_preds")),
        (">a\nMKT--LV\n>b\nM-TAALV\n>c\n--T----", {"a": "MKTLV", "b": "MTAALV", "c": "T"}),
        (">a\nMKTLV\n>b\nM-taaTL-\n>c\n--TLV", {"a": "MKTLV", "b": "MTAATL", "c": "TLV"}),  # A3M
        (">a\nMKT..LV\n>b\nM-TaaLV\n>c\n-KT..--", {"a": "MKTLV", "b": "MTAALV", "c": "KT"}),  # A2M
        *((STOCKHOLM, ROWS), (f"\ufeff{STOCKHOLM}", ROWS), (CLUSTAL, ROWS), (MUSCLE, ROWS)),
        (PIR + PIR.replace("P1;ABC", "F1;DE"), {"ABC": A, "DE": A}),
        (
            f">a\n{A[:20]}\nTgtgg\n>b\n{B[:20]}\nqqqq\n>c\nGppgpp\n",
            {"a": f"{A[:20]}TGTGG", "b": f"{B[:20]}QQQQ", "c": "GPPGPP"},
        ),
    ],
)
def test_files_of_programs_are_read(tmp_path: Path, text: str, records: dict[str, str]) -> None:
    assert read(tmp_path, text) == records


NO_SEQUENCES = (
    *("curl: (18) transfer closed", "Killed", "[Homo sapiens]", "BROKEN PIPE, NO DATA", "Ala Gly"),
    *("connection reset", "MYOGLOBIN MUTANT", "CHAIN A", "tRNA ligase OS=Homo sapiens"),
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((f">a\n{A}\n>b\n{B}\n{one}", f"line 5: record 'b': '{one}'") for one in NO_SEQUENCES),
        *((f">b c\n{one}\n{B}\n", f"line 2: record 'b': '{one}'") for one in NO_SEQUENCES),
        *((f">a\n{A[:20]}{gap}{A[20:]}\n", "line 2: record 'a'") for gap in ("...", ".", "-")),
        *((f">a\n{A[:20]}-{A[20:]}\n>b\n{B}{B}{end}\n", "line 2: record 'a'") for end in ("", ".")),
        *((f">a\n{A}{end}\n>b\n{B}{B}\n", "line 2: record 'a'") for end in ("...", "-")),
        (">a\nMKT--LV\n>b\nM-TAALV\n>one more\nMKT-AAAAA\n", "within the sequence"),
        *((f">d\n{dna}\n", "line 1: record 'd' looks like nucleotides") for dna in DNAS),
        *((f">a\n{A}\n>d\n{dna}\n>b\n{B}\n", "line 3: record 'd'") for dna in DNAS),
        *((f">a\n{one}\n{B}\n", "line 2: record 'a': holds '>'") for one in ("MKV>b", "MKV >b it")),
        (f">a\n{A}\n{'S' * 20}{'O' * 24}\n", "line 3: record 'a'"),
        (f">a\n{A}\n{'C' * 5}{'H' * 20}{'C' * 9}{'E' * 10}\n", "line 3: record 'a'"),
        (f">a\n{A}\n>ss of a\n{'H' * 20}{'C' * 24}\n", "as long as the sequence before it"),
        (">a\nMetLysThrAlaTyrIleAla\n", "three-letter codes"),
        (">a\nMET LYS THR\nALA TYR ILE ALA LYS GLN\n", "three-letter codes"),
        (">a\nMETLYSTHRALATYR\n", "three-letter codes"),
        (f">a\n{A}\nlysozyme\n{B}\n", "'lysozyme'"),
        (f">a\n{A}\nsp|P2|B_HUMAN\n{B}\n", "'sp|P2|B_HUMAN'"),
        (f">a\n{A}\n\0>c\n{B}\n", "NULs of MMseqs2"),
        (">a\nK.MKTAYIAK.Q\n>p2\nR.MKTAYIAR.S\n", "peptide"),
        (f"#44,45\t1,1\n>101\t102\n{A}{B}\n>101\n{A}{'-' * 45}\n", "line 1: "),
        (f">P1;CRAB\n{A}\n{B}*\n", "line 2: record 'P1;CRAB'"),
        (f">a\n{A[:20]}\nTgtgg\n", "'Tgtgg'"),
    ],
)
def test_what_only_looks_like_sequences_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=re.escape(said)):  # also where bad records may be dropped
        ingest(tmp_path / "in.fasta", tmp_path / "store", reading=Reading(on_illegal="drop"))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((f">a\n{A}{letter}{B}\n", f"holds {letter!r}") for letter in ":/7~J–М"),
        (PIR.replace("MKR", "M1R"), "line 3: record 'ABC' holds '1'"),
        (STOCKHOLM.replace("M-T", "M-J"), "line 5: record 'b' holds 'J'"),
        (CLUSTAL.replace("M-T", "M-J"), "line 5: record 'b' holds 'J'"),
        (f"{STOCKHOLM[: STOCKHOLM.rindex('b ')]}//", "not whole"),
        (CLUSTAL[: CLUSTAL.rindex("b ")], "not whole"),
        (STOCKHOLM.removesuffix("//\n"), "has no end"),
        ("# STOCKHOLM 1.0\n\ns1 MKTA\ns1 MKTE\n//\n", "line 4: "),  # two rows of one name
    ],
)
def test_damage_is_named_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        read(tmp_path, text)


def test_nucleotides_are_read_as_such(tmp_path: Path) -> None:
    (tmp_path / "in.fasta").write_text("".join(f">{i}\n{dna}\n" for i, dna in enumerate(DNAS)))
    assert ingest(tmp_path / "in.fasta", tmp_path / "dna", vocabulary=DNA)["sequences"] == 3
