"""The flow from random residues: losses and bound of one residue, every noise summed over.

The reference takes its rates from the chains' own generators, for any number of residues.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from scipy.special import log_softmax, xlogy
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.core.vocabulary import FIRST, PROTEIN, Vocabulary, encode
from d2plm.data.loader import framed
from d2plm.paradigms import flow_matching
from d2plm.paradigms import paradigm as base
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.paradigms.paradigm import Corrupted, Denoiser
from d2plm.paradigms.uniform_noise import log_posterior, time_reversal_nats
from tests.conftest import MonkeyPatch
from tests.unit.paradigms.closed_forms import KAPPAS, Curve, logistic_nodes
from tests.unit.paradigms.numbered_tokens import NumberedTokens

Array = NDArray[np.float64]
LogP = Callable[[Array], Array]  # κ [...] → log p(x | z shown) [..., z, x]

N = 20
THREE, CLEAN = NumberedTokens(3), 1
# Of the schedules, which test_noise_schedules.py has all, two.
FLOWS = pytest.mark.parametrize("settings, kappa", [KAPPAS[0], KAPPAS[-1]], ids=["linear", "cubic"])
LOW_VARIANCE = [("elbo", "low_variance"), ("generalised_kl", "low_variance")]
LOSSES = pytest.mark.parametrize("loss", UniformFlowMatching.losses)


def kernel(residues: int, kappa: float) -> Array:
    """P(x → z) [K, K]: uniform noise's generator has the exponential κ + (1 − κ)/K."""
    return kappa * np.eye(residues) + (1 - kappa) / residues


def wrong_model(residues: int) -> LogP:
    table, slope = np.random.default_rng(1).normal(size=(2, residues, residues))
    return lambda kappa: log_softmax(table + kappa[..., None, None] * slope, axis=-1)


PRIOR = np.random.default_rng(3).dirichlet(np.ones(3))
MODELS: dict[str, LogP] = {
    "wrong": wrong_model(3),
    "exact": lambda kappa: np.broadcast_to(np.log(PRIOR), (*kappa.shape, 3, 3)),
}


def denoiser(log_p: LogP, vocabulary: Vocabulary, kappa: Curve = lambda t: t) -> Denoiser:
    """Rows <cls> x <eos>."""

    def model(tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor) -> Tensor:
        shown = tokens.view(-1, 3)[:, 1].numpy().astype(int) - FIRST
        distinct, which = np.unique(times.double().numpy(), return_inverse=True)
        kappas = np.array([kappa(t) for t in distinct])
        logits = np.full((len(shown), 3, vocabulary.size), 7.0)  # others do not count
        logits[:, 1, FIRST : vocabulary.stop] = 3.0 + log_p(kappas)[which, shown]
        return torch.from_numpy(logits).flatten(0, 1)

    return model


def show_every_state(
    patch: MonkeyPatch, paradigm: UniformFlowMatching, clean: int, draws: Tensor
) -> PackedBatch:
    """A batch whose i-th copy shows residue i mod K, which is noise, at the time of `draws` [i]."""
    vocabulary, residues = paradigm.vocabulary, paradigm.vocabulary.predicted
    rows = np.zeros((len(draws), 3), dtype=np.int64)
    rows[:, 1] = FIRST + np.arange(len(draws)) % residues
    shown, drawn = torch.from_numpy(rows.flatten()), paradigm.times_of(draws)
    patch.setattr(flow_matching, "random_residues", lambda key, *indices: shown)
    patch.setattr(base, "uniform", lambda key, *indices: torch.zeros(indices[-1].shape).double())
    patch.setattr(paradigm, "times_of", lambda _: drawn)
    one = framed(np.array([FIRST + clean], dtype=vocabulary.dtype))
    return PackedBatch.pack([one] * len(draws))


