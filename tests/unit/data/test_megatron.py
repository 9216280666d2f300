"""Megatron corpora are built and read here byte by byte, from the format's description alone.

MMIDIDX: nine bytes of magic, uint64 version 1, uint8 dtype code, uint64 number of sequences, uint64
length of the document index, int32 lengths, int64 first bytes, int64 document index, and for
multimodal corpora int8 modes. TNTIDX: eight bytes of magic, then as uint64 the version 1, dtype
code, bytes of a token, numbers of sequences, sizes and entries of the document index, then as int64
the first size of each sequence and one more, the first token of each and one more, the sizes, and
the document index.
"""

import pickle
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import DNA, FIRST, Bytes, Subwords, Vocabulary
from d2plm.data.ingest import ingest
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.megatron import MegatronSequences, export_megatron
from d2plm.data.store import SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter
from tests.conftest import MonkeyPatch

Document = Sequence[Sequence[int]]  # of sequences of token ids
CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H", 9: "I", 10: "Q"}  # of `struct`
DOCUMENTS: list[Document] = [[[1, 2, 3]], [[4], [5, 6]], [], [[]], [[7, 0, 119, 8, 9]], [[10]]]
WHOLE = [[1, 2, 3], [4, 5, 6], [7, 0, 119, 8, 9], [10]]
NUMBERS = [0, 1, 4, 5]  # of the documents that are not empty


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


def read_as_megatron(prefix: Path) -> tuple[int, list[list[int]], list[int]]:
    """Dtype code, sequences and document index, in the steps of Megatron's `_IndexReader`."""
    with open(f"{prefix}.idx", "rb") as stream:
        assert stream.read(9) == b"MMIDIDX\x00\x00"
        version, code, count, documents = struct.unpack("<QBQQ", stream.read(25))
        assert version == 1
        lengths = struct.unpack(f"<{count}i", stream.read(4 * count))
        pointers = struct.unpack(f"<{count}q", stream.read(8 * count))
        index = struct.unpack(f"<{documents}q", stream.read(8 * documents))
        assert stream.read() == b""
    assert index[-1] == count
    data, width = Path(f"{prefix}.bin").read_bytes(), struct.calcsize("<" + CODES[code])
    sequences = [
        list(struct.unpack(f"<{n}{CODES[code]}", data[start : start + n * width]))
        for start, n in zip(pointers, lengths, strict=True)
    ]
    return code, sequences, list(index)


def ids(sequences: MegatronSequences) -> list[list[int]]:
    return [(tokens.astype(np.int64) - FIRST).tolist() for tokens in sequences]


@pytest.mark.parametrize("build", [mmididx, tntidx])
@pytest.mark.parametrize("code", sorted(CODES))
def test_both_layouts_and_every_dtype(
    tmp_path: Path, build: Callable[..., Path], code: int
) -> None:
    sequences = MegatronSequences(build(tmp_path / "a.b", DOCUMENTS, code), Bytes())
    assert ids(sequences) == WHOLE
    assert sequences[-1].tolist() == [FIRST + 10]
    assert sequences[0].dtype == Bytes().dtype
    assert sequences.lengths.tolist() == [3, 3, 5, 1]
    assert sequences.clusters.tolist() == NUMBERS
    assert sequences.residues == 12
    assert [sequences.name(i) for i in range(4)] == [f"document{n}" for n in NUMBERS]


@pytest.mark.parametrize("window", [1, 2, 5, 6])
def test_windows_hold_every_token_once(tmp_path: Path, window: int) -> None:
    sequences = MegatronSequences(mmididx(tmp_path / "c", DOCUMENTS), Bytes(), window)
    assert sequences.lengths.max() <= window
    pieces = ids(sequences)
    for number, document in zip(NUMBERS, WHOLE, strict=True):
        own = [pieces[i] for i in np.flatnonzero(sequences.clusters == number)]
        assert own == [document[i : i + window] for i in range(0, len(document), window)]
    names = [name.decode() for block in sequences.name_blocks() for name in block]
    assert len(set(names)) == len(sequences) == len(pieces)
    if window == 2:
        assert names[:2] == ["document0/1", "document0/2"]
        assert names[-4:] == ["document4/1", "document4/2", "document4/3", "document5"]


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


