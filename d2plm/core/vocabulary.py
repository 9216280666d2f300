"""Vocabularies: the tokens, which of them may be corrupted and predicted, and text ↔ tokens.

Every vocabulary has the same layout: `<cls> <pad> <eos> <unk>` are 0 to 3, the K predicted tokens
follow from 4 on without a gap, then read-only tokens (ambiguity codes), and `<mask>` is the last.
So "may be predicted" is a range check, the model's K-way distribution is a slice of its V logits,
and beyond this module a vocabulary is two numbers, K and V. ESM-2's 33 tokens, the default, have
this layout. Whole blocks of records are tokenised at once, with no Python object per token.
"""

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, ModelError, require, require_choice
from d2plm.core.files import nearest_path, read_json

CLS, PAD, EOS, UNK, FIRST = 0, 1, 2, 3, 4
SPECIAL = ("<cls>", "<pad>", "<eos>", "<unk>")
TOKENIZER_FILE = "tokenizer.json"  # in the folder of a Hugging Face tokenizer
FILE, SAVED_TOKENIZER = "vocabulary.json", "text_tokenizer.json"  # in stores and exported models
NAMES = ("protein", "dna", "rna", "codon", "bytes", "tokenizer")
GAP = "_"  # `<mask>` in templates and decoded text

CANONICAL = "LAGVSERTIDPKQNFYMHWC"  # in ESM-2's order
NON_CANONICAL = "XBUZO"
RESIDUES = CANONICAL + NON_CANONICAL
AMBIGUOUS_BASES = "NRYSWKMBDHV"  # IUPAC's codes
_BLANKS_AND_GAPS = b" \t\r\n\v\f-."
_SEPARATOR, _STOP, _ILLEGAL = 0, 0xFE, 0xFF  # distinct from the tokens of letters

_MOST_TOKENS = 1 << 24  # a hundred times the largest known tokenizer
_BATCH_LETTERS = 1 << 20  # tokenised at once: `tokenizers` takes about 100 bytes per token

Tokens = NDArray[Any]  # of a vocabulary's dtype, [L]


@dataclass(frozen=True, slots=True)
class Tokenised:
    """The tokens of n texts, in one array.

    Attributes:
        tokens: [M], in the vocabulary's dtype; there may be other values between the sequences.
        starts, lengths: int64 [n], start in `tokens` and number of tokens of each sequence.
        illegal: bool [n], true for a text outside the vocabulary, whose tokens are meaningless.
    """

    tokens: Tokens
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    illegal: NDArray[np.bool_]

    def __getitem__(self, index: int) -> Tokens:
        start = int(self.starts[index])
        return self.tokens[start : start + int(self.lengths[index])]


class Nouns(NamedTuple):
    """Names of a vocabulary's sequences and tokens; plurals add an s."""

    sequence: str
    token: str