def state_losses(
    paradigm: UniformFlowMatching, model: Denoiser, batch: PackedBatch, corrupted: Corrupted
) -> Array:
    """The weighted loss of each copy, whose sum is the paradigm's loss."""
    logits = model(corrupted.tokens, batch.cu_seqlens, 3, corrupted.times)
    places = torch.arange(batch.num_segments) * 3 + 1
    log_p = paradigm.log_probabilities(logits)[places]
    nats = paradigm.position_nats(log_p, batch, corrupted, places) * corrupted.weights[places]
    total, count = paradigm.loss(logits, batch, corrupted)
    assert float(total) == pytest.approx(float(nats.sum()), rel=1e-9)
    assert count == corrupted.count == batch.num_segments  # every residue is a target
    return nats.numpy()


def definition(loss: str, log_p: Array, clean: int, kappa: float) -> Array:
    """The loss of each state z [K] per unit of κ, by the rates of the two chains."""
    residues = len(log_p)
    noise, p, rows = kernel(residues, kappa), np.exp(log_p), np.arange(residues)
    truth = np.broadcast_to(np.eye(residues)[clean], p.shape)
    if loss == "elbo":
        # One unit of −ln κ is 1/κ units of κ.
        u, u_hat = (
            (x @ noise) / (x @ noise)[rows, rows, None] / residues / kappa for x in (truth, p)
        )
    else:
        truth, p = (joint / joint.sum(1, keepdims=True) for joint in (truth * noise.T, p * noise.T))
        if loss == "mean":
            return -np.log(p[:, clean])
        u, u_hat = truth / (1 - kappa), p / (1 - kappa)
    terms = u_hat - u + xlogy(u, np.where(u > 0, u, 1)) - xlogy(u, u_hat)
    return np.where(rows != rows[:, None], terms, 0.0).sum(1)


@cache
def reference(loss: str, model: str, curve: Curve = lambda t: t) -> float:
    """∫ dt E_z of the definition; of the bounds the integral over κ, whatever the curve."""
    total = 0.0
    for node, width in zip(*logistic_nodes(), strict=True):
        kappa = min(curve(node), 1 - 1e-15) if loss == "mean" else node
        states = definition(loss, MODELS[model](np.array(kappa)), CLEAN, kappa)
        chances = kernel(3, kappa)[CLEAN]
        total += width * float((chances * np.where(chances > 1e-12, states, 0.0)).sum())
    return total


