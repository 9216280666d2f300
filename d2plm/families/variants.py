"""Variants of proteins: their notations, and the numbering of a table relative to its wild type.

The notations of ProteinGym, EVmutation and MaveDB (HGVS) are read. A variant that cannot be scored
is an error with a `reason`, so that the reader of a table can skip and count it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from d2plm.core.errors import ConfigError, DataError, require_number
from d2plm.core.vocabulary import CANONICAL, Tokens, decode, encode

WILD_TYPE = frozenset(
    (
        *("wt", "_wt", "wildtype", "wild-type", "wild type", "wild_type", "parent", "parental"),
        *("_sy", "p.=", "p.(=)", "="),
    )
)

# Reasons why a variant cannot be scored; the last two are mistakes in a table or its numbering.
STOP, INDEL = "with a stop", "with an insertion or deletion"
UNKNOWN, BEYOND = "with an unknown residue", "beyond the end"
UNSURE = "with an unknown consequence"
MALFORMED, DISAGREES = "not a variant", "with another wild type"
MOST_MISTAKEN = 0.05  # maximum share of mistakes among a protein's variants

MIN_POSITIONS = 3  # fewer fit another numbering by chance

# The same two changes in each notation, and its source, for docs/family.md.
NOTATIONS = (
    ("A24G:L30P", "ProteinGym"),
    ("A24G,L30P", "EVmutation"),
    ("A24G_L30P", "FLIP"),
    ("A24G-L30P", "tables of the laboratory, also with `+`, `/`, `;` or blanks"),
    ("p.[Ala24Gly;Leu30Pro]", "MaveDB (HGVS)"),
    ("NP_000240.1:p.(Ala24Gly;Leu30Pro)", "ClinVar (HGVS)"),
    ("SA24G:SL30P", "a letter for the chain before each change"),
)

_NAMES = "AlaArgAsnAspCysGlnGluGlyHisIleLeuLysMetPheProSerThrTrpTyrValAsxGlxXaaSecPylTer"
_LETTERS = dict(zip(re.findall("...", _NAMES.upper()), "ARNDCQEGHILKMFPSTWYVBZXUO*", strict=True))
_LETTERS["STOP"] = "*"
_RESIDUE = f"{'|'.join(_LETTERS)}|[A-Z*]"
_CHANGE = re.compile(rf"(?:P\.)?({_RESIDUE})(-?\d{{1,9}})({_RESIDUE}|[=-])", re.IGNORECASE)
_SEPARATORS = re.compile(r"[:;,/_+\s]+|(?<=[A-Za-z*=])-(?=[A-Za-z])")
_INDEL = re.compile(r"\d(?i:del|ins|dup|ext)|\bdel(?=[A-Za-z]*\d)|[Δ∆]|\d[A-Za-z]{0,3}fs")
_UNSURE = re.compile(r"p\.0|.*\?")  # p.?, p.Met1?, p.0?
_ARROW = re.compile(r"\s*(->|>|→)\s*")
_INSERTION_CODE = re.compile(rf"(?:{_RESIDUE})(\d+[A-Z])(?:{_RESIDUE})", re.IGNORECASE)
_LABELLED = re.compile(r"(?<![A-Za-z])([A-Z])([A-Z])(?=-?\d+[A-Z*](?![a-z]))")
# The reference sequence of HGVS: NP_000240.1:p.Ala24Gly, P02185:p.Ala24Gly.
_REFERENCE = re.compile(r"^(?:[A-Z]{2}_?\w[\w.]{2,40}|[OPQ]\d[A-Z\d]{3}\d):(?=p\.)")
_BRACKETS = str.maketrans("", "", "()[]")
_TOKENS = dict(zip(CANONICAL, encode(CANONICAL).tolist(), strict=True))
_REGION = re.compile(r".*/(\d+)-(\d+)")


class VariantError(DataError):
    """A variant that cannot be scored; `reason` is one of those above."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Substitution:
    """One change as written, `A24G`: residue `wild_type` at `position` becomes `mutant`."""

    wild_type: str
    position: int
    mutant: str

    def __str__(self) -> str:
        return f"{self.wild_type}{self.position}{self.mutant}"


