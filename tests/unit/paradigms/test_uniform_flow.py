"""The flow from random residues: its three losses and its bound, against sums over all noise.

The reference (two_residues.py) works with explicit rate matrices; two more derivations that know no
rates at all, the ELBOs of the processes in many small steps, bind the reference itself.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit, log_softmax
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.core.vocabulary import CANONICAL_START, encode
from d2plm.data.loader import framed
from d2plm.paradigms import flow_matching
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.paradigms.uniform_noise import generalised_kl_nats, log_posterior, time_reversal_nats
from tests.unit.paradigms.closed_forms import KAPPAS, Curve
from tests.unit.paradigms.two_residues import (
    OTHER,
    Z1,
    Z2,
    LogP,
    ModelRates,
    N,
    Protein,
    certain,
    chances,
    exact_denoiser,
    kernel,
    logistic_nodes,
    path_integral,
    protein_batch,
    random_joint,
    reversal_rates,
    show_every_state,
    told_the_time,
    velocity_rates,
    wrong_denoiser,
)

RATES: dict[str, ModelRates] = {"elbo": reversal_rates, "generalised_kl": velocity_rates}
LOSSES = {"elbo": time_reversal_nats, "generalised_kl": generalised_kl_nats}
PROTEINS = [(0, 1), (5, 3), (7, 7)]
WRONG, JOINT = wrong_denoiser(1), random_joint(0)
UNIGRAM = np.random.default_rng(5).dirichlet(np.ones(N))
CONTROL = -torch.log(torch.from_numpy(UNIGRAM))
LINEAR = KAPPAS[0][1]

FLOWS = pytest.mark.parametrize("settings, kappa", KAPPAS, ids=[str(s) for s, _ in KAPPAS])
BOUNDS = pytest.mark.parametrize("loss", RATES)


@cache
def reference(loss: str, protein: Protein) -> float:
    return path_integral(RATES[loss], WRONG, protein)


def code_integral(
    monkeypatch: pytest.MonkeyPatch,
    paradigm: UniformFlowMatching,
    log_p: LogP,
    kappa: Curve,
    protein: Protein,
) -> float:
    """∫₀¹ dt E over all noise of the paradigm's own loss, its own weights and its own corruption.

    Weights are fp32: it is right to some 1e-7.
    """
    total, (nodes, widths) = 0.0, logistic_nodes()
    for some in np.array_split(np.arange(len(nodes)), 8):
        batch = protein_batch(protein, len(some) * N**2)
        times = torch.from_numpy(nodes[some].repeat(N**2))
        with monkeypatch.context() as patch:
            show_every_state(patch, paradigm, times)
            corrupted = paradigm.corrupt(batch, Key(0))
        weights = [widths[i] * chances(protein, kappa(nodes[i])) for i in some]
        by_token = torch.from_numpy(np.array(weights).flatten())[batch.segment_ids()]
        model = told_the_time(log_p, kappa)
        logits = model(corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times)
        weighted = replace(corrupted, weights=corrupted.weights * by_token)
        total += float(paradigm.loss(logits, batch, weighted)[0])
    return total


@BOUNDS
@FLOWS
def test_the_expected_loss_is_the_divergence_of_the_chains_whatever_the_schedule(
    settings: dict[str, Any], kappa: Curve, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a function of κ alone, however it learns of κ."""
    paradigm, protein = UniformFlowMatching(**settings, loss=loss), PROTEINS[0]
    found = code_integral(monkeypatch, paradigm, WRONG, kappa, protein)
    assert found == pytest.approx(reference(loss, protein), rel=1e-6)


def by_small_steps(steps: int, step_kl: Callable[[float, float], float]) -> float:
    """The ELBO of the process in `steps` steps, which are even in ln(κ/(1 − κ))."""
    grid = expit(np.linspace(-18, 18, steps + 1))
    return sum(step_kl(a, b) for a, b in zip(grid[:-1], grid[1:], strict=True))


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / q), 0.0).sum(-1)


