"""Templates: sequences with `_` or `<mask>` where residues are wanted."""

import numpy as np
from numpy.typing import NDArray

from d2plm.core.alphabet import MASK, UNK, encode
from d2plm.core.errors import DataError

GAP, MASK_TOKEN = "_", "<mask>"


def parse_template(text: str, name: str) -> NDArray[np.uint8]:
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