def test_the_tokenizers_end_of_document_is_no_content(tmp_path: Path, words: Vocabulary) -> None:
    ended = mmididx(tmp_path / "ended", [[[1, 2, 4]], [[3], [1, 4]], [], [[4]], [[4, 4]]])
    sequences = MegatronSequences(ended, words, window=1)
    assert ids(sequences) == [[1], [2], [3], [1], [4]]
    assert sequences.clusters.tolist() == [0, 0, 1, 1, 4]
    plain = mmididx(tmp_path / "plain", [[[1, 2]], [[3]]])
    assert ids(MegatronSequences(plain, words)) == [[1, 2], [3]]


def test_a_stated_end_of_document(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    corpus = mmididx(tmp_path / "a", [[[1, 2, 256]], [[3, 256]]])
    assert ids(MegatronSequences(corpus, Bytes(), end_of_document=256)) == [[1, 2], [3]]
    with pytest.raises(DataError, match="2 of 2 documents"):
        MegatronSequences(corpus, Bytes(), end_of_document=7)
    # An unlike end that no sample saw is refused when it is read.
    monkeypatch.setattr("d2plm.data.megatron._SAMPLES", 2)
    corpus = mmididx(tmp_path / "b", [[[1, 9]], [[2, 3]], [[4, 9]]])
    sequences = MegatronSequences(corpus, Bytes(), end_of_document=9)
    assert sequences[0].tolist() == [FIRST + 1]
    with pytest.raises(DataError, match="document1"):
        sequences[1]


@pytest.mark.parametrize(("code", "wrong"), [(8, 256), (4, -1), (5, 1 << 40)])
def test_an_id_outside_the_vocabulary_is_refused(tmp_path: Path, code: int, wrong: int) -> None:
    sequences = MegatronSequences(
        mmididx(tmp_path / "a", [[[1]], [[2], [255, wrong]]], code), Bytes()
    )
    with pytest.raises(DataError, match=f"document1, token 2 of it: the id {wrong}"):
        sequences[1]


def _put(place: int, change: bytes) -> Callable[[bytes], bytes]:
    """Bytes in the place of those that are there."""
    return lambda whole: whole[:place] + change + whole[place + len(change) :]


QUARTER = 1 << 62  # four lengths of it have no sum
OVERFLOWING = [1, 4, 4, 5, 5, 6, *range(6), 0, QUARTER, -2 * QUARTER, -QUARTER, 0, 5]
OVERFLOWING += [*[QUARTER] * 4, 5, *range(6)]
# What is damaged: how the corpus is written, which of its files, and how that changes.
DAMAGES: dict[str, tuple[Callable[..., Path], str, Callable[[bytes], bytes]]] = {
    "truncated data": (mmididx, ".bin", lambda whole: whole[:-2]),
    "an odd size": (mmididx, ".bin", lambda whole: whole + b"\0"),
    "magic": (mmididx, ".idx", _put(0, b"X")),
    "version": (mmididx, ".idx", _put(9, b"\2")),
    "dtype": (mmididx, ".idx", _put(17, b"\x0b")),
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
    "a sum": (
        tntidx,
        ".idx",
        lambda whole: whole[:8] + struct.pack(f"<{len(OVERFLOWING)}q", *OVERFLOWING),
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_reported_at_opening(tmp_path: Path, what: str) -> None:
    build, ending, change = DAMAGES[what]
    build(tmp_path / "a", [[[1, 2, 3, 4, 5]]] if what == "a sum" else DOCUMENTS)
    file = tmp_path / f"a{ending}"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError, match=str(tmp_path / "a")):
        MegatronSequences(tmp_path / "a", Bytes())


def test_missing_and_empty_corpora_are_refused(tmp_path: Path) -> None:
    mmididx(tmp_path / "none", [])
    for corpus in (tmp_path / "missing", tmp_path / "none"):
        with pytest.raises(DataError, match=str(corpus)):
            MegatronSequences(corpus, Bytes())


def test_a_copy_of_a_corpus_has_its_digest_and_other_content_another(tmp_path: Path) -> None:
    def digest(name: str, documents: Sequence[Document], **settings: Any) -> str:
        return MegatronSequences(mmididx(tmp_path / name, documents), Bytes(), **settings).digest

    known = digest("a", DOCUMENTS)
    assert digest("b", DOCUMENTS) == known
    others = [
        digest("c", [[[1, 2, 4]], *DOCUMENTS[1:]]),
        digest("d", [[[1, 2], [3]], *DOCUMENTS[1:]]),
        digest("e", DOCUMENTS, window=2),
        digest("f", [[[1, 2, 3]]]),
    ]
    assert len({known, *others}) == 5


def test_what_is_not_text_in_a_multimodal_corpus_is_refused(tmp_path: Path) -> None:
    sequences = ids(MegatronSequences(mmididx(tmp_path / "a", DOCUMENTS), Bytes()))
    index, whole = tmp_path / "a.idx", (tmp_path / "a.idx").read_bytes()
    index.write_bytes(whole + bytes(6))  # a mode for each sequence
    assert ids(MegatronSequences(tmp_path / "a", Bytes())) == sequences
    index.write_bytes(whole + b"\0\2" + bytes(4))
    with pytest.raises(DataError, match="sequence 1 has mode 2"):
        MegatronSequences(tmp_path / "a", Bytes())


def test_a_pickled_corpus_is_opened_anew_and_a_replaced_one_refused(tmp_path: Path) -> None:
    sequences = MegatronSequences(mmididx(tmp_path / "a", DOCUMENTS), Bytes(), 2)
    pickled = pickle.dumps(sequences)
    assert len(pickled) < 2_000
    again = pickle.loads(pickled)
    assert ids(again) == ids(sequences)
    assert again.digest == sequences.digest
    mmididx(tmp_path / "a", DOCUMENTS[1:])
    with pytest.raises(DataError, match="was replaced"):
        pickle.loads(pickled)


def test_the_loader_packs_the_same_rows_as_from_a_store(tmp_path: Path) -> None:
    """A store of the same pieces in the same order, some of them longer than a row's segments."""
    random = np.random.default_rng(0)
    documents = [random.integers(0, 256, size=n).tolist() for n in random.integers(1, 60, 50)]
    corpus = MegatronSequences(mmididx(tmp_path / "a", [[d] for d in documents]), Bytes(), 40)
    pieces = [d[i : i + 40] for d in documents for i in range(0, len(d), 40)]
    with SequenceStoreWriter(tmp_path / "store", "train", None, Bytes()) as writer:
        content = [struct.pack(f"<{len(p)}H", *(FIRST + token for token in p)) for p in pieces]
        writer.extend([b"name"] * len(pieces), content)
    shape: dict[str, Any] = {"token_budget": 64, "max_length": 30}
    streams = [
        PackedLoader([Collection(sequences)], num_workers=number, **shape).stream(Position())
        for sequences, number in ((corpus, 1), (SequenceStore(tmp_path / "store"), 0))
    ]
    for ours, theirs in zip(*streams, strict=True):
        assert ours.micro_batches[0].tokens.tolist() == theirs.micro_batches[0].tokens.tolist()
        assert ours.segment_lengths == theirs.segment_lengths
        if ours.following.epoch == 2:
            break


@pytest.mark.parametrize("end", [None, 256])
def test_an_export_is_read_in_megatrons_steps_and_back(tmp_path: Path, end: int | None) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, 256, size=n).tolist() for n in random.integers(1, 9, 1_100)]
    store = MegatronSequences(mmididx(tmp_path / "a", [[d] for d in documents], code=5), Bytes())
    export_megatron(store, tmp_path / "out" / "b.bin", end)
    code, sequences, index = read_as_megatron(tmp_path / "out" / "b")
    assert code == 8
    assert sequences == [d if end is None else [*d, end] for d in documents]
    assert index == list(range(len(documents) + 1))
    assert ids(MegatronSequences(tmp_path / "out" / "b", Bytes(), end_of_document=end)) == documents
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["b.bin", "b.idx"]


def test_a_large_vocabulary_is_exported_as_int32(tmp_path: Path) -> None:
    vocabulary = Bytes()
    vocabulary.predicted, vocabulary.size = 70_000, FIRST + 70_000 + 1
    store = MegatronSequences(mmididx(tmp_path / "a", [[[69_999, 0]]], code=4), vocabulary)
    assert store[0].dtype == np.uint32
    export_megatron(store, tmp_path / "b")
    assert read_as_megatron(tmp_path / "b")[:2] == (4, [[69_999, 0]])


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
