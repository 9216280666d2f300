"""The Hugging Face tokenizer of an exported model, with the ids of its vocabulary.

`AutoTokenizer` loads it from the folder; D2PLM itself does not use it. It reads letters as the
vocabulary does. Like ESM-2's, it adds `<cls>` and `<eos>`, and `<mask>` in a text is a token to
predict. It accepts any text: letters outside the alphabet become `<unk>`, and anything that is not
an unambiguous codon becomes `NNN`.
"""

import json
import logging
import string
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from d2plm.core.vocabulary import DNA, FIRST, SPECIAL, Bytes, Codons, Letters, Subwords, Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASK = "<mask>"
SAMPLE = f"In the beginning, 3.14 é\n\t日本 {string.printable}"  # on which tokenizers must agree

log = logging.getLogger(__name__)


def hugging_face_tokenizer(
    vocabulary: Vocabulary, max_length: int
) -> "PreTrainedTokenizerBase | None":
    """Build the tokenizer of a vocabulary; None, with a warning, if its ids cannot be changed.

    `max_length` is the number of tokens to which `truncation=True` shortens the model's input.
    """
    from transformers import PreTrainedTokenizerFast

    names = dict(zip((*range(FIRST), vocabulary.mask), (*SPECIAL, MASK), strict=True))
    if isinstance(vocabulary, Letters | Codons):
        tokenizer = _of_letters(vocabulary)
    elif isinstance(vocabulary, Bytes):
        tokenizer = _of_bytes()
    else:
        assert isinstance(vocabulary, Subwords)
        content = json.loads(vocabulary.path.read_bytes())
        taken = {token["content"] for token in content["added_tokens"]}
        taken |= {
            piece if isinstance(piece, str) else piece[0] for piece in content["model"]["vocab"]
        }
        names = {n: f"<|{name[1:-1]}|>" if name in taken else name for n, name in names.items()}
        tokenizer = _renumbered(content, vocabulary, names)
        ids = tokenizer.encode(SAMPLE, add_special_tokens=False).ids
        the_same = ids == vocabulary.encode(SAMPLE, "sample").tolist()
        if not the_same or any(tokenizer.token_to_id(name) != n for n, name in names.items()):
            log.warning("%s: cannot be renumbered; exported without tokenizer", vocabulary.path)
            return None
    cls, pad, eos, unk, mask = names.values()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {eos}", special_tokens=[(cls, 0), (eos, 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token=cls,
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        mask_token=mask,
        model_max_length=max_length,
    )


def _of_letters(vocabulary: Letters | Codons) -> Tokenizer:
    letters, width = (DNA, 3) if isinstance(vocabulary, Codons) else (vocabulary, 1)
    unknown = vocabulary.read_only if width == 3 else "<unk>"
    numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unknown))
    rules = [normalizers.Replace(Regex(r"[\s.\-]"), "")]
    if not letters.tokenise([b"A*"]).illegal[0]:  # a final stop is removed
        rules.append(normalizers.Replace(Regex(r"\*$"), ""))
    read = letters.tokenise([letter.encode() for letter in string.ascii_letters])
    for index, letter in enumerate(string.ascii_letters):
        if not read.illegal[index] and letters.tokens[read[index][0]] != letter:
            rules.append(normalizers.Replace(letter, letters.tokens[read[index][0]]))
    tokenizer.normalizer = normalizers.Sequence(rules)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("." * width), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _of_bytes() -> Tokenizer:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    shown = bytes_to_unicode()  # byte → the character that stands for it in GPT-2's tokenizer
    tokens = (*SPECIAL, *(shown[byte] for byte in range(256)), MASK)
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(numbers, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _renumbered(content: dict[str, Any], vocabulary: Subwords, names: dict[int, str]) -> Tokenizer:
    """Load a `tokenizer.json` with all ids raised by FIRST; `names`: D2PLM's tokens by id."""
    model, added = content["model"], content["added_tokens"]
    moved = {token["content"]: token["id"] + FIRST for token in added}
    if isinstance(model["vocab"], dict):
        old = {token: number + FIRST for token, number in model["vocab"].items()}
        model["vocab"] = {name: number for number, name in names.items()} | old | moved
    else:  # Unigram has [token, score], in the order of the ids
        scores = {number + FIRST: pair for number, pair in enumerate(model["vocab"])}
        never = min(score for _, score in model["vocab"]) - 100
        scores |= {number: [name, never] for name, number in moved.items() if number not in scores}
        scores |= {number: [name, never] for number, name in names.items()}
        rest = ([f"<unused {number}>", never] for number in range(vocabulary.size))
        model["vocab"] = [scores.get(number, unused) for number, unused in enumerate(rest)]
        model["unk_id"] = None if model.get("unk_id") is None else model["unk_id"] + FIRST
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [{"id": n, "content": name, "special": True, **flags} for n, name in names.items()]
    content["added_tokens"] = special + [{**one, "id": one["id"] + FIRST} for one in added]
    content |= dict.fromkeys(("post_processor", "truncation", "padding"))
    return Tokenizer.from_str(json.dumps(content))
