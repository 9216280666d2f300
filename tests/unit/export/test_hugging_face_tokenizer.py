"""Hugging Face tokenizers of exported models give the numbers of the model's own vocabulary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from d2plm.core import vocabulary as vocabularies
from d2plm.core.vocabulary import CANONICAL, DNA, PROTEIN, RNA, Bytes, Codons, Subwords, Vocabulary
from d2plm.export.hugging_face_tokenizer import hugging_face_tokenizer
from tests.conftest import Logged, MonkeyPatch

CORPUS = ["In the beginning God created the heaven and the earth. " * 3, "12345 was void;"] * 9
UNKNOWN = "<unk>"
SENTENCE = "In the beginning é 日\n  x y"


def check(vocabulary: Vocabulary, text: str, folder: Path) -> Any:
    """The tokenizer that `AutoTokenizer` loads from an export of this vocabulary."""
    saved = hugging_face_tokenizer(vocabulary, 16)
    assert saved is not None
    saved.save_pretrained(folder)
    vocabulary.save(folder)
    assert vocabularies.open_vocabulary(folder) == vocabulary  # no file is of both
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = vocabulary.encode(text, "text", aligned=True)
    assert tokenizer(text)["input_ids"][1:-1] == tokens.tolist()
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (1, vocabulary.mask)
    return tokenizer


def byte_pairs() -> Tokenizer:
    """As GPT-2's: every byte has a token, and one special token is not of the model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    known = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=known)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def llama() -> Tokenizer:
    """As Llama's: `<unk>` and the bytes are tokens of the model, and texts begin with a blank."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    prepend = normalizers.Prepend("▁")
    tokenizer.normalizer = normalizers.Sequence([prepend, normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """As T5's, with a `<mask>` of its own."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token=UNKNOWN)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.mark.parametrize(
    ("vocabulary", "text"),
    [
        (PROTEIN, f"{CANONICAL}{CANONICAL.lower()}mktay xBu\nZo*"),
        (DNA, "ATGaaacgtU\nTGA ACN-"),
        (RNA, "AUGaaacgtT"),
        (Codons(), "ATGaaaACNTGA"),
        (Bytes(), SENTENCE),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_letters_codons_and_bytes(vocabulary: Vocabulary, text: str, tmp_path: Path) -> None:
    tokenizer = check(vocabulary, text, tmp_path)
    shown = tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)
    assert shown == vocabulary.decode(vocabulary.encode(text, "text", aligned=True))
    assert tokenizer("<mask>")["input_ids"] == [0, vocabulary.mask, 2]
    cut = tokenizer(text * 20, truncation=True)
    assert len(cut["input_ids"]) == tokenizer.model_max_length == 16
    assert (cut["input_ids"][-1], set(cut)) == (2, {"input_ids", "attention_mask"})


@pytest.mark.parametrize("made", [byte_pairs, llama, unigram])
def test_those_of_a_tokenizer_are_renumbered(made: Callable[[], Tokenizer], tmp_path: Path) -> None:
    made().save(str(tmp_path / "own.json"))
    vocabulary = Subwords(tmp_path / "own.json")
    tokenizer = check(vocabulary, SENTENCE, tmp_path)
    with_mask = tokenizer(f"the {tokenizer.mask_token} earth")["input_ids"]
    assert with_mask.count(vocabulary.mask) == 1


def test_one_that_cannot_be_renumbered_is_left_out(
    tmp_path: Path, monkeypatch: MonkeyPatch, caplog: Logged
) -> None:
    byte_pairs().save(str(tmp_path / "own.json"))
    broken = "d2plm.export.hugging_face_tokenizer._renumbered"
    monkeypatch.setattr(broken, lambda *_: byte_pairs())
    assert hugging_face_tokenizer(Subwords(tmp_path / "own.json"), 16) is None
    assert "exported without tokenizer" in caplog.text
