"""The 33 tokens of the ESM-2 alphabet, and encoding by one table lookup.

The twenty canonical residues are tokens 4 to 23, contiguous, so that "canonical" is a range check
and the model's 20-way distribution is a slice of its 33 logits. Residues are stored and moved as
uint8 token bytes; no tokenizer object is used in a hot path. Imports only NumPy.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import EsmTokenizer

TOKENS = (
    *("<cls>", "<pad>", "<eos>", "<unk>"),
    *"LAGVSERTIDPKQNFYMHWC",
    *"XBUZO",
    *(".", "-", "<null_1>", "<mask>"),
)
CLS, PAD, EOS, UNK, MASK = (TOKENS.index(t) for t in ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>"))
CANONICAL_START, CANONICAL_STOP = TOKENS.index("L"), TOKENS.index("C") + 1
CANONICAL = "".join(TOKENS[CANONICAL_START:CANONICAL_STOP])
NON_CANONICAL = "XBUZO"
RESIDUES = CANONICAL + NON_CANONICAL

_ENCODE = np.full(256, UNK, dtype=np.uint8)
for _letter in RESIDUES:
    _ENCODE[ord(_letter)] = _ENCODE[ord(_letter.lower())] = TOKENS.index(_letter)
_DECODE = np.frombuffer(
    "".join(t if len(t) == 1 else "?" for t in TOKENS).encode(), dtype=np.uint8
).copy()
_DECODE[MASK] = ord("_")


def encode(sequence: str | bytes) -> NDArray[np.uint8]:
    """Residue letters (either case) → uint8 tokens [L]; other letters become `<unk>`.

    `<cls>` and `<eos>` are not added: they belong to the batch, not to the stored sequence.
    """
    raw = sequence.encode("latin-1", "replace") if isinstance(sequence, str) else sequence
    return _ENCODE[np.frombuffer(raw, dtype=np.uint8)]


def decode(tokens: NDArray[np.uint8]) -> str:
    """uint8 tokens [L] → letters, without special tokens; `<mask>` becomes `_`."""
    kept = tokens[(tokens >= CANONICAL_START) & (tokens != TOKENS.index("<null_1>"))]
    return _DECODE[kept].tobytes().decode()


def is_canonical(tokens: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """True where a token is one of the twenty canonical residues."""
    return (tokens >= CANONICAL_START) & (tokens < CANONICAL_STOP)


def tokenizer(folder: Path) -> "EsmTokenizer":
    """The Hugging Face tokenizer with this alphabet; writes its `vocab.txt` into `folder`."""
    from transformers import EsmTokenizer

    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(TOKENS) + "\n")
    return EsmTokenizer(str(vocabulary), model_max_length=int(1e9))
