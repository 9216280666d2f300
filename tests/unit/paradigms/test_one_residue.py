"""The flow from random residues for any number of them: a sequence of one, every noise summed over.

Rates are those of the chains' own generators, as in two_residues.py, whose tables would be too
large for 300 residues.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax, xlogy
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.core.vocabulary import FIRST, PROTEIN, Vocabulary
from d2plm.data.loader import framed
from d2plm.paradigms import flow_matching
from d2plm.paradigms import paradigm as base
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.paradigms.paradigm import Denoiser
from tests.unit.paradigms.numbered_tokens import NumberedTokens
from tests.unit.paradigms.two_residues import logistic_nodes

Array = NDArray[np.float64]
LogP = Callable[[Array], Array]  # κ [...] → log p(x | z shown) [..., z, x]

VOCABULARIES = pytest.mark.parametrize(
    "vocabulary",
    [NumberedTokens(3), PROTEIN, NumberedTokens(300)],
    ids=lambda vocabulary: str(vocabulary.predicted),
)


def kernel(residues: int, kappa: float) -> Array:
    """P(x → z) [K, K]: uniform noise's generator has the exponential κ + (1 − κ)/K."""
    return kappa * np.eye(residues) + (1 - kappa) / residues


def wrong_model(residues: int) -> LogP:
    table, slope = np.random.default_rng(1).normal(size=(2, residues, residues))
    return lambda kappa: log_softmax(table + kappa[..., None, None] * slope, axis=-1)


def denoiser(log_p: LogP, vocabulary: Vocabulary) -> Denoiser:
    """Rows <cls> x <eos>; the time is κ."""

    def model(tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor) -> Tensor:
        shown = tokens.view(-1, 3)[:, 1].numpy().astype(int) - FIRST
        kappas, which = np.unique(times.double().numpy(), return_inverse=True)
        logits = np.full((len(shown), 3, vocabulary.size), 7.0)  # others do not count
        logits[:, 1, FIRST : vocabulary.stop] = 3.0 + log_p(kappas)[which, shown]
        return torch.from_numpy(logits).flatten(0, 1)

    return model


def every_state(
    patch: pytest.MonkeyPatch, paradigm: UniformFlowMatching, clean: int, times: Tensor
) -> PackedBatch:
    """A batch whose i-th copy shows residue i mod K, which is noise, at `times` [copies]."""
    vocabulary, residues = paradigm.vocabulary, paradigm.vocabulary.predicted
    rows = np.zeros((len(times), 3), dtype=np.int64)
    rows[:, 1] = FIRST + np.arange(len(times)) % residues
    shown, rates = torch.from_numpy(rows.flatten()), paradigm.corruption_rate(times)
    patch.setattr(flow_matching, "random_residues", lambda key, *indices: shown)
    patch.setattr(base, "uniform", lambda key, *indices: torch.zeros(indices[-1].shape).double())
    patch.setattr(paradigm, "times_of", lambda draws: (times, rates))
    one = framed(np.array([FIRST + clean], dtype=vocabulary.dtype))
    return PackedBatch.pack([one] * len(times))


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
        u, u_hat = (
            joint / joint.sum(1, keepdims=True) / (1 - kappa)
            for joint in (truth * noise.T, p * noise.T)
        )
        if loss == "mean":
            return -np.log(u_hat[:, clean] * (1 - kappa))
    terms = u_hat - u + xlogy(u, np.where(u > 0, u, 1)) - xlogy(u, u_hat)
    return np.where(rows != rows[:, None], terms, 0.0).sum(1)


@VOCABULARIES
@pytest.mark.parametrize("loss", UniformFlowMatching.losses)
def test_the_loss_of_every_state_is_that_of_the_chains(
    loss: str, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    residues = vocabulary.predicted
    paradigm, log_p = UniformFlowMatching(schedule="linear", loss=loss), wrong_model(residues)
    paradigm.vocabulary, clean = vocabulary, residues - 2
    model = denoiser(log_p, vocabulary)
    for kappa in (0.03, 0.4, 0.93):
        times = torch.full((residues,), kappa, dtype=torch.float64)
        with monkeypatch.context() as patch:
            batch = every_state(patch, paradigm, clean, times)
            corrupted = paradigm.corrupt(batch, Key(0))
        assert corrupted.count == residues
        logits = model(corrupted.tokens, batch.cu_seqlens, 3, corrupted.times)
        places = torch.arange(residues) * 3 + 1
        found = paradigm.position_nats(
            paradigm.log_probabilities(logits)[places], batch, corrupted, places
        )
        found = found * corrupted.weights[places]
        expected = definition(loss, log_p(np.array(kappa)), clean, kappa)
        np.testing.assert_allclose(found, expected, rtol=1e-9)
        nats, _ = paradigm.loss(logits, batch, corrupted)
        assert float(nats) == pytest.approx(expected.sum(), rel=1e-9)


@pytest.mark.parametrize("controlled", [False, True], ids=["plain", "control"])
def test_the_bound_of_the_exact_model_is_minus_log_p(
    controlled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expectation of the code's own estimator: over its draw of κ, and over all noise."""
    vocabulary, residues = NumberedTokens(3), 3
    random = np.random.default_rng(3)
    prior, unigram = random.dirichlet(np.ones(residues)), random.dirichlet(np.ones(residues))
    paradigm = UniformFlowMatching(schedule="linear")
    paradigm.vocabulary, clean = vocabulary, residues - 1
    nodes, widths = logistic_nodes(step=0.7, reach=13.0)
    level = torch.from_numpy(nodes.repeat(residues))

    def scripted(key: Key, *indices: Tensor) -> Tensor:
        return level if len(indices) == 1 else torch.zeros(indices[-1].shape).double()

    exact = np.log(prior)
    model = denoiser(lambda k: np.broadcast_to(exact, (len(k), residues, residues)), vocabulary)
    control = -torch.log(torch.from_numpy(unigram)) if controlled else None
    with monkeypatch.context() as patch:
        batch = every_state(patch, paradigm, clean, level)
        patch.setattr(flow_matching, "uniform", scripted)
        drawn = paradigm.bound(model, batch, Key(0), control=control)
    weights = [
        width * kernel(residues, 1 - (1 - node) ** 2)[clean]
        for node, width in zip(nodes, widths, strict=True)
    ]
    found = float(drawn.nats @ torch.from_numpy(np.array(weights).flatten()))
    assert found == pytest.approx(-math.log(prior[clean]), rel=1e-5, abs=2e-5)  # ends cut off
