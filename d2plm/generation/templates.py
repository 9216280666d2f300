"""Templates: sequences with `_` or `<mask>` where residues are wanted."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.alphabet import MASK, UNK, encode
from d2plm.core.errors import DataError, require
from d2plm.core.vocabulary import Tokens, Vocabulary
from d2plm.generation.lengths import LengthHistogram, wanted_lengths

GAP, MASK_TOKEN = "_", "<mask>"


def parse_template(text: str, name: str, vocabulary: Vocabulary | None = None) -> NDArray[np.uint8]:
    """Template letters → uint8 tokens [L], `<mask>` where a residue is wanted.

    Raises:
        DataError: for an illegal letter, or where nothing is wanted.
    """
    letters = text.strip().replace(MASK_TOKEN, GAP)
    tokens = encode(letters)
    tokens[np.frombuffer(letters.encode("latin-1", "replace"), dtype=np.uint8) == ord(GAP)] = MASK
    if (tokens == UNK).any():
        place = int(np.flatnonzero(tokens == UNK)[0])
        raise DataError(
            f"template {name}: illegal letter {letters[place]!r} at position {place + 1}; "
            "use residues and '_' for what is wanted"
        )
    if not (tokens == MASK).any():
        raise DataError(f"template {name}: nothing to fill in; put '_' where residues are wanted")
    return tokens


def prompted(
    histogram: LengthHistogram,
    number: int,
    limit: int,
    vocabulary: Vocabulary,
    prompt: str | None = None,
    **lengths: Any,
) -> list[Tokens]:
    """Templates of masks alone, or of masks after a prompt, which counts towards the length.

    Args:
        histogram, number, limit, lengths: as of `wanted_lengths`.

    Raises:
        ConfigError: as of `wanted_lengths`, or where nothing is wanted after the prompt.
        DataError: if the prompt is not of the vocabulary.
    """
    given = np.empty(0, vocabulary.dtype)
    if prompt is not None:
        given = vocabulary.encode(prompt, "prompt")
        if lengths.get("length") is None:
            lengths["min_length"] = max(lengths.get("min_length", 1), len(given) + 1)
    templates = []
    for length in wanted_lengths(histogram, number, limit, **lengths):
        wanted = f"longer than the prompt of {len(given)} {vocabulary.nouns.token}s"
        require(length > len(given), "length", length, wanted)
        masks = np.full(length - len(given), vocabulary.mask, vocabulary.dtype)
        templates.append(np.concatenate([given, masks]))
    return templates
