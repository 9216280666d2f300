"""Stores, batches, exports and statistics in the tokens of every vocabulary; files of FASTA."""

import json
import pickle
import random
from collections import Counter
from itertools import chain
from pathlib import Path

import lmdb
import numpy as np
import pytest

from d2plm.core.errors import ConfigError, DataError
from d2plm.core.vocabulary import (
    CANONICAL,
    CLS,
    EOS,
    PAD,
    PROTEIN,
    RESIDUES,
    Vocabulary,
    vocabulary,
)
from d2plm.data.fasta import read_fasta_blocks
from d2plm.data.fasta_export import export_sequences, first_records
from d2plm.data.ingest import describe, ingest
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.records import readable
from d2plm.data.statistics import plot, store_statistics, table
from d2plm.data.store import SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter
from tests.conftest import Tokens, write_store

LETTERS = {"protein": "ACDEFGHIKLMNPQRSTVWYX", "dna": "ACGTN", "codon": "ACGT"}
WORDS = ["In the beginning", " was a Wörd,", "\n\nand the “word” was", " with\tGod \U0001f600 $1"]
COUNT = 1100
NAMES = [*LETTERS, "bytes", "tokenizer"]
# A byte-level BPE whose tokens need two bytes each.
TOKENIZER = Path(__file__).parents[3] / "examples" / "data" / "king_james_bible_bpe.json"


@pytest.fixture(params=NAMES, scope="module")
def any_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SequenceStore:
    found = vocabulary(request.param, tokenizer=TOKENIZER if request.param == "tokenizer" else None)
    # Bytes may be cut within a character; a tokenizer may merge a cut word otherwise.
    window = None if request.param == "tokenizer" else 9
    return _store(tmp_path_factory.mktemp("any"), found, window)


def _texts(found: Vocabulary) -> dict[str, str]:
    draw, letters = random.Random(0), LETTERS.get(found.name, "")
    if found.is_text:
        return {
            f"text {n}": "".join(draw.choices(WORDS, k=1 + n % 3)) + str(n) for n in range(COUNT)
        }
    rest = 0 if found.name == "codon" else 1
    lengths = [3 * draw.randint(4, 9) + rest for _ in range(COUNT)]
    return {f"s{n}": "".join(draw.choices(letters, k=length)) for n, length in enumerate(lengths)}


def _store(folder: Path, found: Vocabulary, window: int | None = None) -> SequenceStore:
    """Of `_texts` and, under another name, its first once more."""
    texts = _texts(found)
    rows = [*texts.items(), ("again", next(iter(texts.values())))]
    file = folder / "in.jsonl"
    file.write_text("".join(json.dumps({"name": n, "text": t}) + "\n" for n, t in rows))
    ingest(file, folder / "store", vocabulary=found, window=window)
    return SequenceStore(folder / "store")


def test_a_store_holds_little_endian_integers(any_store: SequenceStore) -> None:
    found = any_store.vocabulary
    kind = "<u1" if found.size <= 256 else "<u2"
    with lmdb.open(str(any_store.path), readonly=True, lock=False, max_dbs=1) as environment:
        database = environment.open_db(b"sequences", create=False)
        with environment.begin(db=database) as transaction:
            blocks = [np.frombuffer(value, kind).tolist() for _, value in transaction.cursor()]
    tokens = [tokens.tolist() for tokens in any_store]
    firsts = range(0, len(tokens), 1024)
    assert [[*chain(*tokens[first : first + 1024])] for first in firsts] == blocks
    assert all(any_store[index].tolist() == tokens[index] for index in (0, 1023, 1024, -1))
    window = max(map(len, tokens)) if found.name == "tokenizer" else 9
    whole = [found.encode(text, "x").tolist() for text in _texts(found).values()]
    pieces = {tuple(o[i : i + window]) for o in whole for i in range(0, len(o), window)}
    assert set(map(tuple, tokens)) == pieces
    any_store.verify()
    assert len(pickle.loads(pickle.dumps(any_store))[0]) == any_store.lengths[0]
    assert any_store.residues == sum(map(len, tokens))
    assert f" {found.nouns.token}s, of 1,101 records" in describe(any_store)


def test_an_export_ingests_to_the_same_store(any_store: SequenceStore, tmp_path: Path) -> None:
    is_text = any_store.vocabulary.is_text
    output = tmp_path / ("out.jsonl.gz" if is_text else "out.fasta.gz")
    assert export_sequences(any_store, output) == 0
    ingest(output, tmp_path / "again", vocabulary=any_store.vocabulary)
    again = SequenceStore(tmp_path / "again")
    assert again.digest == any_store.digest
    shown = [[readable(name) for name in names] for names in any_store.name_blocks()]
    assert [*again.name_blocks()] == shown
    with pytest.raises(ConfigError, match=r"must be a (\.jsonl or \.jsonl\.gz|FASTA) file"):
        export_sequences(any_store, tmp_path / ("o.fasta" if is_text else "o.jsonl.gz"))
    head = b"".join(first_records(any_store, 2)).decode()
    assert head.count("\n{" if is_text else "\n>") == 1


def test_statistics_count_tokens(any_store: SequenceStore, tmp_path: Path) -> None:
    found = store_statistics(any_store)
    many = any_store.vocabulary.predicted > 64
    counts = Counter(token for tokens in any_store for token in tokens.tolist())
    assert {4 + i: n for i, n in enumerate(found.counts.tolist()) if n} == counts
    shown = found.summary()["residue_counts"]
    most = counts.most_common()[:20] if many else counts.items()
    assert sorted(n for n in shown.values() if n) == sorted(n for _, n in most)
    text = table({"raw": found})
    assert ("20 most frequent" in text) == many
    if any_store.vocabulary.name == "bytes":
        plot({"raw": found}, tmp_path / "a.svg", "title")
        assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")


