"""Templates: sequences with marks for tokens to generate.

`<mask>` is one token and `<mask:12>` twelve. If letters are tokens, `_` marks one letter, too (a
codon needs three); in other text `_` is a character. The text between two marks is tokenised
separately, so that no token spans a mark.
"""

import re

import numpy as np

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import GAP, PROTEIN, Codons, Letters, Tokens, Vocabulary


def parse_template(text: str, name: str, vocabulary: Vocabulary = PROTEIN) -> Tokens:
    """Parse a template into tokens [L], with `<mask>` for those to generate.

    Raises:
        DataError: if the text is not of the vocabulary, or contains no mark.
    """
    mark, pattern = "<mask>", r"<mask(?::(?P<number>[1-9]\d{0,5}))?>"
    if isinstance(vocabulary, Letters | Codons):
        mark = vocabulary.decode(np.array([vocabulary.mask]))
        if gap := re.search(r"[-.]", text):  # ignored in sequences; here a position would be lost
            raise DataError(
                f"template {name}: {gap[0]!r} at position {gap.start() + 1}; write '{mark}' for "
                f"each {vocabulary.nouns.token} to design, and remove gaps of alignments"
            )
        pattern += f"|(?P<letters>{GAP}+)"
    marks, tokens, start = list(re.finditer(pattern, text)), list[Tokens](), 0
    if not marks:
        raise DataError(
            f"template {name}: nothing to fill in; put '{mark}' where {vocabulary.nouns.token}s "
            "are wanted"
        )
    for found in marks:
        tokens.append(_tokens(text[start : found.start()], start, name, vocabulary))
        letters: str = found.groupdict().get("letters") or int(found["number"] or 1) * mark
        wanted, rest = divmod(len(letters), len(mark))
        if rest:
            raise DataError(
                f"template {name}: {len(letters)} times '{GAP}' at position {found.start() + 1}; "
                f"write '{mark}' for each {vocabulary.nouns.token} that is wanted"
            )
        tokens.append(np.full(wanted, vocabulary.mask, dtype=vocabulary.dtype))
        start = found.end()
    return np.concatenate([*tokens, _tokens(text[start:], start, name, vocabulary)])


def _tokens(text: str, start: int, name: str, vocabulary: Vocabulary) -> Tokens:
    raw = vocabulary.raw(text)
    read = vocabulary.tokenise([raw])
    if not read.illegal[0]:
        return read[0]
    what, place = vocabulary.fault(raw)
    if place is None:
        raise DataError(f"template {name}: a part {what}")
    raise DataError(
        f"template {name}: illegal letter {chr(raw[place])!r} at position {start + place + 1}; it "
        f"{what}"
    )
