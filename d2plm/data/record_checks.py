"""Checks of sequence records: annotation is left out, words and stray gaps are rejected.

Nearly every letter is a residue, so a program's message, a title, a secondary structure or DNA
would pass for a protein. Whole blocks are searched at once; only records with blanks, gaps or lower
case are examined one by one.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np

from d2plm.core.errors import DataError
from d2plm.core.terminal import first_few
from d2plm.core.vocabulary import PROTEIN, Vocabulary, has_gap
from d2plm.data.records import RawRecords, has_none

# Names of annotation lines of HH-suite and the PDB's ss.txt.
_ANNOTATION = re.compile(
    rb"(?:ss|sa|aa)_(?:pred|dssp|conf)|[Cc]onsensus|\S+_[Cc]onsensus|\w{4}:\w+:secstr"
)
_PIR = re.compile(rb"(?:P1|F1|D[LC]|R[LC]|N[13]|XX);(?!size=)(.+)", re.DOTALL)  # kind; name
_LEAST_TITLE = 10  # letters from which an upper-case word is a sequence rather than a title
_COMMENT = re.compile(rb"^[;#!].*", re.M)
_PLAIN = b"ABCDEFGHIKLMNOPQRSTUVWXYZ*\n"
_LONGEST_WORD = 20
_HEADER = re.compile(rb"[>_|=]")
_FLANKED = re.compile(rb"\s*[A-Za-z-]\.[^.\s]+\.[A-Za-z-]\s*")  # K.PEPTIDE.R, of mass spectrometry
_CODES = frozenset(
    b"ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL".split()
)
# Words in messages of failing programs, more likely than the same residues.
_WORDS = frozenset(
    b"killed done terminated aborted cancelled interrupted exit exited logout error failed eof "
    b"finished completed stopped timeout disconnected hangup connection connecting download "
    b"incomplete reset slurmstepd".split()
)
_MOST_WORDS = 4  # in an upper-case title
_DOWNLOAD = re.compile(rb"connection|reset|timed? ?out|closed|curl|wget|pipe|error|transfer", re.I)
_BLANKS, _LOWER = b" \t\r\n\v\f", b"abcdefghijklmnopqrstuvwxyz"
_UPPER = _LOWER.upper()

# An annotation line has at least this many letters; at most this fraction of them differs from the
# previous letter; it has at most this many distinct labels.
_LEAST_ANNOTATED, _CHANGES, _MOST_LABELS = 10, 0.4, 8

log = logging.getLogger(__name__)


def checked(
    blocks: Iterable[RawRecords], vocabulary: Vocabulary, path: Path
) -> Iterator[RawRecords]:
    """Check the records of an input and leave out annotation, which is reported at its end.

    Text and tokens are passed through. Raises `DataError` (when iterated) for words or a header in
    a sequence, a gap outside alignments, annotation next to sequences, or three-letter codes.
    """
    left_out: list[str] = []
    columns: tuple[int, int] | None = None  # of the first record
    for number, records in enumerate(blocks):
        if vocabulary.is_text or records.tokens is not None:
            yield records
            continue
        if vocabulary == PROTEIN:
            records = _of_sequences(records, left_out)
            if number == 0 and not records.aligned:
                _refuse_annotated(records)
                _refuse_codes(records)
        texts = records.sequences
        if number == 0:
            columns = _columns(texts[0]) if texts else None
        others = b"".join(texts).translate(None, _PLAIN)
        if any(mark in others for mark in (b";", b"#", b"!")):
            texts[:] = [_COMMENT.sub(_blanked, text) for text in texts]
            others = b"".join(texts).translate(None, _PLAIN)
        if any(mark in others for mark in (b">", b"_", b"|", b"=")):
            _refuse_header(records)
        if b" " in others or b"\t" in others or others.upper() != others:
            masked = sum(not text.isupper() for text in texts) > 1
            for index in range(len(texts)):
                _refuse_words(records, index, masked)
        if (b"." in others or b"-" in others) and not records.aligned:
            alone = number == 0 and len(texts) == 1
            _refuse_gaps(records, None if alone or records.part is not None else columns)
        yield records
    if left_out:
        shown = first_few(left_out)
        log.warning("%s: left out what is annotation and no sequence: %s", path, shown)


def _of_sequences(records: RawRecords, left_out: list[str]) -> RawRecords:
    """Remove annotation and PIR titles; titles become blanks, so that offsets stay valid."""
    names = b"\n".join(records.names)
    if b";" in names and (found := [_PIR.fullmatch(name) for name in records.names]) and any(found):
        for index, text in enumerate(records.sequences):
            title = text.partition(b"\n")[0].rstrip(b"*")
            if found[index] and title.isupper() and title.isalpha() and len(title) >= _LEAST_TITLE:
                reason = f"{_quoted(title)} stands in the place of the title"
                _refuse(records, index, 0, f"{reason}; put a title, of any words, before it")
        texts = [
            text if match is None else b" " * text.find(b"\n") + text[text.find(b"\n") :]
            for match, text in zip(found, records.sequences, strict=True)
        ]
        own = [name if m is None else m[1] for m, name in zip(found, records.names, strict=True)]
        records = replace(records, names=own, sequences=texts)
    if not any(word in names for word in (b"_pred", b"_dssp", b"_conf", b"onsensus", b":secstr")):
        return records
    kept = [i for i, name in enumerate(records.names) if not _ANNOTATION.fullmatch(name)]
    others = sorted({*range(len(records.names))} - {*kept})
    if not others or not kept:
        return records
    left_out += [records.names[i].decode("utf-8", "replace") for i in others]
    return replace(
        records,
        names=[records.names[i] for i in kept],
        sequences=[records.sequences[i] for i in kept],
        where=lambda record, offset: records.where(kept[record], offset),
    )


def _blanked(match: re.Match[bytes]) -> bytes:
    return b" " * len(match[0])


def _refuse_annotated(records: RawRecords) -> None:
    """Reject a second line or record that is as long as the first and made of long runs."""
    lines = [text.split() for text in records.sequences]
    whole = [b"".join(own) for own in lines]
    even = [i for i, own in enumerate(lines) if len(own) and len(own) % 2 == 0]
    below = [i for i in even if _is_annotation(*_halves(lines[i]))]
    beside = [i for i in range(1, len(whole)) if _is_annotation(whole[i - 1], whole[i])]
    if 2 * len(below) > len(lines) or 3 * len(beside) > len(lines):
        index = (beside or below)[0]
        line = lines[index][-1]
        _refuse(
            records,
            index,
            records.sequences[index].rindex(line),
            f"{_quoted(line)} is as long as the sequence before it and made of runs of few "
            "letters, as annotation of residues is (SignalP, DeepTMHMM, secondary structure); "
            "remove such lines",
        )


def _halves(lines: list[bytes]) -> tuple[bytes, bytes]:
    half = len(lines) // 2
    return b"".join(lines[:half]), b"".join(lines[half:])


def _is_annotation(sequence: bytes, line: bytes) -> bool:
    if not len(sequence) == len(line) >= _LEAST_ANNOTATED or len({*line}) > _MOST_LABELS:
        return False
    first, second = (sum(a != b for a, b in pairwise(x)) / len(x) for x in (sequence, line))
    return second <= _CHANGES < first


def _refuse_codes(records: RawRecords) -> None:
    for index, text in enumerate(records.sequences):
        letters = b"".join(text.split()).upper()
        codes = (letters[i : i + 3] for i in range(0, len(letters), 3))
        if len(letters) >= 9 and all(code in _CODES for code in codes):  # ends at the first other
            reason = f"{_quoted(text.strip())} is written in three-letter codes"
            _refuse(records, index, 0, f"{reason}; write one letter for each residue")


def _refuse_header(records: RawRecords) -> None:
    index = next(i for i, text in enumerate(records.sequences) if _HEADER.search(text))
    text = records.sequences[index]
    found = _HEADER.search(text)
    assert found is not None
    start, end = text.rfind(b"\n", 0, found.start()) + 1, text.find(b"\n", found.start())
    line = text[start:end] if end >= 0 else text[start:]
    reason = f"{_quoted(line.strip())} is no sequence; if it is a header, put '>' before it"
    if found[0] == b">":
        reason = "holds '>': a header begins within the line; put back the line break before it"
        if b"\0" in line:
            reason += ", and remove the NULs of MMseqs2: tr -d '\\000'"
    _refuse(records, index, found.start(), reason)


def _refuse_words(records: RawRecords, index: int, masked: bool) -> None:
    """Reject a line of words.

    With `masked`, several records have lower-case letters: soft-masked sequences may have a
    capitalised or lower-case line.
    """
    text = records.sequences[index]
    if text.isupper() and b" " not in text and b"\t" not in text:
        return
    small, offset = len(text) - len(text.translate(None, _LOWER)), 0
    written = text.split(b"\n")
    lines = [line.split() for line in written]
    widths = Counter(len(words[0]) for words in lines if len(words) > 1)
    last = max((number for number, words in enumerate(lines) if words), default=0)
    widest = max((len(words[0]) for words in lines if words), default=0)
    for number, (line, words) in enumerate(zip(written, lines, strict=True)):
        said = words[0].rstrip(b".:!?") if len(words) == 1 else b""
        # The record's only lower case is alone in its line: a capitalised or a short word.
        alone = said.isalpha() and small == len(said.translate(None, _UPPER)) > 1 and not masked
        is_name = said.islower() and number < last and len(said) < widest
        is_word = alone and (is_name or (said.istitle() and len(said) <= _LONGEST_WORD))
        in_blocks = len(words) < 2 or _are_blocks(words, widths)
        if (is_word or said.lower() in _WORDS or not in_blocks) and not has_none(text):
            shown = b" ".join(words)
            why = "remove it, or join it with the header if it belongs there"
            if _DOWNLOAD.search(shown):
                why = "the download is probably incomplete: fetch the file again"
            _refuse(records, index, offset, f"{_quoted(shown)} is no sequence; {why}")
        offset += len(line) + 1


def _are_blocks(words: list[bytes], widths: Mapping[int, int]) -> bool:
    """Whether the words of a line are equal blocks of a sequence, the last possibly shorter.

    `widths` maps the width of a first block to the record's number of lines with several blocks.
    """
    size = len(words[0])
    if {*map(len, words[:-1])} != {size} or len(words[-1]) > size:
        return False
    if size == 1 or size % 10 == 0:
        return not any(one.lower() in _WORDS for one in words)
    upper = all(map(bytes.isupper, words))
    return upper and (widths[size] > 1 or len(words) > _MOST_WORDS)


def _refuse_gaps(records: RawRecords, first: tuple[int, int] | None) -> None:
    """Reject gaps within sequences, unless all records have the columns of the first one."""
    gapped = [i for i, text in enumerate(records.sequences) if has_gap(text)]
    columns = np.array([_columns(text) for text in records.sequences])
    if not gapped:
        return
    text = records.sequences[gapped[0]]
    is_flanked = _FLANKED.fullmatch(text)
    if first is not None and not is_flanked and (columns == first).all(axis=0).any():
        return
    place = min(at for mark in (b".", b"-") if (at := text.find(mark)) >= 0)
    mark = text[place : place + 1].decode()
    reason = (
        f"holds {mark!r} within the sequence: a stop (gffread, ExPASy), a gap or an abbreviation; "
        "give sequences without it: only alignments, whose records have equally many columns, may "
        "hold gaps"
    )
    if is_flanked:
        reason = f"{_quoted(text.strip())} names the residues beside a peptide; give the peptide"
    if b"..." in text:
        place = text.index(b"...")
        reason = "holds '...', which stands for residues that were left out; give whole sequences"
    _refuse(records, gapped[0], place, reason)


def _columns(text: bytes) -> tuple[int, int]:
    """Number of letters and gaps, in total and without insertions of A2M or A3M."""
    letters = text.translate(None, _BLANKS)
    return len(letters), len(letters.translate(None, _LOWER + b"."))


def _quoted(line: bytes) -> str:
    shown = line[:60].decode("utf-8", "replace")
    return repr(shown + "…" * (len(line) > 60))


def _refuse(records: RawRecords, index: int, offset: int, reason: str) -> NoReturn:
    name = records.names[index].decode("utf-8", "replace")
    raise DataError(f"{records.where(index, offset)}: record {name!r}: {reason}")