@pytest.mark.parametrize(
    "vocabulary", [THREE, PROTEIN, NumberedTokens(300)], ids=["3", "20", "300"]
)
@LOSSES
def test_the_loss_of_every_state_is_that_of_the_chains(
    loss: str, vocabulary: Vocabulary, monkeypatch: MonkeyPatch
) -> None:
    residues = vocabulary.predicted
    paradigm, log_p = UniformFlowMatching(schedule="linear", loss=loss), wrong_model(residues)
    paradigm.vocabulary, clean = vocabulary, residues - 2
    for kappa in (0.03, 0.4, 0.93):
        draws = torch.full((residues,), kappa, dtype=torch.float64)
        with monkeypatch.context() as patch:
            batch = show_every_state(patch, paradigm, clean, draws)
            corrupted = paradigm.corrupt(batch, Key(0))
        found = state_losses(paradigm, denoiser(log_p, vocabulary), batch, corrupted)
        expected = definition(loss, log_p(np.array(kappa)), clean, kappa)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("loss", "time_sampling"),
    [*((loss, "uniform") for loss in UniformFlowMatching.losses), *LOW_VARIANCE],
)
@FLOWS
def test_the_expected_loss_is_the_divergence_of_the_chains_whatever_the_schedule(
    settings: dict[str, Any], kappa: Curve, loss: str, time_sampling: str, monkeypatch: MonkeyPatch
) -> None:
    """Over all noise and over the draw of the time, with the paradigm's own weights."""
    paradigm = UniformFlowMatching(**settings, loss=loss, time_sampling=time_sampling)
    paradigm.vocabulary = THREE
    nodes, widths = logistic_nodes()
    with monkeypatch.context() as patch:
        batch = show_every_state(patch, paradigm, CLEAN, torch.from_numpy(nodes.repeat(3)))
        corrupted = paradigm.corrupt(batch, Key(0))
    losses = state_losses(paradigm, denoiser(MODELS["wrong"], THREE, kappa), batch, corrupted)
    chances = [kernel(3, kappa(t))[CLEAN] for t in corrupted.times[::3].tolist()]
    found = float((widths[:, None] * chances * losses.reshape(-1, 3)).sum())
    expected = reference(loss, "wrong", kappa if loss == "mean" else KAPPAS[0][1])
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("unigram", [None, [0.2, 0.5, 0.3]])
@FLOWS
def test_the_bound_estimates_the_time_reversal_bound_that_is_minus_log_p_of_the_exact_model(
    settings: dict[str, Any], kappa: Curve, unigram: list[float] | None, monkeypatch: MonkeyPatch
) -> None:
    """The expectation of the code's own estimator: over its one draw of κ, and over all noise."""
    paradigm = UniformFlowMatching(**settings)
    control = None if unigram is None else -torch.tensor(unigram).double().log()
    paradigm.vocabulary = THREE
    nodes, widths = logistic_nodes(reach=13.0)
    level = torch.from_numpy(nodes.repeat(3))

    def scripted(key: Key, *indices: Tensor) -> Tensor:
        return level if len(indices) == 1 else torch.zeros(indices[-1].shape).double()

    # The corrupted fraction is the square of 1 − level.
    weights = [w * kernel(3, 1 - (1 - n) ** 2)[CLEAN] for n, w in zip(nodes, widths, strict=True)]
    for name, expected in (
        ("wrong", reference("elbo", "wrong")),
        ("exact", -math.log(PRIOR[CLEAN])),
    ):
        with monkeypatch.context() as patch:
            batch = show_every_state(patch, paradigm, CLEAN, level)
            patch.setattr(flow_matching, "uniform", scripted)
            model = denoiser(MODELS[name], THREE, kappa)
            drawn = paradigm.bound(model, batch, Key(0), control=control)
        np.testing.assert_allclose(drawn.fraction[::3], (1 - nodes) ** 2, atol=1e-6)
        assert (drawn.predicted == 1).all()
        middle = len(nodes) // 2
        k = 1 - (1 - nodes[middle]) ** 2
        told = definition("mean", MODELS[name](np.array(k)), CLEAN, k)
        np.testing.assert_allclose(drawn.cross_entropy[3 * middle :][:3], told, rtol=1e-6)
        found = float(drawn.nats.numpy() @ np.array(weights).flatten())
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-5)  # the ends are cut off


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


@pytest.mark.parametrize("kappa", [0.0, 1e-6, 0.2, 0.5, 0.97, 1 - 1e-6])
def test_the_posterior_is_bayes_rule(kappa: float) -> None:
    prior = np.random.default_rng(4).dirichlet(np.full(N, 0.3))
    evidence = kernel(N, kappa)
    expected = evidence * prior / (evidence * prior).sum(1, keepdims=True)
    found = log_posterior(
        torch.from_numpy(np.log(prior)).expand(N, N),
        torch.arange(N),
        torch.full((N,), kappa, dtype=torch.float64),
    )
    np.testing.assert_allclose(found.exp(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("loss", UniformFlowMatching.losses)
@pytest.mark.parametrize("kappa", [0.0, 1e-12, 0.5, 1 - 1e-12, 1.0])
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


def test_draws_are_strata_of_the_root_of_the_corrupted_fraction() -> None:
    batch, draws = PackedBatch.pack([framed(encode("A"))] * 500), 5
    for number in range(draws):
        drawn = UniformFlowMatching().bound(
            lambda tokens, *_: torch.zeros(len(tokens), 33), batch, Key(0), draw=number, draws=draws
        )
        place = (1 - drawn.fraction.sqrt()) * draws - number
        assert float(place.min()) > -1e-9 and float(place.max()) < 1 + 1e-9
        assert stats.kstest(place.numpy(), "uniform").pvalue > 1e-3
