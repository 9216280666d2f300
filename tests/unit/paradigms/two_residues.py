"""A protein of two residues under uniform noise: every one of its 400 noisy states, summed over.

The rates are taken from the Markov chains' own generators, matrix exponential included, not from
the closed forms that the package uses. κ is the time axis; a denoiser is a function
(z_1, z_2, κ) → log p(x_i | what is shown) [..., 2, 20].
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import expm
from scipy.special import expit, log_softmax, xlogy
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.core.vocabulary import CANONICAL_START
from d2plm.data.loader import framed
from d2plm.paradigms import flow_matching
from d2plm.paradigms import paradigm as base
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.paradigms.paradigm import Denoiser
from tests.conftest import MonkeyPatch
from tests.unit.paradigms.closed_forms import Curve

Array = NDArray[np.float64]
Protein = tuple[int, int]
LogP = Callable[[NDArray[np.int64], NDArray[np.int64], Array], Array]
# (p [20, 20, 2, 20], a site, κ) → jumps [20, 20, y] per unit of κ from the shown residue to y
ModelRates = Callable[[Array, int, float], Array]

N = 20
Z1, Z2 = np.indices((N, N))
STATES = np.stack([Z1.flatten(), Z2.flatten()], 1)
SHOWN = (Z1, Z2)
OTHER = tuple(np.arange(N) != shown[..., None] for shown in SHOWN)  # y ≠ z, [20, 20, y]
JUMPS = np.ones((N, N)) / N - np.eye(N)  # generator of uniform noise, one jump a unit of −ln κ


# --- denoisers ---------------------------------------------------------------------------------


def random_joint(seed: int) -> Array:
    """p(x_1, x_2) [20, 20], correlated, nowhere zero."""
    weights = np.random.default_rng(seed).gamma(0.3, size=(N, N)) + 1e-3
    return weights / weights.sum()


def exact_denoiser(joint: Array) -> LogP:
    """p(x_i | z_j) of data with this joint distribution; knows nothing of z_i."""

    def log_p(z1: NDArray[np.int64], z2: NDArray[np.int64], kappa: Array) -> Array:
        k = np.asarray(kappa)[..., None]
        first = k * joint.T[z2] + (1 - k) / N * joint.sum(1)
        second = k * joint[z1] + (1 - k) / N * joint.sum(0)
        both = np.stack([first, second], -2)
        return np.log(both / both.sum(-1, keepdims=True))

    return log_p


def wrong_denoiser(seed: int) -> LogP:
    """Random tables, in which the residue's own noise counts too, and κ."""
    random = np.random.default_rng(seed)
    table, slope = random.normal(size=(2, N, N, 2, N))

    def log_p(z1: NDArray[np.int64], z2: NDArray[np.int64], kappa: Array) -> Array:
        k = np.asarray(kappa)[..., None, None]
        return log_softmax(table[z1, z2] + k * slope[z1, z2], axis=-1)

    return log_p


def told_the_time(log_p: LogP, kappa: Curve) -> Denoiser:
    """The denoiser as the package calls it: a row of <cls> x_1 x_2 <eos> a sequence."""

    def model(tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor) -> Tensor:
        shown = tokens.view(-1, 4)[:, 1:3].long().numpy() - CANONICAL_START
        distinct, which = np.unique(times.double().numpy(), return_inverse=True)
        kappas = np.array([kappa(t) for t in distinct])[which]
        logits = np.full((len(shown), 4, 33), 7.0)  # what is no residue does not count
        logits[:, 1:3, CANONICAL_START : CANONICAL_START + N] = 3.0 + log_p(
            shown[:, 0], shown[:, 1], kappas
        )
        return torch.from_numpy(logits).flatten(0, 1)

    return model


# --- the chains --------------------------------------------------------------------------------


def kernel(kappa: float) -> Array:
    """P(x → z) [20, 20] at κ."""
    return expm(-np.log(max(kappa, np.finfo(float).tiny)) * JUMPS)


