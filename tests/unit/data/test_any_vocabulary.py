"""Stores, batches, exports and statistics in the tokens of every vocabulary."""

import json
import pickle
import random
import struct
from collections import Counter
from itertools import chain
from pathlib import Path

import lmdb
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from d2plm.core.errors import ConfigError, DataError
from d2plm.core.vocabulary import CLS, EOS, PAD, Vocabulary, vocabulary
from d2plm.data.fasta_export import export_sequences, first_records
from d2plm.data.ingest import describe, ingest
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.statistics import plot, store_statistics, table
from d2plm.data.store import SequenceStore

LETTERS = {"protein": "ACDEFGHIKLMNPQRSTVWYX", "dna": "ACGTN", "rna": "ACGUN", "codon": "ACGT"}
WORDS = [
    "In the beginning",
    " was the Wörd,",
    "\n\nand the “word” was",
    " with\tGod \U0001f600 $1$2",
]
NAMES = [*LETTERS, "bytes", "tokenizer"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE whose tokens need two bytes each."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["".join(WORDS)] * 9, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet)
    )
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(file))
    return file


@pytest.fixture(params=NAMES)
def any_vocabulary(request: pytest.FixtureRequest, tokenizer: Path) -> Vocabulary:
    return vocabulary(request.param, tokenizer=tokenizer if request.param == "tokenizer" else None)


def _texts(found: Vocabulary, number: int = 1100) -> dict[str, str]:
    draw, letters = random.Random(0), LETTERS.get(found.name, "")
    if found.is_text:
        return {
            f"text {n}": "".join(draw.choices(WORDS, k=1 + n % 3)) + str(n) for n in range(number)
        }
    rest = 0 if found.name == "codon" else 1
    lengths = [3 * draw.randint(4, 9) + rest for _ in range(number)]
    return {f"s{n}": "".join(draw.choices(letters, k=length)) for n, length in enumerate(lengths)}


def _store(folder: Path, found: Vocabulary, window: int | None = None) -> SequenceStore:
    """Of `_texts` and, under another name, its first once more."""
    texts = _texts(found)
    rows = [*texts.items(), ("again", next(iter(texts.values())))]
    file = folder / "in.jsonl"
    file.write_text("".join(json.dumps({"name": n, "text": t}) + "\n" for n, t in rows))
    ingest(file, folder / "store", vocabulary=found, window=window)
    return SequenceStore(folder / "store")


def _integers(content: bytes, found: Vocabulary) -> list[int]:
    code = {1: "B", 2: "H", 4: "I"}[1 if found.size <= 256 else 2]
    return list(struct.unpack(f"<{len(content) // struct.calcsize(code)}{code}", content))


def test_a_store_holds_little_endian_integers(any_vocabulary: Vocabulary, tmp_path: Path) -> None:
    store = _store(tmp_path, any_vocabulary)
    assert store.vocabulary == any_vocabulary
    with lmdb.open(str(store.path), readonly=True, lock=False, max_dbs=1) as environment:
        database = environment.open_db(b"sequences", create=False)
        with environment.begin(db=database) as transaction:
            blocks = [_integers(value, any_vocabulary) for _, value in transaction.cursor()]
    tokens = [tokens.tolist() for tokens in store]
    assert [[*chain(*tokens[first : first + 1024])] for first in (0, 1024)] == blocks
    assert all(store[index].tolist() == tokens[index] for index in (0, 1023, 1024, -1))
    expected = {
        tuple(any_vocabulary.encode(text, "x").tolist()) for text in _texts(any_vocabulary).values()
    }
    assert set(map(tuple, tokens)) == expected
    store.verify()
    assert len(pickle.loads(pickle.dumps(store))[0]) == store.lengths[0]
    assert store.residues == sum(map(len, tokens))
    assert f" {any_vocabulary.nouns.token}s, of 1,101 records" in describe(store)


def test_an_export_ingests_to_the_same_store(any_vocabulary: Vocabulary, tmp_path: Path) -> None:
    # Bytes may be cut within a character; a tokenizer may merge a cut word otherwise.
    store = _store(tmp_path, any_vocabulary, None if any_vocabulary.name == "tokenizer" else 9)
    output = tmp_path / ("out.jsonl.gz" if any_vocabulary.is_text else "out.fasta.gz")
    assert export_sequences(store, output) == 0
    ingest(output, tmp_path / "again", vocabulary=any_vocabulary)
    again = SequenceStore(tmp_path / "again")
    assert again.digest == store.digest
    assert [*map(again.names, range(len(again)))] == [*map(store.names, range(len(store)))]
    with pytest.raises(ConfigError, match=r"must be a (\.jsonl or \.jsonl\.gz|FASTA) file"):
        export_sequences(store, tmp_path / ("o.fasta" if any_vocabulary.is_text else "o.jsonl.gz"))
    head = b"".join(first_records(store, 2)).decode()
    assert head.count("\n{" if any_vocabulary.is_text else "\n>") == 1


def test_statistics_count_tokens(any_vocabulary: Vocabulary, tmp_path: Path) -> None:
    store = _store(tmp_path, any_vocabulary)
    found = store_statistics(store)
    counts = Counter(token for tokens in store for token in tokens.tolist())
    assert {4 + i: n for i, n in enumerate(found.counts.tolist()) if n} == counts
    shown = found.summary()["residue_counts"]
    most = counts.most_common()[:20] if any_vocabulary.predicted > 64 else counts.items()
    assert sorted(n for n in shown.values() if n) == sorted(n for _, n in most)
    text = table({"raw": found})
    assert text.splitlines()[1].split()[0] in (f"{any_vocabulary.nouns.sequence}s", "sequences")
    assert f"composition, % of the {any_vocabulary.nouns.token}s" in text
    assert ("20 most frequent" in text) == (any_vocabulary.predicted > 64)
    if any_vocabulary.name == "bytes":
        plot({"raw": found}, tmp_path / "a.svg", "title")


def test_batches_hold_the_stores_tokens(any_vocabulary: Vocabulary, tmp_path: Path) -> None:
    store = _store(tmp_path, any_vocabulary)
    loader = PackedLoader([Collection(store)], token_budget=512, max_length=512)
    seen = {}
    for batch, _ in zip(loader.stream(Position()), range(loader.batches_in_epoch(0)), strict=False):
        (packed,) = batch.micro_batches
        row, ends = packed.tokens.numpy(), packed.cu_seqlens.tolist()
        assert row.dtype == any_vocabulary.dtype
        ids = [i for i in packed.sequence_ids.tolist() if i >= 0]
        for index, start, end in zip(ids, ends, ends[1:], strict=False):
            seen[index] = row[start:end].tolist()
        assert (row[ends[len(ids)] :] == PAD).all()
    assert seen == {i: [CLS, *tokens.tolist(), EOS] for i, tokens in enumerate(store)}


def test_a_store_without_its_tokenizer_is_damaged(tmp_path: Path, tokenizer: Path) -> None:
    store = _store(tmp_path, vocabulary("tokenizer", tokenizer=tokenizer))
    path = store.path
    (saved,) = path.glob("*tokenizer.json")
    saved.rename(tmp_path / "moved.json")
    with pytest.raises(DataError, match="another alphabet"):
        SequenceStore(path)