def d3pm_step(protein: Protein, log_p: LogP, now: float, then: float) -> float:
    """E_z KL(q(z' | z, x) ‖ p(z' | z)), Austin et al., eq. 3 and 4: noisier z at κ = now."""
    p, before, between = (
        np.exp(log_p(Z1, Z2, np.full((N, N), now))),
        kernel(then),
        kernel(now / then),
    )
    total = np.zeros((N, N))
    for site, shown in enumerate((Z1, Z2)):
        to_shown = between.T[shown]  # P(z' → z), [20, 20, z']
        truth = before[protein[site]] * to_shown
        model = (p[:, :, site] @ before) * to_shown
        total += kl(truth / truth.sum(-1, keepdims=True), model / model.sum(-1, keepdims=True))
    return float((chances(protein, now) * total).sum())


def jump_step(protein: Protein, log_p: LogP, now: float, then: float) -> float:
    """The flow's step: to the clean residue, or to one drawn from p_{1|t}, or no change."""
    jump, noise = (then - now) / (1 - now), kernel(now)
    p, total = np.exp(log_p(Z1, Z2, np.full((N, N), now))), np.zeros((N, N))
    for site, shown in enumerate((Z1, Z2)):
        posterior = p[:, :, site] * noise.T[shown]
        posterior /= posterior.sum(-1, keepdims=True)
        stay = (1 - jump) * ~OTHER[site]
        truth = stay + jump * certain(protein)[:, :, site]
        total += kl(truth, stay + jump * posterior)
    return float((chances(protein, now) * total).sum())


@pytest.mark.parametrize("loss, step", [("elbo", d3pm_step), ("generalised_kl", jump_step)])
def test_each_bound_is_the_limit_of_the_elbo_in_small_steps(
    loss: str, step: Callable[[Protein, LogP, float, float], float]
) -> None:
    protein = PROTEINS[0]
    coarse, fine, finest = (
        by_small_steps(n, lambda now, then: step(protein, WRONG, now, then))
        for n in (200, 400, 800)
    )
    limit = (8 * finest - 6 * fine + coarse) / 3  # Richardson: without the terms 1/n and 1/n²
    assert limit == pytest.approx(reference(loss, protein), rel=1e-5)


def test_the_time_reversal_integrand_is_that_of_schiff_et_al() -> None:
    """arXiv:2412.10193, the continuous-time bound, with their x̄ = N·α·x + (1 − α)·1."""
    random = np.random.default_rng(2)
    for alpha in (0.01, 0.3, 0.9, 0.999):
        p = random.dirichlet(np.full(N, 0.5), size=50)
        shown, clean = random.integers(0, N, size=(2, 50))
        truth = N * alpha * np.eye(N)[clean] + 1 - alpha
        model = N * alpha * p + 1 - alpha
        i = (np.arange(50), shown)
        total = (
            N / model[i]
            - N / truth[i]
            + (
                truth / truth[i][:, None]
                * np.log(model[i][:, None] * truth / (model * truth[i][:, None]))
            ).sum(1)
        )  # fmt: skip
        found = time_reversal_nats(
            torch.from_numpy(np.log(p)),
            torch.from_numpy(shown),
            torch.from_numpy(clean),
            torch.full((50,), alpha, dtype=torch.float64),
        )
        np.testing.assert_allclose(found, total / (N * alpha), rtol=1e-9, atol=1e-12)


