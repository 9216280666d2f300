"""Scores of single proteins: the bound draw by draw, pseudo-log-likelihood, mutational effects.

Forward rows are created lazily and packed under the token budget, so memory is bounded by a batch
and not by the rows of a protein. Sequences are not cut and batches not padded; the varying shapes
are a disadvantage only for a compiled model.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit

from d2plm.core.batch import PackedBatch, Relatives, segment_sum, under_budget
from d2plm.core.errors import ModelError, require_number
from d2plm.core.estimate import Estimate
from d2plm.core.noise import Key
from d2plm.core.vocabulary import FIRST, PROTEIN, Tokens, Vocabulary
from d2plm.data.family import Family
from d2plm.data.loader import framed
from d2plm.evaluation.likelihood import CONFIDENCE
from d2plm.families.variants import Variant
from d2plm.paradigms.masked import MaskedParadigm
from d2plm.paradigms.paradigm import Denoiser, Paradigm

BITS_PER_BYTE = "bits_per_byte"  # column for texts
RELATIVES_DRAWS = 4  # number of draws of relatives averaged per mutational effect

Device = torch.device | str


@dataclass(frozen=True, slots=True)
class ProteinScore:
    """The bound of one protein.

    Attributes:
        residues: number of residues scored, those that may be predicted.
        nats: estimated upper bound of −log p(sequence | its length).
        nats_low, nats_high: 95 % interval (see `bound_interval`); NaN for one draw.
        perplexity: exp(nats / residues); NaN without residues.
    """

    residues: int
    nats: float
    nats_low: float
    nats_high: float
    perplexity: float

    @property
    def interval(self) -> tuple[float, float]:
        return self.nats_low, self.nats_high

    @property
    def per_residue(self) -> Estimate | None:
        """The bound with its interval, nats per residue; None without residues."""
        if not self.residues:
            return None
        low, high = (end / self.residues for end in self.interval)
        return Estimate(self.nats / self.residues, (low, high))


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """One forward row: residue tokens [L] of sequence `index`, with ascending positions to mask."""

    index: int
    tokens: Tokens
    masked: tuple[int, ...] = ()
    relatives: Sequence[Tokens] | None = None


def bound_draws(
    model: Denoiser,
    paradigm: Paradigm,
    sequences: Sequence[Tokens],
    *,
    masks_per_sequence: int = 16,
    seed: int = 0,
    ids: Sequence[int] | None = None,
    families: Sequence[Family] | None = None,
    token_budget: int = 16384,
    device: Device = "cpu",
    names: Sequence[str] | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> NDArray[np.float64]:
    """float64 [N, masks_per_sequence]: each draw's estimate of the NELBO of each sequence, nats.

    The mean over draws equals `score_sequences`, even if sequences are scored in several calls.

    Args:
        model: packed tokens → logits, in evaluation mode.
        sequences: N sequences of residue tokens, without special tokens, no longer than `model`
            allows.
        masks_per_sequence: number of stratified draws.
        ids: identities of the sequences, which key the draws with the seed; default 0, 1, …
        families: one per sequence, for a model that takes relatives; each draw samples other
            members from those `given_to` the sequence.
        token_budget: tokens per forward pass; a longer sequence gets a pass of its own.
        names: names of the sequences in error messages.
        progress: called with the number of tokens after each forward pass.

    Raises:
        ConfigError: if a value is out of range.
        ModelError: if a bound is NaN or infinite.
    """
    require_number("masks_per_sequence", masks_per_sequence, integer=True, low=1)
    draws = np.zeros((len(sequences), masks_per_sequence))
    ids = range(len(sequences)) if ids is None else ids
    rows = (MaskedRow(index, sequences[index]) for index in _longest_first(sequences))
    with torch.inference_mode():
        for batch_rows in _batches(rows, token_budget, paradigm):
            numbers = np.array([row.index for row in batch_rows])
            batch = PackedBatch.pack(
                [framed(row.tokens) for row in batch_rows],
                draw_ids=[ids[row.index] for row in batch_rows],
            ).to(device)
            if families is not None:
                given = [families[row.index].given_to(row.tokens) for row in batch_rows]
            at_once = max(paradigm.pass_tokens(token_budget) // batch.num_tokens, 1)
            for first in range(0, masks_per_sequence, at_once):
                some = range(first, min(first + at_once, masks_per_sequence))
                if families is not None:
                    related = [
                        family.draw(seed, ids[row.index], draw, protein=row.tokens)
                        for draw in some
                        for family, row in zip(given, batch_rows, strict=True)
                    ]
                    batch = replace(batch, relatives=Relatives.pack(related))
                drawn = paradigm.bound(model, batch, Key(seed), draw=some, draws=masks_per_sequence)
                nats = drawn.nats.view(len(some), len(numbers)).cpu().numpy()
                draws[numbers, some.start : some.stop] = nats.T
                progress(batch.num_tokens * len(some))
            for number in numbers.tolist():
                _finite(float(draws[number].sum()), "bound", names, number)
    return draws


def bound_interval(draws: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The 95 % interval of each sequence's bound, (low [N], high [N]); NaN for a single draw.

    Student's t over the draws [N, D], as if they were independent. As the draws are strata of the
    masked fraction, differences between strata count as chance and the interval is conservative: it
    covered 95 to 100 % of the runs on toys with a known bound, and was up to four times too wide.
    Two draws are too few to rely on (94 %). The gap between the bound and −log p is not included.
    """
    count = draws.shape[1]
    if count < 2:
        return np.full(len(draws), np.nan), np.full(len(draws), np.nan)
    mean, deviation = draws.mean(axis=1), draws.std(axis=1, ddof=1)
    half = stdtrit(count - 1, (1 + CONFIDENCE) / 2) * deviation / math.sqrt(count)
    return mean - half, mean + half


