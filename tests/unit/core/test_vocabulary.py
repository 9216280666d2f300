"""Vocabularies against definitions written down here, letter by letter."""

import json
import pickle
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from d2plm.core import vocabulary as module
from d2plm.core.errors import ConfigError, DataError, ModelError
from d2plm.core.vocabulary import PROTEIN, Bytes, Codons, Subwords, Vocabulary, encode, vocabulary
from tests.conftest import MonkeyPatch

CODONS = ["".join(bases) for bases in product("ACGT", repeat=3)]


@pytest.fixture
def subwords() -> Subwords:
    return Subwords(Path(__file__).parents[3] / "examples" / "data" / "king_james_bible_bpe.json")


@pytest.fixture(params=["protein", "dna", "rna", "codon", "bytes", "tokenizer"])
def any_vocabulary(request: pytest.FixtureRequest, subwords: Subwords) -> Vocabulary:
    return subwords if request.param == "tokenizer" else vocabulary(request.param)


def test_the_layout(any_vocabulary: Vocabulary) -> None:
    assert (module.CLS, module.PAD, module.EOS, module.UNK, module.FIRST) == (0, 1, 2, 3, 4)
    every = np.arange(any_vocabulary.size)
    predicted = every[any_vocabulary.is_predicted(every)]
    assert predicted.tolist() == list(range(4, 4 + any_vocabulary.predicted))
    assert any_vocabulary.mask == any_vocabulary.size - 1 >= any_vocabulary.stop
    assert np.iinfo(any_vocabulary.dtype).max >= any_vocabulary.mask
    assert any_vocabulary.dtype.itemsize == (1 if any_vocabulary.size <= 256 else 2)


@pytest.mark.parametrize(
    ("kind", "letters"),
    [
        (module.DNA, "ACGTNRYSWKMBDHV"),
        (module.RNA, "ACGUNRYSWKMBDHV"),
        (PROTEIN, "LAGVSERTIDPKQNFYMHWCXBUZO"),
    ],
)
def test_letters(kind: Vocabulary, letters: str) -> None:
    row = kind.encode(letters.lower() + " -.\n" + letters, "it", aligned=True)
    assert row.tolist() == [*range(4, 4 + len(letters))] * 2
    assert kind.decode(row) == 2 * letters
    # A base of the other nucleic acid is read as one's own.
    assert kind is PROTEIN or kind.decode(kind.encode("AUTN", "it")) == f"A{2 * letters[3]}N"


@given(st.lists(st.text(alphabet="ACGTN", max_size=30).map(str.encode), max_size=9))
def test_codons(texts: list[bytes]) -> None:
    found = Codons().tokenise(texts)
    for index, text in enumerate(texts):
        codons = [text[i : i + 3].decode() for i in range(0, len(text), 3)]
        legal = len(text) % 3 == 0
        assert found.illegal[index] == (not legal)
        if legal:
            expected = [CODONS.index(c) + 4 if "N" not in c else 68 for c in codons]
            assert found[index].tolist() == expected
            assert Codons().decode(found[index]) == text.decode() or "N" in text.decode()


@given(st.text(min_size=1, max_size=60))
def test_text_of_bytes_comes_back(text: str) -> None:
    tokens = Bytes().encode(text, "it")
    assert tokens.tolist() == [4 + byte for byte in text.encode("utf-8", "replace")]
    assert Bytes().decode(tokens).encode("utf-8", "replace") == text.encode("utf-8", "replace")
    assert Bytes().byte_count(tokens) == len(text.encode("utf-8", "replace"))


def test_subwords(subwords: Subwords, tmp_path: Path) -> None:
    text = "the word — été"
    tokens = subwords.encode(text, "it")
    reference = Tokenizer.from_file(str(subwords.path))
    assert tokens.tolist() == [number + 4 for number in reference.encode(text).ids]
    assert subwords.decode(tokens) == text
    assert subwords.byte_count(tokens) == len(text.encode())
    assert pickle.loads(pickle.dumps(subwords)) == subwords
    assert subwords.tokenise([b"the", b"\xff", b"word"]).illegal.tolist() == [False, True, False]
    assert "byte b'\\xff'" in subwords.fault(b"the \xff")[0]
    changed = json.loads(subwords.path.read_text())
    changed["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0}
    changed["truncation"]["direction"] = "Right"
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    assert Subwords(tmp_path).encode(text, "it").tolist() == tokens.tolist()


def test_the_mask_is_shown_as_a_gap(any_vocabulary: Vocabulary) -> None:
    text = "ACGACG"
    tokens = any_vocabulary.encode(text, "it")
    tokens[1 : len(tokens)] = any_vocabulary.mask
    first = any_vocabulary.decode(tokens[:1])
    gaps = (len(tokens) - 1) * (3 if any_vocabulary.name == "codon" else 1)
    assert any_vocabulary.decode(tokens) == first + "_" * gaps


def test_it_is_saved_and_opened(any_vocabulary: Vocabulary, tmp_path: Path) -> None:
    any_vocabulary.save(tmp_path)
    assert module.open_vocabulary(tmp_path) == any_vocabulary
    assert module.vocabulary_of(any_vocabulary.describe(), tmp_path) == any_vocabulary


def test_another_vocabulary_than_was_saved_is_refused(subwords: Subwords, tmp_path: Path) -> None:
    assert module.open_vocabulary(tmp_path) is PROTEIN
    subwords.save(tmp_path)
    saved = tmp_path / module.SAVED_TOKENIZER
    content = json.loads(saved.read_text())
    content["model"]["dropout"] = 0.5
    saved.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="another tokenizer"):
        module.open_vocabulary(tmp_path)
    for description in ({"alphabet": "klingon"}, {}, 3, ["A"], {"alphabet": []}):
        with pytest.raises(ModelError):
            module.vocabulary_of(description, tmp_path)


