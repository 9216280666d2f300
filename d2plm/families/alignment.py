"""The alignment of a family: its HMM, the members' letters by column, their weights and profile.

There is one alignment per set of relatives, made without any target: the one in their file, or
HMMER's alignment of the members. Letters are int8: 0 … 19 in the order of `CANONICAL`, GAP for all
else.

Shape suffixes: N members, L columns, 20 letters.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pyhmmer.easel import AA, Alphabet, DigitalSequenceBlock, TextMSA, TextSequence, VectorD
from pyhmmer.plan7 import HMM, Background, Builder, TraceAligner, Traces

from d2plm.core.machine import usable_cores
from d2plm.core.vocabulary import CANONICAL, CANONICAL_START, PAD, Tokens, decode
from d2plm.data.relatives import aligned_part

GAP = len(CANONICAL)
SAME_OBSERVATION = 0.8  # identity from which members share one weight (doi:10.1038/nbt.3769)
COVERAGE = 0.5  # minimum share of the protein that a member fills
CONSENSUS = 0.5  # minimum weighted share of members with a letter in a column, HMMER's default
UNCALIBRATED = 10  # simulated sequences if no E-value is needed; the default takes most of the time
_BLOCK = 500  # number of members compared or aligned at once

Letters = NDArray[np.int8]
Floats = NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")

ALPHABET: AA = Alphabet.amino()
SYMBOLS = np.frombuffer(f"{CANONICAL}-".encode(), dtype=np.uint8)
_CODES = np.full(256, GAP, dtype=np.int8)
_CODES[SYMBOLS] = np.arange(GAP + 1)  # lower case (inserted) counts as a gap
_INSERTED = bytes(range(ord("a"), ord("z") + 1)) + b"."


def letters_of(tokens: Tokens) -> Letters:
    """int8 letters of residue tokens, of the same shape."""
    codes = tokens.astype(np.int16) - CANONICAL_START
    return np.where((codes >= 0) & (codes < GAP), codes, GAP).astype(np.int8)


def text_of(letters: Letters) -> str:
    """A row of letters as text, `-` for a gap."""
    return bytes(SYMBOLS[letters]).decode()


def family_hmm(
    members: Sequence[Tokens],
    columns: NDArray[np.uint8] | None = None,
    *,
    effective_number: str = "clust",
    simulated: int = UNCALIBRATED,
) -> HMM:
    """The profile HMM of a family; the order of the members does not matter.

    Built from the columns of the file's alignment, if any, that a share CONSENSUS of the members
    fill. Otherwise all members are aligned to the single-sequence HMM of the member of median
    length, an HMM is built from the alignment, and both steps are repeated with it. One member has
    its single-sequence HMM.

    Args:
        members: at least one, uint8 residue tokens; long ones are cut, see `aligned_part`.
        columns: alignment of the members, see `Family.columns`.
        effective_number: HMMER's method: `clust` counts clusters at 62 % identity and gives the
            best likelihood; `entropy`, the default for searches, flattens the HMM.
        simulated: number of sequences for the calibration of E-values; HMMER's default is 200.
    """
    if columns is not None and len(columns) > 1:
        aligned = letters_of(columns)
        weights = sequence_weights(aligned)
        filled = weights @ (aligned < GAP) >= CONSENSUS * weights.sum()
        if filled.any():
            return columns_hmm(aligned[:, filled], weights, effective_number, simulated)
    background = Background(ALPHABET)
    first = hmm_builder(effective_number="clust")
    last = hmm_builder(simulated, effective_number=effective_number)
    ordered = sorted(members, key=lambda one: (len(one), one.tobytes()))
    if len(ordered) > 1:  # HMMER's memory is quadratic in the columns of an alignment
        ordered = [aligned_part(one, ordered[len(ordered) // 2]) for one in ordered]
    block = digital_block(ordered)
    if len(block) == 1:
        return last.build(block[0], background)[0]
    hmm, _, _ = first.build(block[len(block) // 2], background)
    for builder in (first, last):
        hmm, _, _ = builder.build_msa(_aligned(hmm, block).digitize(ALPHABET), background)
    return hmm


def columns_hmm(
    aligned: Letters,
    weights: NDArray[np.float64],
    effective_number: str | float,
    simulated: int = UNCALIBRATED,
) -> HMM:
    """The profile HMM of an alignment, each column a match state.

    Args:
        aligned: int8 [N, L].
        weights: float64 [N], see `sequence_weights`.
        effective_number: see `family_hmm`; or a number of observations.
    """
    named = [TextSequence(name=str(i).encode(), sequence=text_of(x)) for i, x in enumerate(aligned)]
    text = TextMSA(name=b"family", sequences=named)
    text.reference = "x" * aligned.shape[1]  # match states for architecture="hand"
    alignment = text.digitize(ALPHABET)
    alignment.sequence_weights = VectorD(weights * len(weights) / weights.sum())
    settings = {"architecture": "hand", "weighting": "given", "effective_number": effective_number}
    return hmm_builder(simulated, **settings).build_msa(alignment, Background(ALPHABET))[0]


def in_threads(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Map in threads, in order; HMMER releases the GIL."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        yield from pool.map(function, items)


def aligned_columns(hmm: HMM, proteins: Sequence[Tokens]) -> Letters:
    """int8 [N, L]: the letter of each protein in each column of the HMM, without insertions."""
    text = "".join(aligned_rows(hmm, proteins)).encode().translate(None, _INSERTED)
    return _CODES[np.frombuffer(text, dtype=np.uint8)].reshape(len(proteins), hmm.M)


def aligned_rows(hmm: HMM, proteins: Sequence[Tokens]) -> list[str]:
    """Each protein aligned to the HMM; lower-case letters and `.` are between its columns."""
    return list(_aligned(hmm, digital_block(proteins)).alignment) if len(proteins) else []


def _aligned(hmm: HMM, block: "DigitalSequenceBlock[AA]") -> TextMSA:
    """The sequences aligned to each other through the HMM, with all its columns."""
    part = max(1, -(-len(block) // usable_cores()))
    parts = [block[start : start + part] for start in range(0, len(block), part)]
    each = in_threads(lambda own: TraceAligner().compute_traces(hmm, own), parts)
    traces = Traces(trace for own in each for trace in own)
    alignment = TraceAligner().align_traces(
        hmm, block, traces, digitize=False, all_consensus_cols=True
    )
    alignment.name = b"family"
    return alignment


def align_to(
    protein: Tokens,
    members: Sequence[Tokens],
    columns: NDArray[np.uint8] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Letters:
    """int8 [N, L]: the members aligned to the residues of a protein.

    With columns from a file, a protein that is one of the members uses its own row; another one is
    aligned with all members to the HMM of the file. Without, members are aligned to the HMM of the
    protein alone, which loses less than an HMM of the members (docs/science.md).

    Args:
        columns: alignment of the members, see `Family.columns`.
        note: called with a progress message.
    """
    if columns is not None:
        for row in columns:
            own = np.flatnonzero(row != PAD)
            if np.array_equal(row[own], protein):  # none of its residues is an insertion
                return letters_of(columns[:, own])
    hmm, parts = family_hmm([protein] if columns is None else members, columns), list[Letters]()
    for start in range(0, max(len(members), 1), _BLOCK):
        note(f"aligning {start:,} of {len(members):,} relatives")
        block = [aligned_part(one, protein) for one in members[start : start + _BLOCK]]
        rows = _aligned(hmm, digital_block([protein, *block])).alignment
        text = np.frombuffer("".join(rows).encode(), dtype=np.uint8).reshape(len(rows), -1)
        parts.append(_CODES[text[1:, ~np.isin(text[0], [*b"-."])]])
    return np.concatenate(parts)


def observations(protein: Letters, aligned: Letters) -> Letters:
    """The distinct rows of `align_to` that fill COVERAGE of the protein and differ from it."""
    filled = aligned < GAP
    kept = (filled.mean(1) >= COVERAGE) & (filled & (aligned != protein)).any(1)
    return np.unique(aligned[kept], axis=0)


def one_hot(letters: Letters) -> Floats:
    """float32 [N, L * 20] of int8 [N, L]; a gap is all zeros."""
    return (letters[..., None] == np.arange(GAP)).reshape(len(letters), -1).astype(np.float32)


def sequence_weights(aligned: Letters) -> NDArray[np.float64]:
    """float64 [N]: 1 / number of members at least SAME_OBSERVATION identical, itself included.

    Identity is over the columns that the member fills; the sum is the effective number of members.
    """
    wanted, counts = SAME_OBSERVATION * (aligned < GAP).sum(1), np.zeros(len(aligned))
    blocks = range(0, len(aligned), _BLOCK)
    for a in blocks:
        first, own = one_hot(aligned[a : a + _BLOCK]), slice(a, a + _BLOCK)
        for b in blocks[blocks.index(a) :]:
            same, other = first @ one_hot(aligned[b : b + _BLOCK]).T, slice(b, b + _BLOCK)
            counts[own] += (same >= wanted[own, None]).sum(1)
            if b > a:
                counts[other] += (same >= wanted[None, other]).sum(0)
    return 1 / np.maximum(counts, 1)


def column_profile(aligned: Letters, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [L, 20]: the probability of each residue in each column.

    HMMER's match emissions with every column a match state: the weighted counts, as many
    observations as the weights sum to, and HMMER's mixture of Dirichlet priors (Sjölander et al.,
    doi:10.1093/bioinformatics/12.4.327).

    Args:
        aligned: int8 [N, L].
        weights: float64 [N], see `sequence_weights`.
    """
    return match_emissions(columns_hmm(aligned, weights, float(weights.sum())))


