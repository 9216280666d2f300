"""LengthHistogram: the lengths of the training proteins, from which generated ones are sampled.

Every exported model contains it, so generation needs no training data. It also provides the
likelihood of a length, which the bound of a sequence excludes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import ModelError, require
from d2plm.core.vocabulary import Tokens, Vocabulary
from d2plm.data.family import Family
from d2plm.data.store import MAX_RESIDUES

FILE = "length_histogram.json"
UNIFORM = 50, 512  # range of lengths for a model without a histogram
PSEUDO_COUNT = 0.5  # Krichevsky–Trofimov, gives unseen lengths a likelihood


@dataclass(frozen=True, eq=False)
class LengthHistogram:
    """The number of training proteins of each length: int64 [M + 1], longer ones counted at M."""

    counts: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: NDArray[np.integer], max_residues: int) -> Self:
        """The histogram of `lengths` [N] in residues, clipped to `max_residues`."""
        return cls(np.bincount(np.minimum(lengths, max_residues), minlength=max_residues + 1))

    @classmethod
    def uniform(cls, max_residues: int) -> Self:
        """One protein of each length in UNIFORM, clipped to `max_residues`."""
        first, last = (min(length, max_residues) for length in UNIFORM)
        return cls.of(np.arange(first, last + 1), max_residues)

    def sample(self, number: int, seed: int, *, low: int, high: int) -> list[int]:
        """Sample `number` lengths between `low` and `high`.

        Raises:
            ConfigError: if no training protein has such a length.
        """
        counts = self.counts.astype(np.float64)
        counts[:low] = 0
        counts[high + 1 :] = 0
        seen = np.flatnonzero(self.counts)
        key, value = ("min_length", low) if low > seen[-1] else ("max_length", high)
        wanted = f"a length that training proteins have ({seen[0]} to {seen[-1]} residues)"
        require(counts.sum() > 0, key, value, wanted)
        random = np.random.default_rng(seed)
        return random.choice(len(counts), size=number, p=counts / counts.sum()).tolist()

    def nats(self, lengths: NDArray[np.integer]) -> NDArray[np.float64]:
        """−log p of each length, smoothed by a pseudo-count."""
        smoothed = self.counts[1:] + PSEUDO_COUNT
        log_p = np.log(smoothed) - np.log(smoothed.sum())
        return -log_p[np.clip(lengths, 1, len(smoothed)) - 1]

    def save(self, folder: Path) -> None:
        seen = np.flatnonzero(self.counts)
        content = {
            "max_residues": len(self.counts) - 1,
            "lengths": seen.tolist(),
            "counts": self.counts[seen].tolist(),
        }
        (folder / FILE).write_text(json.dumps(content))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read it from an export folder; raises ModelError if it is missing or damaged."""
        try:
            content = json.loads((folder / FILE).read_text())
            if not 0 < content["max_residues"] <= MAX_RESIDUES:
                raise ValueError(f"max_residues={content['max_residues']}")
            counts = np.zeros(content["max_residues"] + 1, dtype=np.int64)
            counts[content["lengths"]] = content["counts"]
            if not counts.any():
                raise ValueError("no lengths")
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ModelError(
                f"{folder} is not a whole model folder: {FILE}: {error}; export again"
            ) from error
        return cls(counts)


def lengths_of(family: Family, limit: int) -> LengthHistogram:
    """The lengths of a family's members, clipped to `limit`."""
    return LengthHistogram.of(np.array([len(one) for one in family.members]), limit)


def wanted_lengths(
    histogram: LengthHistogram,
    number: int,
    limit: int,
    *,
    length: int | Sequence[int] | None = None,
    min_length: int = 1,
    max_length: int | None = None,
    seed: int = 0,
) -> list[int]:
    """The length of each protein to generate, in residues.

    Args:
        number: number of proteins, or of proteins per given length.
        limit: the longest protein of the model, in residues.
        length: one or several lengths; None samples between `min_length` and `max_length`.

    Raises:
        ConfigError: if a length exceeds the limit, or bounds are given together with lengths.
    """
    if length is None:
        require_length("min_length", min_length, limit)
        if max_length is not None:
            require_length("max_length", max_length, limit, min_length)
        return histogram.sample(number, seed, low=min_length, high=max_length or limit)
    reason = "with a length, which leaves nothing to draw"
    require(min_length == 1, "min_length", min_length, f"1 {reason}")
    require(max_length is None, "max_length", max_length, f"null {reason}")
    if not isinstance(length, Sequence) or isinstance(length, str):
        length = [length]
    lengths = list(length)
    require(bool(lengths), "length", length, "a length, or several")
    for one in lengths:
        require_length("length", one, limit)
    return [one for one in lengths for _ in range(number)]


def prompted(
    histogram: LengthHistogram,
    number: int,
    limit: int,
    vocabulary: Vocabulary,
    prompt: str | None = None,
    **lengths: Any,
) -> list[Tokens]:
    """Templates of masks, optionally after a prompt, which counts towards the length.

    Raises:
        ConfigError: as for `wanted_lengths`, or if the prompt leaves nothing to generate.
        DataError: if the prompt is not in the vocabulary.
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


def require_length(key: str, value: object, limit: int, low: int = 1) -> None:
    """Raise ConfigError naming `key` unless `value` residues fit a model that takes `limit`."""
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= limit
    require(fits, key, value, f"an integer from {low} to {limit}, the most this model takes")
