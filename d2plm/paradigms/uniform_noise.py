"""Uniform noise: posterior, bounds and sampling steps when corrupted residues are random residues.

Throughout, position i shows z, a residue that is clean with probability κ and drawn uniformly from
the vocabulary's K predicted tokens otherwise: q(z | x) = κ·1[z = x] + (1 − κ)/K.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from d2plm.core.noise import Key, uniform
from d2plm.core.vocabulary import FIRST

KAPPA_MARGIN = 1e-12  # κ is kept this far from 0 and 1, where the bound is 0/0


def random_residues(key: Key, predicted: int, *indices: Tensor) -> Tensor:
    """int64 tokens: one of the `predicted` K, uniformly random, for each of the `indices`."""
    return (uniform(key.stream("source"), *indices) * predicted).long() + FIRST


def log_posterior(log_p: Tensor, shown: Tensor, kappa: Tensor) -> Tensor:
    """log p_{1|t} [T, K] under the uniform source.

    Args:
        log_p: [T, K], log-probabilities given the other positions.
        shown: int64 [T], index of the residue that each position shows.
        kappa: float64 [T], κ_t.
    """
    kappa = kappa.clamp(max=1 - KAPPA_MARGIN)
    evidence = torch.log1p(log_p.shape[-1] * kappa / (1 - kappa)).to(log_p.dtype)
    return log_p.scatter_add(-1, shown[:, None], evidence[:, None]).log_softmax(-1)


def time_reversal_nats(log_p: Tensor, shown: Tensor, clean: Tensor, kappa: Tensor) -> Tensor:
    """Contribution of each position to the time-reversal bound per unit of κ, nats, float64 [T].

    Uniform noise is a Markov chain that jumps at the rate −κ̇/κ to a random residue. Its reverse
    jumps from z to y at the rate κ̇/(K·κ)·r_y with r_y = q_t(y | x_1)/q_t(z | x_1), where q_t(y |
    x) = κ·1[y = x] + (1 − κ)/K; the model's reverse has r̂_y, with q_t(· | x) averaged over its p(x
    | the other positions). The divergence of the two paths,

        ∫ dκ/(K·κ) · E_z Σ_y [ r̂_y − r_y + r_y·log(r_y/r̂_y) ],

    bounds −log p(x_1), with equality for exact posteriors (Schiff et al., arXiv:2412.10193, there
    written in α = κ; derived in docs/science.md).

    Args:
        log_p: [T, K], the model's log-probabilities given the other positions.
        shown: int64 [T], index z of the residue that each position shows.
        clean: int64 [T], index of x_1.
        kappa: float64 [T], κ_t.
    """
    kappa = kappa.clamp(KAPPA_MARGIN, 1 - KAPPA_MARGIN)[:, None]
    residues = log_p.shape[-1]
    noise = ((1 - kappa) / residues).log()
    model = torch.logaddexp(log_p.double() + kappa.log(), noise)
    truth = noise.expand_as(model).scatter(-1, clean[:, None], torch.logaddexp(kappa.log(), noise))
    model_ratio = model - model.gather(-1, shown[:, None])
    ratio = truth - truth.gather(-1, shown[:, None])
    log_quotient = ratio - model_ratio
    # r·(e^(−d) − 1 + d) with d = log(r/r̂): no cancellation at r ≈ r̂.
    divergence = ratio.exp() * (torch.expm1(-log_quotient) + log_quotient)
    return divergence.sum(-1) / (residues * kappa[:, 0])


def generalised_kl_nats(log_p: Tensor, shown: Tensor, clean: Tensor, kappa: Tensor) -> Tensor:
    """Contribution of each position to the generalised KL bound per unit of κ, nats, float64 [T].

    1/(1 − κ)·[1 − p(z|z) + 1[x_1 ≠ z]·(−log p(x_1|z) − 1)] with p = p_{1|t}: the divergence of the
    flow's own velocities (Shaul et al., arXiv:2412.03487). A bound, but loose: its path jumps
    straight to x_1, which reveals more of x_1 than the path of the time reversal. Arguments as in
    `time_reversal_nats`.
    """
    kappa = kappa.clamp(KAPPA_MARGIN, 1 - KAPPA_MARGIN)
    posterior = log_posterior(log_p.double(), shown, kappa)
    stays = posterior.gather(-1, shown[:, None])[:, 0]
    truth = posterior.gather(-1, clean[:, None])[:, 0]
    return (-torch.expm1(stays) + torch.where(clean != shown, -truth - 1, 0.0)) / (1 - kappa)


def jump(log_p: Tensor, shown: Tensor, now: float, then: float, renoise: float) -> Tensor:
    """Probabilities [N, K] of the residues after a flow's step from a uniform source.

    With probability f a position is redrawn from p_{1|t}; after that, with probability b, from the
    source (the corrector). A position's marginal κ_t·p + (1 − κ_t)/K keeps its form in both,
    because p_{1|t} averages to p; its κ becomes f + (1 − f)·κ_t, and that times 1 − b. To arrive at
    κ_s,

        f = (κ_s/(1 − b) − κ_t)/(1 − κ_t),

    which is at most 1 for b ≤ 1 − κ_s, so the last step has no corrector. With the b of `euler`
    these are, to first order in the step, the rates of (1 + c)·û − c·ǔ (Gat et al.,
    arXiv:2407.15595, sec. 3.3), where ǔ is uniform noise's own forward process; theirs does not
    renoise what is already noise. Both have the same marginals.

    Args:
        log_p: float64 [N, K], given the other positions.
        shown: int64 [N], index of the residue shown at t.
        now, then: κ_t and κ_s.
        renoise: b, before it is limited to 1 − κ_s.
    """
    renoise = min(renoise, 1 - then)
    redraw = min((then / (1 - renoise) - now) / (1 - now), 1.0) if now < 1 else 1.0
    posterior = log_posterior(log_p, shown, log_p.new_full(shown.shape, now)).exp()
    residues = log_p.shape[-1]
    jumped = redraw * posterior + (1 - redraw) * F.one_hot(shown, residues).to(log_p.dtype)
    return (1 - renoise) * jumped + renoise / residues


def posterior_step(log_p: Tensor, shown: Tensor, now: float, then: float) -> Tensor:
    """The posterior of uniform diffusion: the probabilities of the residue at s, [N, K].

    The forward process keeps a residue from s to t with probability ρ = κ_t/κ_s and redraws it
    otherwise. Given x_s, the residue at t does not depend on the other positions, so by Bayes

        p(x_s = y | x_t) ∝ q(x_t = z | x_s = y) · p(x_s = y | the other positions)
                         = [ρ·1[y = z] + (1 − ρ)/K] · [κ_s·p(y) + (1 − κ_s)/K]

    with p the model's softmax (Austin et al., arXiv:2107.03006, eq. 4 with a uniform transition
    matrix; there p includes the evidence of z, which is in the first factor here). This is the
    reverse process whose likelihood the time-reversal bound bounds. Arguments as in `jump`.
    """
    # With κ_t = κ_s every probability would be 0 if top-k has removed the shown residue.
    kept = min(now / then, 1 - KAPPA_MARGIN) if then > 0 else 0.0
    residues = log_p.shape[-1]
    evidence = kept * F.one_hot(shown, residues).to(log_p.dtype) + (1 - kept) / residues
    posterior = evidence * (then * log_p.exp() + (1 - then) / residues)
    return posterior / posterior.sum(-1, keepdim=True)