def protein_scores(
    draws: NDArray[np.float64], sequences: Sequence[Tokens], vocabulary: Vocabulary = PROTEIN
) -> list[ProteinScore]:
    """The scores of N sequences from their `bound_draws`, float64 [N, D]."""
    columns = _scores(draws, sequences, vocabulary).values()
    return [ProteinScore(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def score_columns(
    draws: NDArray[np.float64], sequences: Sequence[Tokens], vocabulary: Vocabulary
) -> dict[str, NDArray[Any]]:
    """The columns [N] of a table of `protein_scores`, with `bits_per_byte` for texts."""
    columns = _scores(draws, sequences, vocabulary)
    columns = {f"{vocabulary.nouns.token}s": columns.pop("residues"), **columns}
    if vocabulary.is_text:
        size = np.array([vocabulary.byte_count(sequence) for sequence in sequences])
        columns[BITS_PER_BYTE] = columns["nats"] / (np.log(2) * size)
    return columns


def _scores(
    draws: NDArray[np.float64], sequences: Sequence[Tokens], vocabulary: Vocabulary
) -> dict[str, NDArray[Any]]:
    nats, (low, high) = draws.mean(axis=1), bound_interval(draws)
    predicted = (vocabulary.is_predicted(sequence) for sequence in sequences)
    residues = np.array([int(which.sum()) for which in predicted], dtype=int)
    with np.errstate(invalid="ignore"):  # NaN without residues
        perplexity = np.exp(nats / residues)
    bounds = {"nats": nats, "nats_low": low, "nats_high": high}
    return {"residues": residues, **bounds, "perplexity": perplexity}


def require_masked(paradigm: Paradigm, key: str, remedy: str) -> MaskedParadigm:
    """The paradigm; raises ModelError, naming `key` and `remedy`, unless it predicts masks."""
    if isinstance(paradigm, MaskedParadigm):
        return paradigm
    raise ModelError(
        f"{key}: a model of the uniform source has no masked prediction, for it knows no mask and "
        f"takes every residue for possible noise; {remedy}"
    )


def pseudo_log_likelihoods(
    model: Denoiser,
    paradigm: MaskedParadigm,
    sequences: Sequence[Tokens],
    *,
    families: Sequence[Family] | None = None,
    token_budget: int = 16384,
    device: Device = "cpu",
    names: Sequence[str] | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> NDArray[np.float64]:
    """float64 [N]: Σ_i log p(x_i | all other residues) over the predicted residues, nats.

    One forward row per residue (Salazar et al., arXiv:1910.14659). This is neither a log-likelihood
    nor a bound on one: each residue is predicted from others that are predicted from it.
    Arguments and errors as for `bound_draws`.
    """
    values = np.zeros(len(sequences))
    relatives: list[list[Tokens] | None] = [None] * len(sequences)
    if families is not None:
        pairs = zip(families, sequences, strict=True)
        relatives = [family.given_to(one).draw(0, protein=one) for family, one in pairs]
    rows = (
        MaskedRow(index, sequences[index], (position,), relatives[index])
        for index in _longest_first(sequences)
        for position in np.flatnonzero(paradigm.vocabulary.is_predicted(sequences[index])).tolist()
    )
    for row, log_p_MK in masked_predictions(
        model, paradigm, rows, token_budget=token_budget, device=device, progress=progress
    ):
        log_p = _log_probability(log_p_MK, row.tokens[list(row.masked)])
        values[row.index] += _finite(log_p, "pseudo-log-likelihood", names, row.index)
    return values


def mutational_effects(
    model: Denoiser,
    paradigm: MaskedParadigm,
    wild_type: Tokens,
    variants: Sequence[Variant],
    *,
    family: Family | None = None,
    token_budget: int = 16384,
    device: Device = "cpu",
    name: str = "the wild type",
    progress: Callable[[int], None] = lambda tokens: None,
) -> NDArray[np.float64]:
    """float64 [N]: Σ_i log p(mutant_i) − log p(wild type_i), higher for likelier variants.

    The masked marginals of Meier et al. (doi:10.1101/2021.07.09.450648): all positions of a variant
    are masked at once in the wild type. Variants of the same positions share one forward row, so
    all single substitutions of a protein take one row per residue. The wild type scores 0.

    Args:
        wild_type: residue tokens [L], no longer than `model` allows.
        variants: N variants, see `place_variants`.
        family: relatives of the wild type, for a model that takes them; averaged over
            RELATIVES_DRAWS draws if there are more than the model is given.
        name: name of the wild type in error messages.

    Other arguments and errors as for `bound_draws`.
    """
    effects = np.zeros(len(variants))
    sharing = variants_by_positions(variants)
    given = None if family is None else family.given_to(wild_type)
    draws = effect_draws(given)
    for draw in range(draws):
        relatives = None if given is None else given.draw(draw, protein=wild_type)
        rows = (MaskedRow(0, wild_type, positions, relatives) for positions in sharing)
        for row, log_p_MK in masked_predictions(
            model, paradigm, rows, token_budget=token_budget, device=device, progress=progress
        ):
            unchanged = _log_probability(log_p_MK, wild_type[list(row.masked)])
            for index in sharing[row.masked]:
                mutants = np.array(variants[index].mutants)
                effect = _log_probability(log_p_MK, mutants) - unchanged
                effects[index] += _finite(effect, "mutational effect", [name], row.index) / draws
    return effects


def bound_differences(
    model: Denoiser,
    paradigm: Paradigm,
    wild_type: Tokens,
    sequences: Sequence[Tokens],
    masks_per_sequence: int = 16,
    seed: int = 0,
    *,
    family: Family | None = None,
    name: str = "the wild type",
    **settings: Any,
) -> NDArray[np.float64]:
    """float64 [N]: L · (log p(x) / L_x − log p(wild type) / L), higher for likelier sequences.

    For variants of other lengths, which `mutational_effects` cannot compare. log p is the bound,
    per residue because a total depends on the length. L is the wild type's, so scores of sequences
    of its length are differences of bounds. Arguments and errors as for `bound_draws`.
    """
    place = {wild_type.tobytes(): 0}  # distinct sequences, which have equal masks
    for one in sequences:
        place.setdefault(one.tobytes(), len(place))
    every = [np.frombuffer(one, wild_type.dtype) for one in place]
    draws = bound_draws(
        model,
        paradigm,
        every,
        masks_per_sequence=masks_per_sequence,
        seed=seed,
        families=None if family is None else [family] * len(every),
        names=[name, *(f"{name}, variant {number}" for number in range(1, len(every)))],
        **settings,
    )
    nats = draws.mean(axis=1) * len(wild_type) / [len(one) for one in every]
    return nats[0] - nats[[place[one.tobytes()] for one in sequences]]


def effect_draws(given: Family | None) -> int:
    """Number of draws over which `mutational_effects` averages: one if all relatives are given."""
    return 1 if given is None or len(given.members) <= given.most else RELATIVES_DRAWS


def variants_by_positions(variants: Sequence[Variant]) -> dict[tuple[int, ...], list[int]]:
    """Changed positions → indices of the variants; the wild type is left out."""
    sharing: dict[tuple[int, ...], list[int]] = {}
    for index, variant in enumerate(variants):
        if variant.positions:
            sharing.setdefault(variant.positions, []).append(index)
    return sharing


def masked_predictions(
    model: Denoiser,
    paradigm: MaskedParadigm,
    rows: Iterable[MaskedRow],
    *,
    token_budget: int = 16384,
    device: Device = "cpu",
    progress: Callable[[int], None] = lambda tokens: None,
) -> Iterator[tuple[MaskedRow, NDArray[np.float64]]]:
    """Each row with log p(residue | unmasked tokens) [M, K] at its M masked residues.

    The time is the one at which this fraction of the residues is expected to be masked.
    """
    for batch_rows in _batches(rows, token_budget, paradigm):
        related = [row.relatives for row in batch_rows if row.relatives is not None]
        host_batch = PackedBatch.pack(
            [framed(row.tokens) for row in batch_rows],
            relatives=Relatives.pack(related) if related else None,
        )
        first_residues = (host_batch.cu_seqlens[:-1] + 1).tolist()
        where = [
            first + position
            for first, row in zip(first_residues, batch_rows, strict=True)
            for position in row.masked
        ]
        with torch.inference_mode():
            batch = host_batch.to(device)
            masked = torch.zeros(batch.num_tokens, dtype=torch.bool, device=device)
            masked[where] = True
            segments = batch.segment_ids()
            count, length = (
                segment_sum(which.double(), segments, batch.num_segments)
                for which in (masked, paradigm.maskable(batch))
            )
            log_p = paradigm.masked_log_probabilities(model, batch, masked, count / length)
            log_p_MK = log_p[masked].double().cpu().numpy()  # in the order of the rows
        ends = np.cumsum([len(row.masked) for row in batch_rows])
        yield from zip(batch_rows, np.split(log_p_MK, ends[:-1]), strict=True)
        progress(batch.num_tokens)


def _batches(
    rows: Iterable[MaskedRow], token_budget: int, paradigm: Paradigm
) -> Iterator[list[MaskedRow]]:
    require_number("token_budget", token_budget, integer=True, low=1)
    budget = paradigm.pass_tokens(token_budget)
    return under_budget(rows, lambda row: len(row.tokens) + 2, budget)


def _longest_first(sequences: Sequence[Tokens]) -> list[int]:
    """Indices by length: similar lengths next to each other are faster (`packed_attention`)."""
    return sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))


def _log_probability(log_p_MK: NDArray[np.float64], tokens: NDArray[np.integer]) -> float:
    """Σ_m log p(tokens_m) of tokens among the K predicted ones."""
    predicted = tokens.astype(np.int64) - FIRST
    return float(log_p_MK[np.arange(len(predicted)), predicted].sum())


def _finite(value: float, quantity: str, names: Sequence[str] | None, index: int) -> float:
    """The value; raises ModelError naming the sequence `index` if it is not finite."""
    if math.isfinite(value):
        return value
    called = f"sequence {index}" if names is None else repr(names[index])
    raise ModelError(
        f"the {quantity} of {called} is {value}: the model has diverged, or overflows in this "
        "precision; try precision=fp32, or another checkpoint"
    )
