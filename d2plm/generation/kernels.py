"""Kernels: the distribution of what a wanted residue shows after one step from time t to time s.

Nothing is drawn here, so that a test can multiply the kernels out and know a sampler's law exactly.
Throughout, kept_t is the probability that a residue shows its clean value (ᾱ_t of diffusion, κ_t of
a flow), and a distribution is float64 [N, 21]: of the mask, then of the twenty residues.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from d2plm.core.alphabet import CANONICAL_START, MASK
from d2plm.generation.settings import Sampling
from d2plm.paradigms.base import Paradigm
from d2plm.paradigms.flow_matching import KAPPA_MARGIN, RESIDUES, log_posterior

SUM_MARGIN = 1e-5  # the twenty probabilities of an fp32 softmax add up to 1 within less than this


def next_token_distribution(
    paradigm: Paradigm, sampling: Sampling, log_p: Tensor, tokens: Tensor, start: float, stop: float
) -> Tensor:
    """What each wanted residue shows after a step of `ancestral`, `euler` or `remdm`.

    Args:
        log_p: float64 [N, 20], log-probabilities of the residues given the other positions.
        tokens: uint8 [N], what the wanted positions show now.
        start, stop: the paradigm's times t and s.
    """
    if paradigm.source == "mask":
        return masked_distribution(log_p, tokens, *step_of_masks(paradigm, sampling, start, stop))
    now, then = paradigm.kept(start), paradigm.kept(stop)
    shown = tokens.long() - CANONICAL_START
    if sampling.sampler == "ancestral":
        residues = uniform_posterior(log_p, shown, now, then)
    else:
        residues = uniform_jump(log_p, shown, now, then, _corrector(sampling, start))
    return F.pad(residues, (1, 0))


def may_change(
    paradigm: Paradigm, sampling: Sampling, tokens: Tensor, draws: Tensor, start: float, stop: float
) -> Tensor:
    """bool [N]: where a step may change what is shown, known before the model is asked.

    From the mask source it is the draw alone that decides whether a mask is filled or a residue
    masked again: `categorical` takes the mask, which comes first in a distribution, for draws below
    its probability. The model says what a mask is filled with.

    Args:
        draws: float64 [N] in [0, 1), with which the step's distribution will be drawn from.

    Other arguments as of `next_token_distribution`.
    """
    if paradigm.source == "uniform":
        return torch.ones_like(tokens, dtype=torch.bool)
    fill, remask = step_of_masks(paradigm, sampling, start, stop)
    highest, lowest = draws * (1 + SUM_MARGIN), draws * (1 - SUM_MARGIN)
    return torch.where(tokens == MASK, highest >= 1 - fill, lowest < remask)


def step_of_masks(
    paradigm: Paradigm, sampling: Sampling, start: float, stop: float
) -> tuple[float, float]:
    """The probabilities that a mask is filled, and that a residue is masked, in a step."""
    now, then = paradigm.kept(start), paradigm.kept(stop)
    remask = remask_probability(sampling, now, then, _corrector(sampling, start))
    return fill_probability(now, then, remask), remask


def tempered(log_p: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities [N, 20] after temperature, top-k and top-p, float64."""
    log_p = log_p.double()
    if sampling.temperature != 1:
        # Of the likeliest residue's 0, which does not overflow at the lowest temperature.
        log_p = (log_p - log_p.amax(-1, keepdim=True)) / sampling.temperature
        log_p = log_p.log_softmax(-1)
    if sampling.top_k is None and sampling.top_p == 1:
        return log_p
    ranked, order = log_p.sort(dim=-1, descending=True, stable=True)
    before = ranked.exp().cumsum(-1) - ranked.exp()
    cut = before >= sampling.top_p
    if sampling.top_k is not None:
        cut[:, sampling.top_k :] = True
    return log_p.masked_fill(cut.scatter(-1, order, cut), -torch.inf).log_softmax(-1)


def remask_probability(sampling: Sampling, now: float, then: float, strength: float) -> float:
    """σ: the probability that a residue shown at t is masked at s.

    At most min(1, (1 − kept_s)/kept_t), beyond which `fill_probability` would exceed 1 (Wang et
    al., arXiv:2503.00307, sec. 3); so it is 0 on the last step.

    - `ancestral`: 0.
    - `euler`: the corrector (1 + c)·û − c·ǔ (Gat et al., arXiv:2407.15595, sec. 3.3) masks at the
      rate c·κ̇/κ: integrated over the step, 1 − (κ_t/κ_s)^c.
    - `remdm` (Wang et al., sec. 4): min(η, largest), or η·largest. η is not a rate: it does not
      shrink with the step, so that the error stays at about η until η is above the inverse of the
      root of the number of steps, and falls with that root from there.

    Args:
        now, then: kept_t and kept_s.
        strength: c.
    """
    largest = min(1.0, (1 - then) / now) if now > 0 else 1.0
    if sampling.sampler == "euler":
        return min(_forgotten(now, then, strength), largest)
    if sampling.sampler == "remdm":
        assert sampling.remdm_eta is not None
        capped = sampling.remdm_schedule == "cap"
        return min(sampling.remdm_eta, largest) if capped else sampling.remdm_eta * largest
    return 0.0


