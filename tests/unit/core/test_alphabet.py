"""The alphabet: the order of ESM-2, the table lookup, and the tokenizer of ESM-2 as reference."""

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from transformers import EsmTokenizer

from d2plm.core.vocabulary import (
    CANONICAL,
    CLS,
    EOS,
    ESM2_TOKENS,
    MASK,
    PAD,
    UNK,
    decode,
    encode,
    is_canonical,
)

# facebook/esm2_* vocab.txt
ESM2 = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"


def test_the_tokens_are_esm2s_in_its_order() -> None:
    assert list(ESM2_TOKENS) == ESM2
    tokens = np.arange(33, dtype=np.uint8)
    assert {ESM2[t] for t in tokens[is_canonical(tokens)]} == {*AMINO_ACIDS} == {*CANONICAL}


@given(st.text(alphabet=AMINO_ACIDS + "XBUZO", max_size=60))
def test_letters_survive_the_round_trip_in_either_case_and_type(letters: str) -> None:
    tokens = encode(letters)
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == [ESM2.index(letter) for letter in letters]
    np.testing.assert_array_equal(encode(letters.lower()), tokens)
    np.testing.assert_array_equal(encode(letters.encode()), tokens)
    assert decode(tokens) == letters


@given(st.text(max_size=30))
def test_anything_else_is_unknown_and_keeps_its_place(text: str) -> None:
    legal = set((AMINO_ACIDS + "XBUZO") + (AMINO_ACIDS + "XBUZO").lower())
    assert [t != UNK for t in encode(text)] == [letter in legal for letter in text]


def test_decoding_leaves_special_tokens_out_and_shows_masks() -> None:
    row = [CLS, *encode("MK"), MASK, ESM2.index("<null_1>"), EOS]
    assert decode(np.array([*row, PAD, UNK], dtype=np.uint8)) == "MK_"


def test_the_tokenizer_of_esm2_agrees(tmp_path: Path) -> None:
    letters = f"{AMINO_ACIDS}XBUZO"
    (tmp_path / "vocab.txt").write_text("\n".join(ESM2))
    hugging_face = EsmTokenizer(str(tmp_path / "vocab.txt"))
    ids = hugging_face(letters)["input_ids"]
    assert ids == [CLS, *encode(letters).tolist(), EOS]
    special = (hugging_face.mask_token_id, hugging_face.pad_token_id, hugging_face.unk_token_id)
    assert special == (MASK, PAD, UNK)
