"""A family of independent sites of known frequencies, and what a mutational scan would measure."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from d2plm.core.substitution import blosum62
from d2plm.core.vocabulary import CANONICAL, CANONICAL_START
from d2plm.families.alignment import GAP, Letters
from d2plm.families.variants import Variant
from tests.conftest import Tokens

Array = NDArray[np.float64]
LENGTH = 60


@cache
def site_frequencies() -> Array:
    """p(residue) [60, 20] of each position.

    Around a residue and those that are alike by BLOSUM62, some positions more conserved than
    others, and with preferences of its own, which no substitution matrix knows.
    """
    random = np.random.default_rng(0)
    alike = blosum62()[random.integers(0, 20, LENGTH)]
    conserved = random.uniform(0.3, 2.0, (LENGTH, 1))
    weights = np.exp(conserved * alike + random.normal(size=(LENGTH, 20)))
    return weights / weights.sum(1, keepdims=True)


def likeliest() -> Tokens:
    """The wild type: the likeliest residue of each position."""
    return (site_frequencies().argmax(1) + CANONICAL_START).astype(np.uint8)


def members(count: int, seed: int = 1) -> list[Tokens]:
    """Drawn position by position; every other one has lost residues and gained three."""
    random, found = np.random.default_rng(seed), []
    for number in range(count):
        drawn = np.array([random.choice(20, p=p) for p in site_frequencies()]) + CANONICAL_START
        if number % 2:
            added = random.integers(0, 20, 3) + CANONICAL_START
            drawn = np.concatenate([drawn[3:30], added, drawn[30:45], drawn[47:-4]])
        found.append(drawn.astype(np.uint8))
    return found


def singles() -> list[Variant]:
    """Every substitution of one residue of the wild type."""
    every = range(CANONICAL_START, CANONICAL_START + 20)
    return [Variant((i,), (m,)) for i, own in enumerate(likeliest()) for m in every if m != own]


def measured_effects() -> Array:
    """log p(mutant) − log p(wild type) of `singles`, with noise of half their spread."""
    log_p, own = np.log(site_frequencies()), likeliest().astype(int) - CANONICAL_START
    changes = ((one.positions[0], one.mutants[0] - CANONICAL_START) for one in singles())
    truth = np.array([log_p[i, mutant] - log_p[i, own[i]] for i, mutant in changes])
    return truth + np.random.default_rng(2).normal(scale=0.5 * truth.std(), size=len(truth))


def aligned_rows(*texts: str) -> Letters:
    """int8 [N, L] of rows of text."""
    codes = {letter: i for i, letter in enumerate(CANONICAL)}
    return np.array([[codes.get(c, GAP) for c in text] for text in texts], dtype=np.int8)