def fill_probability(now: float, then: float, remask: float) -> float:
    """(kept_s − (1 − σ)·kept_t)/(1 − kept_t): the probability that a residue masked at t is shown.

    With it a residue is shown with probability (1 − σ)·kept_t + fill·(1 − kept_t) = kept_s,
    whatever σ: the marginals are those of the forward process (Wang et al., arXiv:2503.00307,
    sec. 3). With σ = 0 it is the posterior's (ᾱ_s − ᾱ_t)/(1 − ᾱ_t), which is a flow's velocity
    integrated over the step.
    """
    return min((then - (1 - remask) * now) / (1 - now), 1.0) if now < 1 else 1.0


def masked_distribution(log_p: Tensor, tokens: Tensor, fill: float, remask: float) -> Tensor:
    """Masks are filled from `log_p` with probability `fill`; what is shown is masked by `remask`.

    Arguments as of `next_token_distribution`.
    """
    masked = tokens == MASK
    filled = F.pad(fill * log_p.exp(), (1, 0), value=1 - fill)
    shown = torch.zeros_like(filled)
    shown[:, 0] = remask
    index = torch.where(masked, 1, tokens.long() - CANONICAL_START + 1)
    shown.scatter_(-1, index[:, None], 1 - remask)
    return torch.where(masked[:, None], filled, shown)


def uniform_jump(log_p: Tensor, shown: Tensor, now: float, then: float, strength: float) -> Tensor:
    """The flow's jump from a uniform source, with its corrector: residues' probabilities [N, 20].

    With probability f a position is drawn anew from p_{1|t}; after that, with probability b, from
    the source. A position's marginal κ_t·p + (1 − κ_t)/20 keeps its form in both, for p_{1|t}
    averages to p; its κ becomes f + (1 − f)·κ_t, and that times 1 − b. To arrive at κ_s,

        f = (κ_s/(1 − b) − κ_t)/(1 − κ_t),

    which is at most 1 for b ≤ 1 − κ_s: so there is no corrector on the last step. b is
    1 − (κ_t/κ_s)^c, the rate c·κ̇/κ of forgetting integrated over the step. To first order in the
    step these are the rates of (1 + c)·û − c·ǔ (Gat et al., arXiv:2407.15595, sec. 3.3), where ǔ
    is uniform noise's own forward process instead of theirs, which spares what is noise already;
    both carry the same marginals.

    Args:
        log_p: float64 [N, 20], given the other positions.
        shown: int64 [N], index of the residue shown at t.
        now, then: κ_t and κ_s.
        strength: c.
    """
    renoise = min(_forgotten(now, then, strength), 1 - then)
    jump = min((then / (1 - renoise) - now) / (1 - now), 1.0) if now < 1 else 1.0
    posterior = log_posterior(log_p, shown, log_p.new_full(shown.shape, now)).exp()
    redrawn = jump * posterior + (1 - jump) * _one_hot(shown, log_p)
    return (1 - renoise) * redrawn + renoise / RESIDUES


def uniform_posterior(log_p: Tensor, shown: Tensor, now: float, then: float) -> Tensor:
    """The posterior of uniform diffusion: the probabilities of the residue at s, [N, 20].

    The forward process keeps a residue from s to t with probability ρ = kept_t/kept_s and draws it
    anew otherwise. Given x_s, the residue at t does not depend on the other positions, so by Bayes

        p(x_s = y | x_t) ∝ q(x_t = z | x_s = y) · p(x_s = y | the other positions)
                         = [ρ·1[y = z] + (1 − ρ)/20] · [kept_s·p(y) + (1 − kept_s)/20]

    with p the model's softmax (Austin et al., arXiv:2107.03006, eq. 4 with a uniform transition
    matrix; there p includes the evidence of z, which counts here in the first factor). This is the
    reverse process whose likelihood the time-reversal bound bounds.

    Arguments as of `uniform_jump`.
    """
    # A step that keeps everything would leave nothing where top-k has cut the residue shown.
    kept = min(now / then, 1 - KAPPA_MARGIN) if then > 0 else 0.0
    evidence = kept * _one_hot(shown, log_p) + (1 - kept) / RESIDUES
    posterior = evidence * (then * log_p.exp() + (1 - then) / RESIDUES)
    return posterior / posterior.sum(-1, keepdim=True)


def _corrector(sampling: Sampling, time: float) -> float:
    """c at a time: `corrector` in the middle, 0 at both ends."""
    return 4 * sampling.corrector * time * (1 - time)


def _forgotten(now: float, then: float, strength: float) -> float:
    """1 − (κ_t/κ_s)^c: what the rate c·κ̇/κ takes over a step."""
    return 1 - (now / then) ** strength if then > 0 else 0.0


def _one_hot(index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter(-1, index[:, None], 1.0)
