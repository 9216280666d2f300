"""Megatron corpora are built here byte by byte, from the format's description alone.

MMIDIDX: nine bytes of magic, uint64 version 1, uint8 dtype code, uint64 number of sequences, uint64
length of the document index, int32 lengths, int64 first bytes, int64 document index, and for
multimodal corpora int8 modes. TNTIDX: eight bytes of magic, then as uint64 the version 1, dtype
code, bytes of a token, numbers of sequences, sizes and entries of the document index, then as int64
the first size of each sequence and one more, the first token of each and one more, the sizes, and
the document index.
"""

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import pytest

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import DNA, FIRST, Bytes, Subwords, Vocabulary
from d2plm.data.ingest import ingest
from d2plm.data.megatron import read_megatron
from d2plm.data.store import SequenceStore
from tests.conftest import Logged, MonkeyPatch

Document = Sequence[Sequence[int]]  # of sequences of token ids
CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H", 9: "I", 10: "Q"}  # of `struct`
DOCUMENTS: list[Document] = [[[1, 2, 3]], [[4], [5, 6]], [], [[]], [[7, 0, 119, 8, 9]], [[10]]]
WHOLE = {f"document{n}": [*chain(*one)] for n, one in enumerate(DOCUMENTS) if any(one)}
BYTES = Bytes()


def _columns(documents: Sequence[Document]) -> tuple[list[list[int]], list[int], list[int]]:
    """The sequences, their lengths, and the document index."""
    sequences = [list(sequence) for document in documents for sequence in document]
    bounds = [0, *accumulate(len(document) for document in documents)]
    return sequences, [len(sequence) for sequence in sequences], bounds


def mmididx(prefix: Path, documents: Sequence[Document], code: int = 8) -> Path:
    sequences, lengths, bounds = _columns(documents)
    count, width = len(sequences), struct.calcsize("<" + CODES[code])
    pointers = [n * width for n in [0, *accumulate(lengths)][:count]]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, count, len(bounds))
    index += struct.pack(f"<{count}i{count}q{len(bounds)}q", *lengths, *pointers, *bounds)
    return _written(prefix, index, sequences, code)


def tntidx(prefix: Path, documents: Sequence[Document], code: int = 4) -> Path:
    sequences, lengths, bounds = _columns(documents)
    count, width = len(sequences), struct.calcsize("<" + CODES[code])
    numbers = [1, code, width, count, count, len(bounds)]
    numbers += [*range(count + 1), *accumulate([0, *lengths]), *lengths, *bounds]
    index = b"TNTIDX\x00\x00" + struct.pack(f"<{len(numbers)}q", *numbers)
    return _written(prefix, index, sequences, code)


def _written(prefix: Path, index: bytes, sequences: list[list[int]], code: int) -> Path:
    Path(f"{prefix}.idx").write_bytes(index)
    ids = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(ids)}{CODES[code]}", *ids))
    return prefix


def read(
    prefix: Path, vocabulary: Vocabulary = BYTES, end: int | None = None
) -> dict[str, list[int]]:
    """Token ids of each document by its name."""
    found = {}
    for records in read_megatron(Path(f"{prefix}.idx"), vocabulary, end):
        tokens = records.tokenised(vocabulary)
        assert tokens.tokens.dtype == vocabulary.dtype
        for index, name in enumerate(records.names):
            found[name.decode()] = (tokens[index].astype(np.int64) - FIRST).tolist()
    return found


@pytest.mark.parametrize("build", [mmididx, tntidx])
@pytest.mark.parametrize("code", sorted(CODES))
def test_both_layouts_are_read_in_every_dtype(
    tmp_path: Path, build: Callable[..., Path], code: int
) -> None:
    assert read(build(tmp_path / "a.b", DOCUMENTS, code)) == WHOLE


