"""Hugging Face masked language models: the same logits as their own class, whatever the packing."""

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertTokenizer, EsmForMaskedLM, EsmTokenizer

from d2plm.core.errors import ModelError
from d2plm.core.vocabulary import CANONICAL, CANONICAL_START, ESM2_TOKENS, MASK, encode
from d2plm.data.loader import pack_all
from d2plm.evaluation.masked_lm import MaskedLM
from tests.unit.model.test_esm import esm_like

SEQUENCES = [encode("MKVLAXAGW"), encode("MKV"), encode("GGGAAAWWYYCCMKVLAXAGW"), encode("CW")]


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def save_tokenizer(folder: Path, words: list[str]) -> None:
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *words]))
    BertTokenizer(str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A model with another vocabulary, in another order, and positions that end."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 25, "intermediate_size": 32, "max_position_embeddings": 64}
    torch.manual_seed(1)
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, sorted(CANONICAL))
    return tmp_path


def test_esm_gives_the_logits_of_its_own_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    direct = EsmForMaskedLM(esm_like(2, 32, 4, 64)).eval()
    direct.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(ESM2_TOKENS))
    EsmTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    (batch,) = pack_all(SEQUENCES, 128, 64)
    tokens = batch.tokens.clone()
    tokens[[2, 16, 30]] = MASK
    with torch.inference_mode():
        found = MaskedLM(tmp_path)(tokens, batch.cu_seqlens, batch.max_seqlen, torch.zeros(1))
        bounds = batch.cu_seqlens.tolist()
        for start, stop in zip(bounds[: len(SEQUENCES)], bounds[1:], strict=False):
            expected = direct(input_ids=tokens[None, start:stop].long()).logits[0, :, 4:24]
            torch.testing.assert_close(found[start:stop, 4:24], expected, atol=1e-5, rtol=0)


def test_another_vocabulary_is_mapped_letter_by_letter(bert: Path) -> None:
    (batch,) = pack_all([encode("MKVLAGW")], 9, 64)
    tokens = batch.tokens.clone()
    tokens[3] = MASK
    loaded = BertTokenizer(str(bert / "vocab.txt"), do_lower_case=False)
    ids = loaded.convert_tokens_to_ids(["[CLS]", "M", "K", "[MASK]", *"LAGW", "[SEP]"])
    columns = loaded.convert_tokens_to_ids(list(CANONICAL))
    with torch.inference_mode():
        found = MaskedLM(bert)(tokens, batch.cu_seqlens, 9, torch.zeros(1))
        logits = BertForMaskedLM.from_pretrained(bert).eval()(input_ids=torch.tensor([ids])).logits
    canonical = slice(CANONICAL_START, CANONICAL_START + 20)
    torch.testing.assert_close(found[:9, canonical], logits[0][:, columns], atol=1e-5, rtol=0)


def test_what_a_model_cannot_score_or_lacks_is_named(bert: Path) -> None:
    (batch,) = pack_all([encode("A" * 100)], 128, 128)
    with pytest.raises(ModelError, match="102 tokens"), torch.inference_mode():
        MaskedLM(bert)(batch.tokens, batch.cu_seqlens, 102, torch.zeros(1))
    (bert / "tokenizer.json").unlink(missing_ok=True)
    save_tokenizer(bert, [f"word{i}" for i in range(20)])  # and no residue
    with pytest.raises(ModelError, match="lacks"):
        MaskedLM(bert)
    for lost in ("model.safetensors", "config.json"):
        (bert / lost).unlink()
        with pytest.raises(ModelError, match=lost.removeprefix("model")):
            MaskedLM(bert)