def match_emissions(hmm: HMM) -> NDArray[np.float64]:
    """float64 [L, 20]: the probability of each residue in each column of an HMM."""
    emissions = hmm.match_emissions  # type: ignore[attr-defined]  # its stubs lack it
    emissions_L20 = np.array(emissions, dtype=np.float64)[1:]  # the first state is the begin state
    emissions_L20 = emissions_L20[:, [ALPHABET.symbols.index(letter) for letter in CANONICAL]]
    return emissions_L20 / emissions_L20.sum(1, keepdims=True)


def hmm_builder(simulated: int = UNCALIBRATED, **settings: Any) -> "Builder[AA]":
    # With the default fragthresh, members shorter than half of the alignment count as fragments.
    settings = {"EmN": simulated, "EvN": simulated, "EfN": simulated, "fragthresh": 0.0, **settings}
    return Builder(ALPHABET, **settings)


def digital_block(sequences: Sequence[Tokens]) -> "DigitalSequenceBlock[AA]":
    """The sequences for HMMER, named by index, with X for tokens that are no canonical residue."""
    texts = ("".join(x if x in CANONICAL else "X" for x in decode(one)) for one in sequences)
    named = (TextSequence(name=str(i).encode(), sequence=text) for i, text in enumerate(texts))
    return DigitalSequenceBlock(ALPHABET, [one.digitize(ALPHABET) for one in named])