@pytest.mark.parametrize(("documents", "tokens"), [(1, 100), (100, 4), (2, 6)])
def test_blocks_hold_every_document_once(
    tmp_path: Path, monkeypatch: MonkeyPatch, documents: int, tokens: int
) -> None:
    monkeypatch.setattr("d2plm.data.megatron._BLOCK_DOCUMENTS", documents)
    monkeypatch.setattr("d2plm.data.megatron._BLOCK_TOKENS", tokens)
    corpus = mmididx(tmp_path / "a", DOCUMENTS)
    assert read(corpus) == WHOLE
    blocks = [*read_megatron(corpus.with_suffix(".bin"), BYTES, None)]
    assert len(blocks) > 1 and blocks[-1].done == 1
    assert max(len(block.names) for block in blocks) <= documents


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {"[UNK]": 0, "a": 1, "b": 2, "c": 3}
    tokenizer = Tokenizer(models.WordLevel(known, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    file = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer.save(str(file))
    return Subwords(file)


def test_ends_of_documents_are_dropped(tmp_path: Path, words: Vocabulary, caplog: Logged) -> None:
    ended = mmididx(tmp_path / "ended", [[[1, 2, 4]], [[3], [1, 4]], [], [[4]], [[4, 4]]])
    assert read(ended, words) == {"document0": [1, 2], "document1": [3, 1], "document4": [4]}
    plain = mmididx(tmp_path / "plain", [[[1, 2]], [[3]]])
    assert read(plain, words) == {"document0": [1, 2], "document1": [3]}
    assert not caplog.records
    mixed = mmididx(tmp_path / "mixed", [[[1, 4]], [[3]]])
    assert read(mixed, words) == {"document0": [1, 4], "document1": [3]}
    assert "1 of 2 documents" in caplog.text


def test_a_stated_end_of_document(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    corpus = mmididx(tmp_path / "a", [[[1, 2, 256]], [[3, 256]]])
    assert read(corpus, end=256) == {"document0": [1, 2], "document1": [3]}
    with pytest.raises(DataError, match="2 of 2 documents"):
        read(corpus, end=7)
    # An unlike end that no sample saw is refused when it is read.
    monkeypatch.setattr("d2plm.data.megatron._SAMPLES", 2)
    with pytest.raises(DataError, match="document1 "):
        read(mmididx(tmp_path / "b", [[[1, 9]], [[2, 3]], [[4, 9]]]), end=9)


@pytest.mark.parametrize(("code", "wrong"), [(8, 256), (4, -1), (5, 1 << 40)])
def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path, code: int, wrong: int) -> None:
    corpus = mmididx(tmp_path / "a", [[[1]], [], [[2], [255, wrong]]], code)
    with pytest.raises(DataError, match=rf"a\.bin: document2, token 2 of it: the id {wrong} "):
        read(corpus)


def _put(place: int, change: bytes) -> Callable[[bytes], bytes]:
    """Bytes in the place of those that are there."""
    return lambda whole: whole[:place] + change + whole[place + len(change) :]


# What is damaged: how the corpus is written, which of its files, and how that changes.
DAMAGES: dict[str, tuple[Callable[..., Path], str, Callable[[bytes], bytes]]] = {
    "truncated data": (mmididx, ".bin", lambda whole: whole[:-2]),
    "an odd size": (mmididx, ".bin", lambda whole: whole + b"\0"),
    "magic": (mmididx, ".idx", _put(0, b"X")),
    "version": (mmididx, ".idx", _put(9, b"\2")),
    "dtype": (mmididx, ".idx", _put(17, b"\x0b")),
    "floating-point numbers": (mmididx, ".idx", _put(17, b"\6")),
    "a short header": (mmididx, ".idx", lambda whole: whole[:20]),
    "a short index": (mmididx, ".idx", lambda whole: whole[:-8]),
    "a huge count": (mmididx, ".idx", _put(18, b"\xff" * 8)),
    # The second pointer, after a header of 34 bytes, six lengths and a pointer.
    "a pointer": (mmididx, ".idx", _put(66, b"\xff\x7f")),
    "a length": (mmididx, ".idx", _put(34, b"\xff" * 4)),
    "documents": (mmididx, ".idx", lambda whole: whole[:-8] + b"\x05" + whole[-7:]),
    "an order": (mmididx, ".idx", lambda whole: whole[:-16] + b"\x07" + whole[-15:]),
    "older version": (tntidx, ".idx", _put(8, b"\3")),
    "a token's width": (tntidx, ".idx", _put(24, b"\2")),
    "an older pointer": (tntidx, ".idx", _put(120, b"\x63")),
    "number of sizes": (tntidx, ".idx", lambda whole: _put(40, b"\7")(whole) + bytes(8)),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_reported(tmp_path: Path, what: str) -> None:
    build, ending, change = DAMAGES[what]
    build(tmp_path / "a", DOCUMENTS)
    file = tmp_path / f"a{ending}"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError, match=str(tmp_path / "a")):
        read(tmp_path / "a")


def test_missing_and_empty_corpora_are_refused(tmp_path: Path) -> None:
    mmididx(tmp_path / "none", [])
    for corpus in (tmp_path / "missing", tmp_path / "none"):
        with pytest.raises(DataError, match=str(corpus)):
            read(corpus)


def test_what_is_not_text_in_a_multimodal_corpus_is_refused(tmp_path: Path) -> None:
    corpus, index = mmididx(tmp_path / "a", DOCUMENTS), tmp_path / "a.idx"
    whole = index.read_bytes()
    index.write_bytes(whole + bytes(6))  # a mode for each sequence
    assert read(corpus) == WHOLE
    index.write_bytes(whole + b"\0\2" + bytes(4))
    with pytest.raises(DataError, match="sequence 1 has mode 2"):
        read(corpus)


@pytest.mark.parametrize("given", ["corpus.bin", "corpus.*"])
def test_a_corpus_is_ingested_as_its_texts_are(tmp_path: Path, given: str) -> None:
    """Equal to the store of the same texts from FASTA: tokens, cutting and digest."""
    random = np.random.default_rng(0)
    documents = [random.integers(0, 4, size=n).tolist() for n in random.integers(1, 30, 1_100)]
    mmididx(tmp_path / "corpus", [[d] for d in documents])
    fasta = [f">{i}\n{''.join('ACGT'[t] for t in d)}\n" for i, d in enumerate(documents)]
    (tmp_path / "text.fasta").write_text("".join(fasta))
    manifests = [
        ingest(tmp_path / source, tmp_path / f"store{i}", vocabulary=DNA, window=8)
        for i, source in enumerate((given, "text.fasta"))
    ]
    assert manifests[0]["digests"]["sequences"] == manifests[1]["digests"]["sequences"]
    records = [manifest["provenance"]["records"] for manifest in manifests]
    assert records == [len(documents)] * 2
    assert SequenceStore(tmp_path / "store0").names(0)[0].startswith("document")