def test_batches_hold_the_stores_tokens(any_store: SequenceStore) -> None:
    loader = PackedLoader([Collection(any_store)], token_budget=512, max_length=512)
    seen = {}
    for batch, _ in zip(loader.stream(Position()), range(loader.batches_in_epoch(0)), strict=False):
        (packed,) = batch.micro_batches
        row, ends = packed.tokens.numpy(), packed.cu_seqlens.tolist()
        assert row.dtype == any_store.vocabulary.dtype
        ids = [i for i in packed.sequence_ids.tolist() if i >= 0]
        for index, start, end in zip(ids, ends, ends[1:], strict=False):
            seen[index] = row[start:end].tolist()
        assert (row[ends[len(ids)] :] == PAD).all()
    assert seen == {i: [CLS, *tokens.tolist(), EOS] for i, tokens in enumerate(any_store)}


def test_a_store_without_its_tokenizer_is_damaged(tmp_path: Path) -> None:
    path = _store(tmp_path, vocabulary("tokenizer", tokenizer=TOKENIZER)).path
    (saved,) = path.glob("*tokenizer.json")
    saved.rename(tmp_path / "moved.json")
    with pytest.raises(DataError, match="another alphabet"):
        SequenceStore(path)


def test_statistics_are_those_of_plain_counting(tmp_path: Path, proteins: list[Tokens]) -> None:
    sequences = [*proteins[:2100], PROTEIN.encode("XBUZOX", "it")]
    clusters = [index // 3 if index < 902 else index for index in range(len(sequences))]
    store = write_store(tmp_path / "s", sequences, clusters)
    seen: list[int] = []
    found = store_statistics(store, seen.append)
    lengths = [len(tokens) for tokens in sequences]
    letters = Counter("".join(PROTEIN.decode(tokens) for tokens in sequences))
    assert seen == [1024, 2048, 2101]
    assert (len(found.lengths), found.store.residues) == (2101, sum(lengths))
    quarter, median, three_quarters = np.percentile(lengths, [25, 50, 75])
    assert list(found.length_summary().values()) == pytest.approx(
        [min(lengths), quarter, median, np.mean(lengths), three_quarters, max(lengths)]
    )
    expected = [100 * letters[letter] / sum(lengths) for letter in RESIDUES]
    np.testing.assert_allclose(found.composition, expected)
    canonical = sum(letters[letter] for letter in CANONICAL)
    assert found.non_canonical == pytest.approx(100 * (1 - canonical / sum(lengths)))
    assert found.clusters == {"number": 301 + 1199, "largest": 3, "singletons": 1199}
    assert found.bytes_on_disk == sum(f.stat().st_size for f in (tmp_path / "s").iterdir())
    assert found.summary()["digests"] == store.manifest["digests"]


AWKWARD = (
    b">plain\nMKV\n>also plain, with more words\nmkv*\n>\xff\xfe\nAC\n>\nGGG\n"
    b">nr1\x01nr2 an nr header\nLLLL\n>>greater\n" + b"W" * 60 + b"\n>over\n" + b"W" * 61 + b"\n"
)


def test_a_fasta_file_ingests_to_its_store(tmp_path: Path) -> None:
    source = tmp_path / "in.fasta"
    source.write_bytes(AWKWARD)
    ingest(source, tmp_path / "first")
    store = SequenceStore(tmp_path / "first")
    assert store.manifest["provenance"]["duplicates"] > 0
    output = tmp_path / "new" / "out.fasta"
    seen: list[int] = []
    assert export_sequences(store, output, seen.append) == 0
    assert seen == [len(store)]
    ingest(output, tmp_path / "second")
    assert SequenceStore(tmp_path / "second").manifest["digests"] == store.manifest["digests"]


def test_blanks_in_names_are_written_so_that_no_name_is_lost(tmp_path: Path) -> None:
    with SequenceStoreWriter(tmp_path / "s", kind="raw") as writer:
        writer.extend([b"one protein\x01another one", b"plain"], [bytes([4]), bytes([5])])
    assert export_sequences(SequenceStore(tmp_path / "s"), tmp_path / "out.fasta") == 1
    (records,) = read_fasta_blocks(tmp_path / "out.fasta")
    assert records.names == [b"one_protein\x01another_one", b"plain"]


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [PROTEIN.encode("M", "it")])
    file = tmp_path / "file"
    file.write_text("in the way")
    for output in (tmp_path / "s", Path("/dev/null"), file / "out.fasta", tmp_path / "a.fasta.xz"):
        with pytest.raises((DataError, ConfigError), match=str(output)):
            export_sequences(store, output)
    other = write_store(tmp_path / "t", [np.array([4, 30], dtype=np.uint8)])
    (tmp_path / "out.fasta").write_text("old")
    with pytest.raises(DataError, match="not residues"):
        export_sequences(other, tmp_path / "out.fasta")
    with pytest.raises(DataError, match="no sequence of residues"):
        store_statistics(other)
    assert (tmp_path / "out.fasta").read_text() == "old"
    assert {file.name for file in tmp_path.iterdir()} == {"s", "file", "t", "out.fasta"}
