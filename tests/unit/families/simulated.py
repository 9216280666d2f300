"""Families whose law is known: independent sites on a tree, and independent draws with pairs.

    python -m tests.unit.families.simulated

prints the rank correlations of the score, the profile and a fitted Potts model with the true
effects. The two kinds that an alignment's covariances may come from: descent, which says nothing
about the effects of mutations, and couplings, which decide them. Letters are 0 … 19, effects those
of all substitutions of one protein under the family's own energy.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax
from scipy.stats import spearmanr

from d2plm.core.substitution import blosum62
from d2plm.core.vocabulary import CANONICAL_START
from d2plm.families.alignment import Letters, one_hot, sequence_weights
from d2plm.families.mutation_effects import FamilyEffects
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
    letters = random.integers(0, 20, (members, length))
    partners = np.asarray(couplings.any((1, 3)))
    for _ in range(30):  # Gibbs sampling
        for i in random.permutation(length):
            own = np.flatnonzero(partners[i])
            logits = fields[i] + couplings[i][:, own, letters[:, own]].sum(2).T
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


def of_first(aligned: Letters) -> FamilyEffects:
    """The first member's effects from all others."""
    return FamilyEffects(aligned[0], aligned[1:], sequence_weights(aligned[1:]))


def energy_of_first(aligned: Letters, fields: Array, couplings: Array) -> Array:
    """float64 [L, 20]: of each residue in place of the first member's."""
    return fields + couplings[:, :, np.arange(aligned.shape[1]), aligned[0]].sum(2)


def fitted_potts(aligned: Letters, l2: float) -> Array:
    """The energy of the first member's residues under a Potts model of all others.

    Fitted by pseudolikelihood, each column given all others; couplings are averaged over both
    directions (Ekeberg et al., doi:10.1103/PhysRevE.87.012707).
    """
    members, length = aligned[1:], aligned.shape[1]
    hot, energy = one_hot(members).astype(float), np.zeros((length, 20))
    penalty = np.pad(np.full((20 * length, 20), l2), ((0, 1), (0, 0)), constant_values=0.01)
    couplings = np.zeros((length, 20, length, 20))
    for i in range(length):
        others = np.pad(hot, ((0, 0), (0, 1)), constant_values=1)
        others[:, 20 * i : 20 * i + 20] = 0

        def loss(flat: Array, others: Array = others, i: int = i) -> tuple[float, Array]:
            weights = flat.reshape(-1, 20)
            logits = log_softmax(others @ weights, axis=1)
            nats = -logits[np.arange(len(members)), members[:, i]].sum()
            slope = others.T @ (np.exp(logits) - hot[:, 20 * i : 20 * i + 20])
            slope += 2 * penalty * weights
            return nats + (penalty * weights**2).sum(), slope.ravel()

        start = np.zeros(others.shape[1] * 20)
        found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 100}).x
        energy[i] = found.reshape(-1, 20)[-1]
        couplings[i] = found.reshape(-1, 20)[:-1].reshape(length, 20, 20).transpose(2, 0, 1)
    return energy_of_first(aligned, energy, (couplings + couplings.transpose(2, 3, 0, 1)) / 2)


def main() -> None:
    print(f"{'family':32}{'score':>8}{'profile':>9}{'Potts':>8}")
    for seed in range(3):
        trees, pairs = on_a_tree(seed), with_pairs(seed)
        _print_row("independent sites on a tree", *trees)
        _print_row("planted pairs, independent draws", pairs[0], energy_of_first(*pairs), True)


def _print_row(name: str, aligned: Letters, energy: Array, potts: bool = False) -> None:
    truth, effects = true_effects(energy, aligned[0]), of_first(aligned)
    found = effects.effects(all_singles(aligned[0]))
    line = (
        f"{name:32}{spearman(found['score'], truth):8.3f}{spearman(found['profile'], truth):9.3f}"
    )
    if potts:
        fitted = (fitted_potts(aligned, l2) for l2 in (0.3, 1, 3, 10))
        best = max(spearman(true_effects(one, aligned[0]), truth) for one in fitted)
        line += f"{best:8.3f}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
