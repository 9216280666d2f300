"""Ingest: nothing is lost silently, whatever the input, the time of a kill, or the disk space."""

import gzip
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from d2plm.cli import main
from d2plm.core.errors import DataError
from d2plm.core.vocabulary import decode, vocabulary
from d2plm.data.ingest import ingest
from d2plm.data.store import SequenceStore
from d2plm.settings.data import Reading
from tests.conftest import FASTA, Captured, MonkeyPatch

ROOT = Path(__file__).parents[3]
DROP = Reading(on_illegal="drop")


def _fasta(path: Path, *records: tuple[str, str]) -> Path:
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in records))
    return path


def _names(path: Path) -> dict[str, list[str]]:
    """Sequence → its names, for all of a store."""
    store = SequenceStore(path)
    return {decode(tokens): store.names(index) for index, tokens in enumerate(store)}


def test_every_record_is_a_sequence_a_duplicate_or_dropped_for_a_reason(tmp_path: Path) -> None:
    fasta = _fasta(
        tmp_path / "in.fasta",
        *(("one", "MKVLA"), ("same", "mkv\nla*"), ("short", "MK"), ("long", "M" * 9)),
        *(("wrong", "MKJ"), ("empty", ""), ("none", "n/a"), ("stop", "M*K"), ("same", "MKVLA")),
        ("two", "ACDEF"),
    )
    settings: dict[str, Any] = {"min_residues": 3, "max_residues": 8}
    with pytest.raises(DataError, match=f"{fasta}, line 11: record 'wrong' holds 'J'"):
        ingest(fasta, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in.fasta"]
    manifest = ingest(fasta, tmp_path / "out", reading=DROP, provenance={"a": "test"}, **settings)
    dropped = {"illegal letter": 2, "no sequence": 2, "shorter than 3": 1, "longer than 8": 1}
    account = {"a": "test", "input": ["in.fasta"], **settings, "records": 10, "duplicates": 2}
    assert manifest["provenance"] == {**account, "dropped": dropped}
    assert (manifest["sequences"], manifest["residues"], manifest["kind"]) == (2, 10, "raw")
    assert _names(tmp_path / "out") == {"MKVLA": ["one", "same"], "ACDEF": ["two"]}
    SequenceStore(tmp_path / "out").verify()


def test_neither_order_nor_files_change_the_store(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    with gzip.open(FASTA, "rt") as stream:
        texts = list(islice(stream.read()[1:].split("\n>"), 1500))
    records = [text.partition("\n")[::2] for text in texts]
    records += [(f"again_{name}", sequence) for name, sequence in records[::3]]
    one = ingest(_fasta(tmp_path / "a.fasta", *records), tmp_path / "a")
    random.Random(0).shuffle(records)
    monkeypatch.setattr("d2plm.data.deduplication._BUFFER_BYTES", 100_000)
    _fasta(tmp_path / "b1.fasta", *records[:700])
    _fasta(tmp_path / "b2.fasta", *records[700:])
    two = ingest(str(tmp_path / "b*.fasta"), tmp_path / "b")
    assert one["digests"] == two["digests"]
    assert one["provenance"]["duplicates"] == two["provenance"]["duplicates"] >= 500


def test_a_sequence_longer_than_a_store_takes_is_cut_left_out_or_refused(tmp_path: Path) -> None:
    fasta = _fasta(tmp_path / "in.fasta", ("most", "M" * 1_000_000), ("long", "M" * 1_000_001))
    with pytest.raises(DataError, match="line 3: record 'long' has 1,000,001"):
        ingest(fasta, tmp_path / "out")
    manifest = ingest(fasta, tmp_path / "out", max_residues=1_000_000)
    assert manifest["residues"] == 1_000_000
    assert manifest["provenance"]["dropped"] == {"longer than 1000000": 1}
    assert ingest(fasta, tmp_path / "out", window=1_000_000)["residues"] == 1_000_001


@pytest.mark.parametrize(("alphabet", "window"), [("protein", 3), ("dna", 4), ("bytes", 7)])
def test_long_records_are_cut_into_pieces(tmp_path: Path, alphabet: str, window: int) -> None:
    records = {"a": "ACGTAC", "b": "ACG", "c": "G", "d": "TTGCAGCAACGTT", "e": "ACGT"}
    rows = [*records.items(), ("again", "ACG")]
    table = tmp_path / "in.csv"
    table.write_text("".join(f"{name},{text}\n" for name, text in [("name", "text"), *rows]))
    manifest = ingest(table, tmp_path / "out", vocabulary=vocabulary(alphabet), window=window)
    store = SequenceStore(tmp_path / "out")
    names, of_cut = defaultdict[str, set[str]](set), set[tuple[str, int]]()
    for number, (name, record) in enumerate(rows):
        for place, start in enumerate(range(0, len(record), window), start=1):
            piece, is_cut = record[start : start + window], len(record) > window
            names[piece].add(f"{name}/{place}" if is_cut else name)
            of_cut |= {(piece, number)} if is_cut else set()
    texts = [store.vocabulary.decode(tokens) for tokens in store]
    assert dict(zip(texts, map(set, map(store.names, range(len(texts)))), strict=True)) == names
    assert {(texts[index], number) for index, number in store.pieces.tolist()} == of_cut
    store.verify()
    account = manifest["provenance"]
    assert (account["records"], account["window"], account["dropped"]) == (6, window, {})
    assert account["pieces"] == sum(map(len, names.values()))
    assert account["pieces"] == manifest["sequences"] + account["duplicates"]


def test_the_command_takes_patterns_and_fields(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("clone,heavy\nx,MKV\ny,M1\n")
    (tmp_path / "b.tsv").write_text("clone\theavy\nz\tWYW\n")
    monkeypatch.chdir(tmp_path)
    words = ["input=[?.csv,b.tsv]", "output=out", "sequence_field=heavy", "name_field=clone"]
    assert main(["ingest", *words, "on_illegal=drop"]) == 0
    assert _names(tmp_path / "out") == {"MKV": ["x"], "WYW": ["z"]}
    process = _start(["ingest", "input=-", f"output={tmp_path / 'in'}"], stdin=subprocess.PIPE)
    process.communicate(gzip.compress(b">a\nMKV\n>b\nACD\n>c\nMKV\n"))
    assert process.returncode == 0
    assert _names(tmp_path / "in") == {"MKV": ["a", "c"], "ACD": ["b"]}


# Of a header, the names in it.
HEADERS = {"a": {"a"}, "b|1 of two": {"b|1"}, "": {""}, "tr|Q1|X\tsaid": {"tr|Q1|X"}}
HEADERS["x of\x01y of"] = {"x", "y"}
RECORD = st.tuples(
    st.sampled_from([*HEADERS]),
    st.lists(st.text("MKVLW", min_size=1, max_size=9), min_size=1, max_size=3),
    st.sampled_from(["\n", "*\n", "\r\n", "\n\n; a comment\n"]),
)
# A record, and why it is dropped.
DROPPED = dict.fromkeys([">lost\nM1K\n", ">lost\nM*K\n", ">lost\nMK\0\n"], "illegal letter")
DROPPED |= dict.fromkeys([">lost\n", ">lost\n*\n", ">lost\nn/a\n"], "no sequence")


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=st.lists(RECORD | st.sampled_from([*DROPPED]), max_size=12),
    block=st.sampled_from([1, 7, 64, 1 << 18]),
)
def test_no_valid_record_is_lost_among_corrupt_ones(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[Any], block: int
) -> None:
    folder, content = tmp_path_factory.mktemp("mixed"), ""
    names, dropped, valid = defaultdict[str, set[str]](set), Counter[str](), 0
    for piece in pieces:
        if isinstance(piece, str):
            content += piece
            dropped[DROPPED[piece]] += 1
            continue
        header, lines, end = piece
        content += "\n".join([f">{header}", *lines]) + end
        names["".join(lines)] |= HEADERS[header]
        valid += 1
    (folder / "in.fasta").write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("d2plm.data.fasta._BLOCK_BYTES", block)
        patch.setattr("d2plm.data.deduplication._BUFFER_BYTES", 600)
        if not valid:
            with pytest.raises(DataError):
                ingest(folder / "in.fasta", folder / "out", reading=DROP)
            return
        account = ingest(folder / "in.fasta", folder / "out", reading=DROP)["provenance"]
    assert {text: set(own) for text, own in _names(folder / "out").items()} == names
    assert account["dropped"] == dropped
    assert account["duplicates"] == valid - len(names)
    assert account["records"] == len(pieces)


SMALL_BUFFER = "from d2plm.data import deduplication; deduplication._BUFFER_BYTES = 300_000"


def _start(words: Sequence[str], **pipes: int) -> "subprocess.Popen[bytes]":
    """`d2plm <words>` in a process of its own."""
    # A shell's background job ignores SIGINT, and its children with it.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    run = "import sys\nfrom d2plm.cli import main\nsys.exit(main(sys.argv[1:]))"
    program = "\n".join([SMALL_BUFFER, heard, run])
    command = [sys.executable, "-c", program, *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, **pipes)  # type: ignore[call-overload, no-any-return]


def _until_written(process: "subprocess.Popen[bytes]", partial: Path) -> None:
    while process.poll() is None and not partial.exists():
        time.sleep(0.005)


def test_a_killed_ingest_leaves_what_was_there_and_is_done_again(tmp_path: Path) -> None:
    proteins, out = tmp_path / "proteins.fasta", tmp_path / "out"
    with gzip.open(FASTA) as file:
        proteins.write_bytes(file.read(4_000_000).rpartition(b"\n>")[0] + b"\n")
    older = ingest(_fasta(tmp_path / "older.fasta", ("a", "MK")), out)
    process = _start(["ingest", f"input={proteins}", f"output={out}"])
    _until_written(process, tmp_path / "partial.out")
    time.sleep(0.1)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert SequenceStore(out).manifest == older
    expected = ingest(proteins, tmp_path / "unbroken")["digests"]
    assert ingest(proteins, out)["digests"] == expected
    SequenceStore(out).verify()
    assert [path.name for path in tmp_path.glob("*out")] == ["out"]


def test_no_room_on_the_disk_is_one_line_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("d2plm.data.deduplication._BUFFER_BYTES", 300_000)
    older = ingest(_fasta(tmp_path / "in.fasta", ("a", "MK")), tmp_path / "out")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for out, left in ((tmp_path / "new", set()), (tmp_path / "out", {"out"})):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            assert main(["ingest", f"input={FASTA}", f"output={out}"]) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"d2plm: error: {out}: ")
        assert {file.name for file in tmp_path.glob(f"*{out.name}")} == left
    assert SequenceStore(tmp_path / "out").manifest == older


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_a_stopped_ingest_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    # Standard input that stays open: the ingest cannot be done before the signal comes.
    process = _start(["ingest", "input=-", f"output={tmp_path / 'out'}"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin, gzip.open(FASTA) as proteins:
        process.stdin.write(proteins.read(4_000_000))
        process.stdin.flush()
        _until_written(process, tmp_path / "partial.out")
        time.sleep(0.05)
        process.send_signal(number)
        assert process.wait() == code
    assert not any(tmp_path.iterdir())