class Vocabulary(ABC):
    """A vocabulary of V tokens.

    Attributes:
        name: one of NAMES.
        nouns: for messages and reports.
        predicted: K, the number of tokens that may be corrupted and predicted, from FIRST on.
        size: V.
        read_only: letters that are read but never predicted.
        is_text: whether it encodes any text, instead of letters of a sequence.
    """

    name: str
    nouns: Nouns
    predicted: int
    size: int
    read_only: str = ""
    is_text: bool = False

    @property
    def mask(self) -> int:
        """The token `<mask>`, V − 1."""
        return self.size - 1

    @property
    def stop(self) -> int:
        """End of the range of predicted tokens, FIRST + K."""
        return FIRST + self.predicted

    @property
    def read_stop(self) -> int:
        """End of the range of tokens in texts, predicted and read-only ones."""
        return self.mask

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integer type that holds every token: uint8, uint16 or uint32."""
        return np.min_scalar_type(self.size - 1)

    def is_predicted(self, tokens: Tokens) -> NDArray[np.bool_]:
        return (tokens >= FIRST) & (tokens < self.stop)

    @abstractmethod
    def tokenise(self, texts: Sequence[bytes]) -> Tokenised:
        """Tokenise n texts without `<cls>` and `<eos>`, cleaned as the vocabulary requires."""

    @abstractmethod
    def fault(self, text: bytes) -> tuple[str, int | None]:
        """What is wrong with a text that `tokenise` marks illegal, and at which byte."""

    @abstractmethod
    def decode(self, tokens: Tokens) -> str:
        """Tokens → text, without special tokens; `<mask>` becomes `_`."""

    def encode(self, text: str, where: str, aligned: bool = False) -> Tokens:
        """The tokens [L] of one text; an `aligned` row of an alignment may have gaps.

        Raises `DataError`, naming the place `where`, if the text is no string, is empty, or is not
        in this vocabulary.
        """
        if not isinstance(text, str):
            raise DataError(f"{where}: {type(text).__name__} is not a string")
        raw = self.raw(text)
        found = self.tokenise([raw])
        if found.illegal[0]:
            fault, place = self.fault(raw)
            if place is not None:  # then one byte of `raw` is one letter of the text
                fault = fault.replace(repr(chr(raw[place])), repr(text[place]), 1)
            raise DataError(f"{where}: the sequence {fault}")
        if not found.lengths[0]:
            raise DataError(f"{where}: the sequence is empty")
        if not aligned and not self.is_text and has_gap(raw):
            raise DataError(
                f"{where}: the sequence holds a gap or an abbreviation ('-' or '.'); give it whole"
            )
        return found[0].copy()

    def restore(self, tokens: Tokens) -> str:
        """A text that `raw` and `tokenise` turn into these tokens.

        This holds for the tokens of a whole text, and for any tokens of letters and bytes.
        """
        return self.decode(tokens)

    def raw(self, text: str) -> bytes:
        """The bytes of a text in a file."""
        try:
            return text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return text.encode("utf-8", "replace")

    def encoded(self, tokens: Tokens) -> bytes:
        """The decoded text as bytes: the bytes themselves for `Bytes`, otherwise UTF-8."""
        return self.decode(tokens).encode()

    def byte_count(self, tokens: Tokens) -> int:
        """Length of `encoded`, the denominator of bits per byte."""
        return len(self.encoded(tokens))

    def describe(self) -> Any:
        """JSON from which `vocabulary_of` builds it."""
        return {"alphabet": self.name}

    def save(self, folder: Path) -> None:
        """Write the files that `open_vocabulary` needs in a folder: none for proteins."""
        if self.name != "protein":
            (folder / FILE).write_text(json.dumps(self.describe()) + "\n")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.describe() == other.describe()

    def __hash__(self) -> int:
        return hash((self.name, self.size))


class Letters(Vocabulary):
    """One token per letter, of either case; blanks and gaps are removed.

    Args:
        predicted, read_only: the letters.
        more: tokens after them that no text contains.
        synonyms: letters that are read as another one.
        final_stop: whether one `*` at the end of a text is removed.
    """

    def __init__(
        self,
        name: str,
        nouns: Nouns,
        predicted: str,
        read_only: str,
        *,
        more: Sequence[str] = (),
        synonyms: Mapping[str, str] | None = None,
        final_stop: bool = False,
    ) -> None:
        self.name, self.nouns, self.read_only = name, nouns, read_only
        self.tokens = (*SPECIAL, *predicted, *read_only, *more, "<mask>")
        self.predicted, self.size = len(predicted), len(self.tokens)
        self.letters = predicted + read_only
        table = np.full(256, _ILLEGAL, dtype=np.uint8)
        for number, letter in enumerate(self.letters, start=FIRST):
            table[[ord(letter), ord(letter.lower())]] = number
        for other, letter in (synonyms or {}).items():
            table[[ord(other), ord(other.lower())]] = table[ord(letter)]
        if final_stop:
            table[ord("*")] = _STOP
        table[_SEPARATOR] = _SEPARATOR
        self._table = table.tobytes()
        shown = "".join(token if len(token) == 1 else "?" for token in self.tokens)
        self._shown = np.frombuffer(shown.encode(), dtype=np.uint8).copy()
        self._shown[self.mask] = ord(GAP)
        self._is_shown = np.array([len(t) == 1 or t == "<mask>" for t in self.tokens])

    @property
    def read_stop(self) -> int:
        return FIRST + len(self.letters)

    def tokenise(self, texts: Sequence[bytes]) -> Tokenised:
        text = b"\0".join([*texts, b""])
        if text.count(b"\0") != len(texts):
            text = b"\0".join([*(one.replace(b"\0", b"?") for one in texts), b""])
        tokens = np.frombuffer(text.translate(self._table, _BLANKS_AND_GAPS), dtype=np.uint8)
        ends = np.flatnonzero(tokens == _SEPARATOR)
        starts = np.zeros_like(ends)
        starts[1:] = ends[:-1] + 1
        lengths = ends - starts
        # Index ends - 1 of an empty sequence is a separator; for the first text it is the last one.
        lengths -= tokens[ends - 1] == _STOP
        illegal = np.zeros(len(texts), dtype=np.bool_)
        wrong = np.flatnonzero(tokens >= _STOP)
        owner = np.searchsorted(ends, wrong)
        illegal[owner[wrong < (starts + lengths)[owner]]] = True
        return Tokenised(tokens, starts, lengths, illegal)

    def fault(self, text: bytes) -> tuple[str, int | None]:
        legal = bytes(byte for byte in range(1, 256) if self._table[byte] < _STOP)
        stop = b"*" if self._table[ord("*")] == _STOP else b""
        letters = text.translate(None, _BLANKS_AND_GAPS).removesuffix(stop)
        place = text.index(letters.translate(None, legal)[:1])
        letter = text[place : place + 1].decode("latin-1")
        for size in (2, 3, 4):  # of a character in UTF-8
            with suppress(UnicodeDecodeError):
                letter = text[place : place + size].decode()[:1] if letter > "\x7f" else letter
                break
        unknown = {"protein": "X"}.get(self.name, "N")
        remedies = (
            (":/", "give each chain of a complex a record of its own"),
            ("0123456789", "remove the numbers"),
            ("~", "remove the gaps"),
        )
        remedy = f"write {unknown} for an unknown {self.nouns.token}"
        remedy = next((said for letters_, said in remedies if letter in letters_), remedy)
        return f"holds {letter!r}, which is not a {self.nouns.token} letter; {remedy}", place

    def decode(self, tokens: Tokens) -> str:
        return self._shown[tokens[self._is_shown[tokens]]].tobytes().decode()

    def raw(self, text: str) -> bytes:
        return text.encode("latin-1", "replace")  # one byte per letter, legal or not

    def byte_count(self, tokens: Tokens) -> int:
        return len(tokens)

    def describe(self) -> Any:
        return list(self.tokens) if self.name == "protein" else super().describe()


PROTEIN = Letters(
    "protein",
    Nouns("protein", "residue"),
    CANONICAL,
    NON_CANONICAL,
    more=(".", "-", "<null_1>"),
    final_stop=True,
)
DNA = Letters("dna", Nouns("sequence", "base"), "ACGT", AMBIGUOUS_BASES, synonyms={"U": "T"})
RNA = Letters("rna", Nouns("sequence", "base"), "ACGU", AMBIGUOUS_BASES, synonyms={"T": "U"})

ESM2_TOKENS, MASK = PROTEIN.tokens, PROTEIN.mask  # these constants apply to `PROTEIN` only
CANONICAL_START, CANONICAL_STOP = FIRST, PROTEIN.stop
decode, is_canonical = PROTEIN.decode, PROTEIN.is_predicted

_ENCODE = np.full(256, UNK, dtype=np.uint8)
for _token, _letter in enumerate(RESIDUES, start=FIRST):
    _ENCODE[[ord(_letter), ord(_letter.lower())]] = _token


def has_gap(text: bytes) -> bool:
    """Whether there is a gap between letters; a final `.` may be a stop."""
    if b"-" not in text and b"." not in text:
        return False
    letters = text.translate(None, _BLANKS_AND_GAPS[:-2]).removesuffix(b"*").removesuffix(b".")
    return bool(letters.strip(b"-.")) and (b"-" in letters or b"." in letters)


def encode(sequence: str | bytes) -> NDArray[np.uint8]:
    """Residue letters (either case) → uint8 tokens [L]; other letters become `<unk>`.

    `<cls>` and `<eos>` are not added: they belong to the batch, not to the stored sequence.
    """
    raw = sequence.encode("latin-1", "replace") if isinstance(sequence, str) else sequence
    return _ENCODE[np.frombuffer(raw, dtype=np.uint8)]


class Codons(Vocabulary):
    """One token per codon of a coding sequence; a codon with an ambiguous base is read as NNN."""

    name, nouns, predicted, size = "codon", Nouns("gene", "codon"), 64, FIRST + 64 + 2
    read_only = "NNN"
    tokens = (*SPECIAL, *map("".join, product("ACGT", repeat=3)), "NNN", "<mask>")

    def tokenise(self, texts: Sequence[bytes]) -> Tokenised:
        bases = DNA.tokenise(texts)
        illegal = bases.illegal | (bases.lengths % 3 != 0)
        lengths = np.where(illegal, 0, bases.lengths // 3)
        ends = np.cumsum(lengths)
        first = np.repeat(bases.starts - 3 * (ends - lengths), lengths) + 3 * np.arange(
            lengths.sum()
        )
        digits = bases.tokens[first[:, None] + np.arange(3)].astype(np.int64) - FIRST
        tokens = FIRST + digits @ [16, 4, 1]
        tokens[(digits >= 4).any(axis=1)] = self.tokens.index("NNN")
        return Tokenised(tokens.astype(np.uint8), ends - lengths, lengths, illegal)

    def fault(self, text: bytes) -> tuple[str, int | None]:
        bases = DNA.tokenise([text])
        if bases.illegal[0]:
            return DNA.fault(text)
        count = bases.lengths[0]
        return f"has {count} bases, not whole codons; give coding sequences from their start", None

    def decode(self, tokens: Tokens) -> str:
        kept = tokens[tokens >= FIRST].tolist()
        return "".join(3 * GAP if token == self.mask else self.tokens[token] for token in kept)

    def raw(self, text: str) -> bytes:
        return DNA.raw(text)

    def byte_count(self, tokens: Tokens) -> int:
        return 3 * len(tokens)


class Bytes(Vocabulary):
    """One token per byte: any text or file, without a tokenizer."""

    name, nouns, predicted, size = "bytes", Nouns("text", "byte"), 256, FIRST + 256 + 1
    is_text = True

    def tokenise(self, texts: Sequence[bytes]) -> Tokenised:
        tokens = np.frombuffer(b"".join(texts), dtype=np.uint8).astype(self.dtype)
        tokens += self.dtype.type(FIRST)
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        illegal = np.zeros(len(texts), dtype=np.bool_)
        return Tokenised(tokens, np.cumsum(lengths) - lengths, lengths, illegal)

    def fault(self, text: bytes) -> tuple[str, int | None]:
        raise AssertionError("every byte is legal")

    def decode(self, tokens: Tokens) -> str:
        return self.encoded(tokens).decode("utf-8", "replace")

    def encoded(self, tokens: Tokens) -> bytes:
        kept = tokens[tokens >= FIRST]
        shown = np.where(kept == self.mask, ord(GAP), kept.astype(np.int64) - FIRST)
        return shown.astype(np.uint8).tobytes()

    def restore(self, tokens: Tokens) -> str:
        return (tokens - FIRST).astype(np.uint8).tobytes().decode("utf-8", "surrogateescape")

    def byte_count(self, tokens: Tokens) -> int:
        return len(tokens)


class Subwords(Vocabulary):
    """The tokens of a Hugging Face tokenizer, with ids shifted by FIRST.

    Its special tokens are ordinary tokens that no text contains. `path` is a `tokenizer.json` or
    its folder; `DataError` if it does not exist or cannot be read.
    """

    name, nouns = "tokenizer", Nouns("text", "token")
    is_text = True

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self.path = path / TOKENIZER_FILE if path.is_dir() else path
        try:
            content = self.path.read_bytes()
            self._tokenizer = Tokenizer.from_buffer(content)
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot be read ({error.strerror}){nearest_path(self.path)}; give "
                "the tokenizer.json of a Hugging Face tokenizer, or its folder"
            ) from None
        except Exception as error:  # tokenizers raises nothing more special
            raise DataError(
                f"{self.path}: not a tokenizer.json ({error}); save the tokenizer again"
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.digest = hashlib.sha256(content).hexdigest()
        numbers = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.predicted = max(numbers, default=-1) + 1
        if not 0 < self.predicted <= _MOST_TOKENS:
            raise DataError(
                f"{self.path}: numbers {len(numbers):,} tokens up to {self.predicted - 1:,}, and a "
                f"vocabulary has 1 to {_MOST_TOKENS:,}; give another tokenizer"
            )
        self.size = FIRST + self.predicted + 1

    def tokenise(self, texts: Sequence[bytes]) -> Tokenised:
        illegal = np.zeros(len(texts), dtype=np.bool_)
        read: list[str] = []
        for index, text in enumerate(texts):
            try:
                read.append(text.decode())
            except UnicodeDecodeError:
                illegal[index] = True
                read.append("")
        numbers: list[Tokens] = []
        ends = np.cumsum([len(text) for text in read]) // _BATCH_LETTERS
        for batch in np.split(np.arange(len(read)), np.flatnonzero(np.diff(ends)) + 1):
            some = [read[index] for index in batch]
            try:
                found = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # no token for unknown text; Rust's PanicException
                raise DataError(
                    f"{self.path}: cannot tokenise a text ({error}); give another tokenizer"
                ) from None
            numbers += [np.array(one.ids, dtype=self.dtype) for one in found]
        lengths = np.array([len(one) for one in numbers], dtype=np.int64)
        tokens = np.concatenate([np.empty(0, dtype=self.dtype), *numbers])
        tokens += np.array(FIRST, dtype=self.dtype)
        return Tokenised(tokens, np.cumsum(lengths) - lengths, lengths, illegal)

    def fault(self, text: bytes) -> tuple[str, int | None]:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            wrong = text[error.start : error.start + 1]
            return f"is not UTF-8 (byte {wrong!r}); convert it", error.start
        raise AssertionError("every text is legal")

    def decode(self, tokens: Tokens) -> str:
        parts, kept = [], tokens[tokens >= FIRST].astype(np.int64)
        places = [-1, *np.flatnonzero(kept == self.mask).tolist(), len(kept)]
        for start, end in pairwise(places):
            ids = (kept[start + 1 : end] - FIRST).tolist()
            parts.append(self._tokenizer.decode(ids, skip_special_tokens=False))
        return GAP.join(parts)

    def describe(self) -> Any:
        return {**super().describe(), "sha256": self.digest}

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.path.resolve() != (folder / SAVED_TOKENIZER).resolve():
            shutil.copyfile(self.path, folder / SAVED_TOKENIZER)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path,)  # reads the tokenizer anew


def vocabulary(name: str, *, tokenizer: Path | None = None) -> Vocabulary:
    """The vocabulary called `name`; `tokenizer` is the file or folder of a Hugging Face tokenizer.

    Raises:
        ConfigError: a setting is impossible.
        DataError: the tokenizer cannot be read.
    """
    require_choice("alphabet", name, NAMES)
    if name == "tokenizer":
        wanted = "the tokenizer.json of a Hugging Face tokenizer, or its folder"
        require(tokenizer is not None, "tokenizer", tokenizer, wanted)
        assert tokenizer is not None
        return Subwords(Path(tokenizer))
    require(tokenizer is None, "tokenizer", str(tokenizer), "null unless alphabet=tokenizer")
    known = {"protein": PROTEIN, "dna": DNA, "rna": RNA, "codon": Codons(), "bytes": Bytes()}
    return known[name]


def vocabulary_of(description: Any, folder: Path) -> Vocabulary:
    """The vocabulary that `describe` described; `folder` holds its files.

    Raises `ModelError` if the description is invalid, or does not match the files in the folder.
    """
    if description == PROTEIN.describe():
        return PROTEIN
    try:
        settings = dict(description)
        digest = settings.pop("sha256", None)
        path = folder / SAVED_TOKENIZER if digest else None
        found = vocabulary(settings.pop("alphabet"), tokenizer=path, **settings)
    except Exception as error:
        raise ModelError(f"{folder}: its vocabulary cannot be read ({error})") from None
    if found.describe() != description:
        raise ModelError(f"{folder / SAVED_TOKENIZER}: is another tokenizer than was saved there")
    return found


def open_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary saved in a folder; `PROTEIN` if there is none.

    Raises `DataError` if its file is damaged, and errors of `vocabulary_of`.
    """
    description = read_json(folder / FILE)
    return PROTEIN if description is None else vocabulary_of(description, folder)