@dataclass(frozen=True, slots=True)
class Variant:
    """The changes of a variant: 0-based ascending positions and their new tokens."""

    positions: tuple[int, ...] = ()
    mutants: tuple[int, ...] = ()


def parse_variant(text: str, label: Literal["", "first", "second"] = "") -> list[Substitution]:
    """The changes of a variant: `A24G`, `A24G:L30P`, `p.[Ala24Gly;Leu30Pro]`; none for `WT`.

    Changes are separated by `:`, `;`, `,`, `/`, `_`, `+`, `-` or blanks.

    Args:
        label: which of the letters before a position is no residue; see `label_of`.

    Raises:
        VariantError: if the notation is unknown, a position is repeated, or a letter is no residue.
    """
    text = text.strip()
    if text.lower() in WILD_TYPE:
        return []
    written = _ARROW.sub("", _REFERENCE.sub("", text).translate(_BRACKETS))
    if _UNSURE.fullmatch(written):
        raise VariantError(f"{text!r}: {UNSURE}, which has no score", UNSURE)
    if _INDEL.search(written):
        raise VariantError(f"{text!r} is an insertion, deletion or frameshift", INDEL)
    if label:
        written = _LABELLED.sub(r"\2" if label == "first" else r"\1", written)
    found: dict[int, Substitution] = {}
    for word in _SEPARATORS.split(written):
        match = _CHANGE.fullmatch(word)
        if match is None and (code := _INSERTION_CODE.fullmatch(word)):
            raise VariantError(
                f"{text!r} has an insertion code ({code[1]}): renumber the residues as in the "
                "sequence, 1, 2, 3, …",
                MALFORMED,
            )
        if match is None:
            raise VariantError(
                f"{text!r} is not a variant; write wild-type residue, position, mutant residue, as "
                "in A24G, several as in A24G:L30P, or WT",
                MALFORMED,
            )
        before, after = map(residue_letter, match.group(1, 3))
        after = before if after == "=" else after
        if after in "*-":
            reason = INDEL if after == "-" else STOP
            raise VariantError(f"{text!r}: {reason}, which has no score", reason)
        for letter in (before, after):
            if letter not in CANONICAL:
                raise VariantError(
                    f"{text!r} has {letter!r}, which has no probability under the model; only the "
                    f"residues {''.join(sorted(CANONICAL))} can be scored",
                    UNKNOWN,
                )
        position = int(match[2])
        if position in found:
            raise VariantError(f"{text!r} changes position {position} twice; write once", MALFORMED)
        found[position] = Substitution(before, position, after)
    return list(found.values())


def residue_letter(name: str) -> str:
    """The letter of a one- or three-letter residue name; other text in upper case."""
    name = name.strip().upper()
    return _LETTERS.get(name, name)


def label_of(texts: Iterable[str]) -> Literal["", "first", "second"]:
    """Which letter of `SA108D:SN144D` is a label: "first", "second", or "" if there is none.

    The label of a protein or chain is the letter that is the same in all texts.
    """
    found = {letters for text in texts for letters in _LABELLED.findall(text)}
    if not found:
        return ""
    return "second" if len({first for first, _ in found}) > 1 else "first"


def place(
    substitutions: Sequence[Substitution],
    wild_type: str,
    *,
    offset: int = 0,
    name: str = "the wild type",
) -> Variant:
    """The variant of `wild_type` with these substitutions; synonymous ones change nothing.

    Args:
        wild_type: its residues as letters; the first has position `offset` + 1.
        name: name of the wild type in error messages.

    Raises:
        VariantError: if a position is outside the wild type, or has another residue there.
    """
    changed: dict[int, int] = {}
    for one in substitutions:
        index = one.position - 1 - offset
        if not 0 <= index < len(wild_type):
            covered = f"{1 + offset} to {len(wild_type) + offset}"
            raise VariantError(f"{one}: {name!r} has the positions {covered}", BEYOND)
        if wild_type[index] != one.wild_type:
            at = f"{wild_type[index]} at position {one.position}"
            raise VariantError(f"{one}: {name!r} has {at}, not {one.wild_type}", DISAGREES)
        if one.mutant != one.wild_type:
            changed[index] = _TOKENS[one.mutant]
    positions = tuple(sorted(changed))
    return Variant(positions, tuple(changed[position] for position in positions))