def test_with_exact_posteriors_the_time_reversal_bound_is_minus_log_p(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = exact_denoiser(JOINT)
    for protein in PROTEINS:
        found = code_integral(
            monkeypatch, UniformFlowMatching(schedule="linear"), exact, LINEAR, protein
        )
        assert found == pytest.approx(-math.log(JOINT[protein]), rel=1e-6)


@pytest.mark.parametrize("kappa", [0.0, 1e-6, 0.2, 0.5, 0.97, 1 - 1e-6])
def test_the_posterior_is_bayes_rule(kappa: float) -> None:
    prior = np.random.default_rng(4).dirichlet(np.full(N, 0.3))
    evidence = (kernel(kappa) if kappa else np.full((N, N), 1 / N)).T  # [shown, clean]
    expected = evidence * prior / (evidence * prior).sum(1, keepdims=True)
    found = log_posterior(
        torch.from_numpy(np.log(prior)).expand(N, N),
        torch.arange(N),
        torch.full((N,), kappa, dtype=torch.float64),
    )
    np.testing.assert_allclose(found.exp(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("loss", UniformFlowMatching.losses)
@pytest.mark.parametrize("kappa", [0.0, 1e-12, 1e-6, 0.5, 1 - 1e-6, 1 - 1e-12, 1.0])
def test_losses_and_gradients_are_finite_at_the_ends_of_time(loss: str, kappa: float) -> None:
    """For a model that is very sure, of the right residue or of a wrong one, in fp32."""
    paradigm = UniformFlowMatching(schedule="linear", loss=loss)
    batch = PackedBatch.pack([framed(encode("ACDEFXGHIKLMNPQRSTVWY"))])
    generator = torch.Generator().manual_seed(0)
    clean = paradigm.corrupt(batch, Key(0))
    for scale in (1.0, 30.0, 300.0):
        for tokens in (clean.tokens, batch.tokens):
            times = torch.full((1,), kappa, dtype=torch.float64)
            corrupted = replace(clean, tokens=tokens, times=times)
            logits = scale * torch.randn(batch.num_tokens, 33, generator=generator)
            logits.requires_grad_()
            nats, _ = paradigm.loss(logits, batch, corrupted)
            assert torch.isfinite(nats) and float(nats) >= -1e-6
            (gradient,) = torch.autograd.grad(nats, logits)
            assert torch.isfinite(gradient).all()
            assert (gradient[~paradigm.maskable(batch)] == 0).all()


@FLOWS
@pytest.mark.parametrize("control", [None, CONTROL], ids=["plain", "control"])
def test_the_bound_estimates_the_time_reversal_bound(
    settings: dict[str, Any], kappa: Curve, control: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expectation of the code's own estimator: over its one draw of κ, and over all noise."""
    paradigm, protein = UniformFlowMatching(**settings), PROTEINS[1]
    nodes, widths = logistic_nodes(reach=13.0)  # the corrupted fraction is its square
    batch = protein_batch(protein, len(nodes) * N**2)
    level = torch.from_numpy(nodes.repeat(N**2))

    def scripted(key: Key, *indices: Tensor) -> Tensor:
        return level if len(indices) == 1 else torch.zeros(indices[-1].shape).double()

    with monkeypatch.context() as patch:
        show_every_state(patch, paradigm, level)
        patch.setattr(flow_matching, "uniform", scripted)
        drawn = paradigm.bound(told_the_time(WRONG, kappa), batch, Key(0), control=control)
    weights = [
        width * chances(protein, 1 - (1 - node) ** 2)
        for node, width in zip(nodes, widths, strict=True)
    ]
    found = float(drawn.nats.numpy() @ np.array(weights).flatten())
    assert found == pytest.approx(reference("elbo", protein), rel=2e-5)


def test_draws_are_strata_of_the_root_of_the_corrupted_fraction() -> None:
    paradigm, batch, draws = UniformFlowMatching(), protein_batch(PROTEINS[0], 500), 5
    model = told_the_time(WRONG, KAPPAS[3][1])
    for number in range(draws):
        drawn = paradigm.bound(model, batch, Key(0), draw=number, draws=draws)
        place = (1 - drawn.fraction.sqrt()) * draws - number
        assert float(place.min()) > -1e-9 and float(place.max()) < 1 + 1e-9
        assert stats.kstest(place.numpy(), "uniform").pvalue > 1e-3


def unigram_model(tokens: Tensor, *_: Any) -> Tensor:
    logits = torch.zeros(len(tokens), 33)
    logits[:, CANONICAL_START : CANONICAL_START + N] = -CONTROL.float()
    return logits


def test_the_control_variate_makes_a_unigram_models_estimate_exact() -> None:
    texts = ("MKVLAAGXXWY", "ACCCD")
    batch = PackedBatch.pack([framed(encode(text)) for text in texts])
    exact = [
        sum(float(CONTROL[t - CANONICAL_START]) for t in encode(text) if t < CANONICAL_START + N)
        for text in texts
    ]
    paradigm, plain = UniformFlowMatching(), set()
    for seed in range(10):
        controlled = paradigm.bound(unigram_model, batch, Key(seed), control=CONTROL).nats
        np.testing.assert_allclose(controlled, exact, rtol=1e-5)
        plain.add(round(float(paradigm.bound(unigram_model, batch, Key(seed)).nats[0]), 3))
    assert len(plain) > 5  # without it, a draw is far from exact


def test_what_a_draw_reports_beside_the_bound() -> None:
    """fraction, cross_entropy and predicted, from the tokens that the model was given."""
    texts = ["ACDEFGHIKLMNPQRSTVWY" * 20, "MKVXLAAGBWYZ" * 30]
    batch = PackedBatch.pack([framed(encode(text)) for text in texts])
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch.num_tokens, 33, generator=generator, dtype=torch.float64)
    seen: list[tuple[Tensor, Tensor]] = []

    def model(tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor) -> Tensor:
        seen.append((tokens.long(), times))
        return logits

    for draw in range(2):
        drawn = UniformFlowMatching(schedule="polynomial").bound(
            model, batch, Key(1), draw=draw, draws=2
        )
        tokens, times = seen[-1]
        kappas = times.double() ** 2
        np.testing.assert_allclose(drawn.fraction, 1 - kappas, atol=1e-6)
        maskable = UniformFlowMatching().maskable(batch)
        assert torch.equal(tokens[~maskable], batch.tokens[~maskable].long())
        assert drawn.predicted.tolist() == [400, 9 * 30]
        for segment, kappa in enumerate((1 - drawn.fraction).tolist()):
            rows = maskable & (batch.segment_ids() == segment)
            p = log_softmax(logits[rows, 4:24].numpy(), axis=-1)
            shown, clean = tokens[rows].numpy() - 4, batch.tokens[rows].numpy().astype(int) - 4
            evidence = np.full_like(p, (1 - kappa) / N)
            evidence[np.arange(len(p)), shown] += kappa
            posterior = np.exp(p) * evidence
            right = posterior[np.arange(len(p)), clean] / posterior.sum(1)
            assert float(drawn.cross_entropy[segment]) == pytest.approx(
                -np.log(right).sum(), rel=1e-4
            )


@BOUNDS
@FLOWS
def test_low_variance_times_keep_the_expectation_and_make_the_second_moment_finite(
    settings: dict[str, Any], kappa: Curve, loss: str
) -> None:
    """One residue, the unigram model, by quadrature over the draw of the time.

    The bounds' integrand has E g² ~ ln²(1 − κ)/(1 − κ), whose integral over κ grows with every
    digit of 1 − κ that is taken in.
    """
    shown, clean = torch.arange(N), torch.full((N,), 3)
    log_p = -CONTROL.expand(N, N)
    moments = {}
    for sampling in ("uniform", "low_variance"):
        paradigm = UniformFlowMatching(**settings, loss=loss, time_sampling=sampling)
        for reach in (7.0, 13.0):
            nodes, widths = logistic_nodes(reach=reach)
            times, rates = paradigm.times_of(torch.from_numpy(nodes))
            first = second = 0.0
            for time, rate, width in zip(times.tolist(), rates.tolist(), widths, strict=True):
                at = torch.full((N,), kappa(time), dtype=torch.float64)
                nats = LOSSES[loss](log_p, shown, clean, at).numpy()
                chance = kernel(kappa(time))[3]
                first += width * rate * float(chance @ nats)
                second += width * rate**2 * float(chance @ nats**2)
            moments[sampling, reach] = first, second
    loose = {"elbo": float(CONTROL[3]), "generalised_kl": moments["low_variance", 13.0][0]}
    assert moments["low_variance", 13.0][0] == pytest.approx(loose[loss], rel=2e-4)
    assert moments["uniform", 13.0][0] == pytest.approx(loose[loss], rel=2e-3)
    low, high = (moments["low_variance", reach][1] for reach in (7.0, 13.0))
    assert high == pytest.approx(low, rel=0.05)
    uniform_low, uniform_high = (moments["uniform", reach][1] for reach in (7.0, 13.0))
    assert high < 0.75 * uniform_low
    if settings != {"schedule": "cubic"}:  # which ends at slope 0: uniform times suffice for it
        assert uniform_high > 2 * uniform_low