def chances(protein: Protein, kappa: float) -> Array:
    """P(z_1, z_2 | x) [20, 20]."""
    p = kernel(kappa)
    return np.multiply.outer(p[protein[0]], p[protein[1]])


def of_shown(values: Array, site: int) -> Array:
    """values [20, 20, y] → at y = the residue shown at the site, [20, 20, 1]."""
    return np.take_along_axis(values, SHOWN[site][..., None], -1)


def reversal_rates(p: Array, site: int, kappa: float) -> Array:
    """The noise's chain backwards: Q(y → z)·P(y)/P(z), its marginals those of p's residues."""
    marginal = p[:, :, site] @ kernel(kappa)
    # One unit of −ln κ is 1/κ units of κ; the generator's entries off the diagonal are equal.
    return JUMPS[0, 1] * marginal / of_shown(marginal, site) / kappa


def velocity_rates(p: Array, site: int, kappa: float) -> Array:
    """The flow's velocity, (p_{1|t} − δ_z)/(1 − κ): straight to the residue that is expected."""
    joint = p[:, :, site] * np.moveaxis(kernel(kappa), 0, -1)[SHOWN[site]]
    return joint / joint.sum(-1, keepdims=True) / (1 - kappa)


def certain(protein: Protein) -> Array:
    """p [20, 20, 2, 20] of one who knows the protein."""
    return np.broadcast_to(np.eye(N)[list(protein)], (N, N, 2, N))


def path_divergence(rates: ModelRates, log_p: LogP, protein: Protein, kappa: float) -> Array:
    """Σ_sites Σ_{y≠z} û − u + u·ln(u/û) [20, 20]: what the two paths differ by per unit of κ."""
    total = np.zeros((N, N))
    model, truth = np.exp(log_p(Z1, Z2, np.full((N, N), kappa))), certain(protein)
    for site in range(2):
        u_hat, u = rates(model, site, kappa), rates(truth, site, kappa)
        terms = u_hat - u + xlogy(u, np.where(u > 0, u, 1.0)) - xlogy(u, u_hat)
        total += np.where(OTHER[site], terms, 0.0).sum(-1)
    return total


def logistic_nodes(step: float = 0.5, reach: float = 25.0) -> tuple[Array, Array]:
    """Nodes and weights of ∫₀¹, the trapezium rule in ln(t/(1 − t)).

    Integrands here are smooth inside and at worst logarithmic at the ends: it converges like
    exp(−1/step).
    """
    s = np.arange(-reach, reach, step)
    return expit(s), step * expit(s) * expit(-s)


def path_integral(rates: ModelRates, log_p: LogP, protein: Protein) -> float:
    """∫ dκ E_z of `path_divergence`: the bound."""
    return sum(
        float(w * (chances(protein, k) * path_divergence(rates, log_p, protein, k)).sum())
        for k, w in zip(*logistic_nodes(), strict=True)
    )


# --- the package's own numbers, with the noise enumerated ---------------------------------------


def protein_batch(protein: Protein, copies: int) -> PackedBatch:
    tokens = np.array(protein, dtype=np.uint8) + CANONICAL_START
    return PackedBatch.pack([framed(tokens)] * copies)


def show_every_state(patch: MonkeyPatch, paradigm: UniformFlowMatching, times: Tensor) -> None:
    """Make `corrupt` draw these times [n · 400], and show the 400 states one by one, all noise."""
    rows = np.pad(STATES + CANONICAL_START, ((0, 0), (1, 1)))
    tokens = torch.from_numpy(np.tile(rows, (len(times) // N**2, 1)).flatten())
    rates = paradigm.corruption_rate(times)
    patch.setattr(flow_matching, "random_residues", lambda key, *indices: tokens)
    patch.setattr(base, "uniform", lambda key, *indices: torch.zeros(indices[-1].shape).double())
    patch.setattr(paradigm, "times_of", lambda draws: (times, rates))
