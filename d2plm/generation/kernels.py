"""Kernels: a sampler's step from time t to time s, and the distribution of residues it draws from.

kept_t is the probability that a residue is clean at t (ᾱ_t of diffusion, κ_t of a flow).
"""

import torch
from torch import Tensor

from d2plm.generation.sampler_settings import Sampling
from d2plm.paradigms.masked import remask_limit
from d2plm.paradigms.paradigm import Paradigm, Step


def step_between(paradigm: Paradigm, sampling: Sampling, start: float, stop: float) -> Step:
    """The step of `ancestral`, `euler` or `remdm` between two of the paradigm's times.

    They differ in the probability that a clean residue is corrupted again:

    - `ancestral`: 0.
    - `euler`: the corrector (1 + c)·û − c·ǔ (Gat et al., arXiv:2407.15595, sec. 3.3) corrupts at
      the rate c·κ̇/κ: integrated over the step, 1 − (κ_t/κ_s)^c. c is `corrector` in the middle of
      the process and 0 at both ends.
    - `remdm` (Wang et al., arXiv:2503.00307, sec. 4): η, or η times the largest possible
      probability. η is not a rate: it does not shrink with the step, so the error stays at about η
      until η exceeds the inverse root of the number of steps, and then falls with that root.
    """
    now, then = paradigm.kept(start), paradigm.kept(stop)
    renoise = 0.0
    if sampling.sampler == "euler" and then > 0:
        renoise = 1 - (now / then) ** (4 * sampling.corrector * start * (1 - start))
    elif sampling.sampler == "remdm":
        assert sampling.remdm_eta is not None
        capped = sampling.remdm_schedule == "cap"
        renoise = sampling.remdm_eta * (1.0 if capped else remask_limit(now, then))
    return Step(now, then, str(sampling.sampler), renoise)


def tempered(log_p: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities [N, K] after temperature, top-k and top-p, float64."""
    log_p = log_p.double()
    if sampling.temperature not in (None, 1):
        # Relative to the likeliest residue, so that low temperatures do not overflow.
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