def numbering_offset(
    variants: Iterable[Sequence[Substitution]], wild_type: Tokens, name: str
) -> int:
    """The offset at which most positions of the variants agree with the wild type.

    The offset in a name `toy/11-47` of the right length (10), or else 0, is preferred unless
    another one agrees better; it is also returned if no offset agrees with nearly all.

    Raises:
        ConfigError: if there are too few positions to decide, or several offsets agree equally.
    """
    region, preferred = _REGION.fullmatch(name), 0
    if region and int(region[2]) - int(region[1]) + 1 == len(wild_type):
        preferred = int(region[1]) - 1
    expected = {(one.position, one.wild_type) for changes in variants for one in changes}
    if not expected:
        return preferred
    positions = np.array([position for position, _ in expected])
    residues = encode("".join(letter for _, letter in expected))
    places = positions - 1 - preferred
    inside = (places >= 0) & (places < len(wild_type))
    if inside.all() and np.array_equal(wild_type[places], residues):
        return preferred
    agreeing = [
        (positions[residues == residue][:, None] - 1 - np.flatnonzero(wild_type == residue)).ravel()
        for residue in np.unique(residues)
    ]
    offsets, counts = np.unique(np.concatenate(agreeing), return_counts=True)
    of_preferred, most = int(counts[offsets == preferred].sum()), int(counts.max(initial=0))
    if of_preferred == most or most < (1 - 2 * MOST_MISTAKEN) * len(expected):
        return preferred
    best = offsets[counts == most].tolist()
    if len(best) == 1 and len({*positions.tolist()}) >= MIN_POSITIONS:
        return int(best[0])
    shown = ", ".join(map(str, best[:5])) + (", …" if len(best) > 5 else "")
    raise ConfigError(
        f"{of_preferred} of the {len(expected)} residues in the variants of {name!r} agree with it "
        f"at the offset {preferred}, {most} at {shown}, and they are too few to tell which is "
        "meant; give the position of its first residue less 1",
        {"mutation_offset": "auto"},
    )


def place_variants(
    texts: Sequence[str],
    wild_type: Tokens,
    *,
    offset: int | Literal["auto"] = "auto",
    name: str = "the wild type",
    label: Literal["", "first", "second"] | None = None,
) -> tuple[list[Variant | VariantError], int]:
    """The variants of a wild type, or the errors of those that cannot be scored, and the offset.

    Args:
        wild_type: residue tokens [L].
        offset: see `place`; "auto" uses `numbering_offset`.
        label: see `label_of`; None determines it from the texts.

    Raises:
        ConfigError: if the offset is no integer, or cannot be determined.
    """
    if not isinstance(offset, str) or offset != "auto":
        require_number("mutation_offset", offset, integer=True)
    label = label_of(texts) if label is None else label
    letters = decode(wild_type)
    parsed: list[list[Substitution] | VariantError] = []
    for text in texts:
        try:
            parsed.append(parse_variant(text, label))
        except VariantError as error:
            parsed.append(error.with_traceback(None))  # a traceback would keep the arguments alive
    if offset == "auto":
        understood = (one for one in parsed if not isinstance(one, VariantError))
        offset = numbering_offset(understood, wild_type, name)
    placed: list[Variant | VariantError] = []
    for one in parsed:
        if isinstance(one, VariantError):
            placed.append(one)
            continue
        try:
            placed.append(place(one, letters, offset=offset, name=name))
        except VariantError as error:
            placed.append(error.with_traceback(None))
    return placed, offset
