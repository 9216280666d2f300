"""Families whose law is known: independent sites on a tree, and independent draws with pairs.

The two kinds that an alignment's covariances may come from: descent, which says nothing about the
effects of mutations, and couplings, which decide them. Letters are 0 … 19, effects those of all
substitutions of one protein under the family's own energy.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from d2plm.core.substitution import blosum62
from d2plm.core.vocabulary import CANONICAL_START
from d2plm.families.alignment import Letters
from d2plm.families.variants import Variant

Array = NDArray[np.float64]


def site_laws(length: int, random: np.random.Generator) -> Array:
    """float64 [L, 20]: around a residue and similar ones, of different strengths."""
    strength = random.uniform(0, 2.5, (length, 1))
    logits = strength * blosum62()[random.integers(0, 20, length)]
    weights = np.exp(logits + random.normal(0, 0.7, (length, 20)))
    return weights / weights.sum(1, keepdims=True)


def on_a_tree(seed: int, length: int = 60, members: int = 300) -> tuple[Letters, Array]:
    """Six subfamilies of independent sites: int8 [N, L], and the log of the sites' laws [L, 20]."""
    random = np.random.default_rng(seed)
    laws, rates = site_laws(length, random), random.gamma(2, 0.5, length)

    def evolved(letters: Letters, time: float) -> Letters:
        drawn = np.minimum((random.random((length, 1)) > laws.cumsum(1)).sum(1), 19)
        return np.where(random.random(length) < 1 - np.exp(-rates * time), drawn, letters)

    found: list[Letters] = []

    def grow(letters: Letters, number: int) -> None:
        if number == 1:
            found.append(evolved(letters, random.exponential(0.08)))
            return
        first = int(random.integers(1, number))
        for part in (first, number - first):
            grow(evolved(letters, random.exponential(0.07)), part)

    root = evolved(np.zeros(length, dtype=np.int8), 100)
    for number in 3 + random.multinomial(members - 18, random.dirichlet(np.full(6, 1.5))):
        grow(evolved(root, 1), int(number))
    return np.array(found, dtype=np.int8), np.log(laws)


def with_pairs(
    seed: int, length: int = 40, members: int = 400
) -> tuple[Letters, Array, NDArray[np.float64]]:
    """Independent draws of a Potts model: int8 [N, L], fields [L, 20], couplings [L, 20, L, 20]."""
    random = np.random.default_rng(seed)
    fields = np.log(site_laws(length, random))
    couplings = np.zeros((length, 20, length, 20))
    for _ in range(length):
        i, j = random.choice(length, 2, replace=False)
        couplings[i, :, j, :] = random.normal(0, 1.5, (20, 20))
        couplings[j, :, i, :] = couplings[i, :, j, :].T
    letters, number = random.integers(0, 20, (members, length)), np.arange(length)
    for _ in range(30):  # Gibbs sampling
        for i in random.permutation(length):
            logits = fields[i] + couplings[i][:, number, letters].sum(2).T
            letters[:, i] = (logits + random.gumbel(size=logits.shape)).argmax(1)
    return letters.astype(np.int8), fields, couplings


def all_singles(letters: Letters) -> list[Variant]:
    """Every substitution of one residue, in order."""
    return [
        Variant((i,), (CANONICAL_START + to,))
        for i, own in enumerate(letters.tolist())
        for to in range(20)
        if to != own
    ]


def true_effects(energy: Array, letters: Letters) -> Array:
    """The changes of an energy [L, 20] in the order of `all_singles`."""
    change = energy - energy[np.arange(len(letters)), letters][:, None]
    return change[np.arange(20) != letters[:, None]]


def spearman(first: Array, second: Array) -> float:
    return float(spearmanr(first, second).statistic)
