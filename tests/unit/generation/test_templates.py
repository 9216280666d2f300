"""Templates of every kind of vocabulary, and the histogram of lengths of an export."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from d2plm.core.errors import DataError, ModelError
from d2plm.core.vocabulary import DNA, FIRST, PROTEIN, Bytes, Codons, Subwords, Vocabulary, encode
from d2plm.generation.lengths import FILE, LengthHistogram
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from tests.unit.paradigms.numbered_tokens import of


def test_both_spellings_of_a_mask_are_read() -> None:
    tokens = parse_template(" MK_<mask>va\n", "t")
    assert tokens.tolist() == [*encode("MK"), PROTEIN.mask, PROTEIN.mask, *encode("VA")]


def test_a_nucleotide_is_wanted_for_each_underscore() -> None:
    tokens = parse_template("AC__g<mask:3>N", "t", DNA)
    expected = [*DNA.encode("AC", "t"), *[DNA.mask] * 2, *DNA.encode("G", "t"), *[DNA.mask] * 3]
    assert tokens.tolist() == [*expected, *DNA.encode("N", "t")]
    assert tokens.dtype == np.uint8


@pytest.mark.parametrize(
    ("text", "vocabulary", "said"),
    [
        *((text, one, "[-.]") for text in ("ACG--____A", "AC_.") for one in (PROTEIN, DNA)),
        ("ACG---A", Codons(), "[-.]"),  # a gap is not taken for residues to design
        ("MK1_", PROTEIN, "'1' at position 3"),
        ("MKV", PROTEIN, "'_'"),
        ("ATG____", Codons(), "position 4"),
        ("AT___", Codons(), "2 bases"),
        ("a_b", Bytes(), "'<mask>'"),
    ],
)
def test_what_cannot_be_a_template_is_rejected(
    text: str, vocabulary: Vocabulary, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        parse_template(text, "t", vocabulary)


def test_a_codon_is_wanted_for_three_underscores() -> None:
    codons = Codons()
    tokens = parse_template("ATG______TAA", "t", codons)
    assert codons.decode(tokens) == "ATG______TAA"
    assert len(tokens) == 4 and (tokens[1:3] == codons.mask).all()


def test_an_underscore_is_a_byte_of_text_and_only_mask_is_a_mark() -> None:
    vocabulary = Bytes()
    tokens = parse_template("a_b <mask:2>ü", "t", vocabulary)
    before, after = ([FIRST + byte for byte in text.encode()] for text in ("a_b ", "ü"))
    assert tokens.tolist() == [*before, vocabulary.mask, vocabulary.mask, *after]
    assert tokens.dtype == np.uint16


@pytest.mark.parametrize(
    "paradigm", [AbsorbingDiffusion(), MaskFlowMatching(), UniformFlowMatching()]
)
def test_every_sampler_fills_templates_of_two_bytes_a_token(paradigm: Paradigm) -> None:
    vocabulary = Bytes()
    paradigm = of(paradigm, vocabulary)

    def model(tokens: Tensor, *_: object) -> Tensor:
        logits = torch.zeros(len(tokens), vocabulary.size)
        logits[:, FIRST + ord("z")] = 50  # almost surely
        return logits

    templates = [parse_template(text, "t", vocabulary) for text in ("a<mask:3>ü", "<mask>")]
    for sampler in paradigm.samplers:
        filled = sample(model, paradigm, templates, Sampling(sampler=sampler), max_length=9)
        assert [vocabulary.decode(one) for one in filled] == ["azzzü", "z"]
        assert all(one.dtype == np.uint16 for one in filled)


def test_the_parts_of_a_text_are_tokenised_by_themselves(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"in": 0, "the": 1, "_": 2}))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Subwords(tmp_path)
    tokens = parse_template("in the <mask> in _<mask:2>", "t", vocabulary)
    mask = vocabulary.mask
    assert tokens.tolist() == [FIRST, FIRST + 1, mask, FIRST, FIRST + 2, mask, mask]


@pytest.mark.parametrize("number", [4 * 10**9, 0, -1, "many"])
def test_a_histogram_of_impossible_lengths_is_rejected(tmp_path: Path, number: object) -> None:
    LengthHistogram.of(np.array([3, 4]), 10).save(tmp_path)
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**content, "max_residues": number}))
    with pytest.raises(ModelError, match=FILE):
        LengthHistogram.load(tmp_path)