@pytest.mark.parametrize("letters", [1, 7, 1 << 20])
def test_texts_are_tokenised_in_batches_of_any_size(
    subwords: Subwords, monkeypatch: MonkeyPatch, letters: int
) -> None:
    texts = [b"in the beginning", b"", b"was", b"\xff", b"", b"the word, and the word was"]
    expected = [subwords.encode(text.decode(), "").tolist() for text in texts if text.isalnum()]
    monkeypatch.setattr("d2plm.core.vocabulary._BATCH_LETTERS", letters)
    found = subwords.tokenise(texts)
    assert found.illegal.tolist() == [False, False, False, True, False, False]
    stopped = Mock(encode_batch_fast=Mock(side_effect=SystemExit(143)))
    with monkeypatch.context() as patch, pytest.raises(SystemExit):  # a signal ends it
        patch.setattr(subwords, "_tokenizer", stopped)
        subwords.tokenise(texts)
    assert [subwords.decode(found[n]).encode() for n in (0, 1, 2, 4, 5)] == [
        text for text in texts if text != b"\xff"
    ]
    assert found[2].tolist() == expected[0]


def test_wrong_settings(tmp_path: Path) -> None:
    wrong = [("no", None, "alphabet"), ("tokenizer", None, "tokenizer")]
    for kind, path, key in [*wrong, ("dna", tmp_path, "tokenizer")]:
        with pytest.raises(ConfigError) as caught:
            vocabulary(kind, tokenizer=path)
        assert key in caught.value.settings
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=str(path)):
            vocabulary("tokenizer", tokenizer=path)


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"a": 0}, "<unk>")).save(str(path))
    with pytest.raises(DataError, match="cannot tokenise"):
        vocabulary("tokenizer", tokenizer=path).encode("b", "it")
    content = json.loads(path.read_text())
    for numbers in ({}, {"a": 2**32 - 1}):
        content["model"]["vocab"] = numbers
        path.write_text(json.dumps(content))
        with pytest.raises(DataError, match=str(path)):
            vocabulary("tokenizer", tokenizer=path)
    endless = Tokenizer(WordLevel({"a": 0}, "a"))
    endless.pre_tokenizer = Split(Regex(r"(x+x+)+y"), "isolated")  # its search gives up: a panic
    endless.save(str(path))
    with pytest.raises(DataError, match="cannot tokenise"):
        vocabulary("tokenizer", tokenizer=path).encode("x" * 60, "it")


# facebook/esm2_* vocab.txt
ESM2 = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"


def test_the_tokens_are_esm2s_in_its_order() -> None:
    assert list(module.ESM2_TOKENS) == ESM2
    tokens = np.arange(33, dtype=np.uint8)
    canonical = {ESM2[token] for token in tokens[module.is_canonical(tokens)]}
    assert canonical == {*AMINO_ACIDS} == {*module.CANONICAL}
    letters = f"{AMINO_ACIDS}XBUZO"
    for written in (letters, letters.lower(), letters.encode()):
        assert encode(written).tolist() == [ESM2.index(letter) for letter in letters]
    row = [module.CLS, *encode(letters), module.MASK, ESM2.index("<null_1>"), module.EOS]
    row += [module.PAD, module.UNK]
    assert module.decode(np.array(row, dtype=np.uint8)) == f"{letters}_"  # without special tokens


@given(st.text(max_size=30))
def test_anything_else_is_unknown_and_keeps_its_place(text: str) -> None:
    legal = set((AMINO_ACIDS + "XBUZO") + (AMINO_ACIDS + "XBUZO").lower())
    assert [t != module.UNK for t in encode(text)] == [letter in legal for letter in text]
