"""Vocabularies of any number of tokens that are nothing but numbers."""

import copy
from collections.abc import Sequence

from d2plm.core.vocabulary import FIRST, Nouns, Tokenised, Tokens, Vocabulary
from d2plm.paradigms.paradigm import Paradigm


class NumberedTokens(Vocabulary):
    """`predicted` tokens, one that is only read, and the mask."""

    name, nouns = "tokenizer", Nouns("text", "token")

    def __init__(self, predicted: int) -> None:
        self.predicted, self.size = predicted, FIRST + predicted + 2

    def tokenise(self, texts: Sequence[bytes]) -> Tokenised:
        raise NotImplementedError

    def fault(self, text: bytes) -> tuple[str, int | None]:
        raise NotImplementedError

    def decode(self, tokens: Tokens) -> str:
        raise NotImplementedError


def of(paradigm: Paradigm, vocabulary: Vocabulary) -> Paradigm:
    """A copy for another vocabulary."""
    other = copy.copy(paradigm)
    other.vocabulary = vocabulary
    return other
