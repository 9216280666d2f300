"""Absorbing diffusion in continuous time: the bound that every masked process shares.

By enumeration of every mask of the four-residue protein.
"""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from d2plm.core.noise import Key
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching
from d2plm.paradigms.masked import MaskedParadigm
from tests.unit.paradigms.closed_forms import CONTINUOUS_ALPHA_BARS, KAPPAS, Curve
from tests.unit.paradigms.four_residues import (
    LENGTH,
    PROTEIN,
    SUBSETS,
    Toy,
    conditional_model,
    exact_k,
    expected_loss,
    mask_probability,
    random_joint,
    toy_batch,
)
from tests.unit.paradigms.two_residues import logistic_nodes

SCHEDULES = pytest.mark.parametrize("schedule", CONTINUOUS_ALPHA_BARS)
STEPS = 50 * 2 ** np.arange(6)


def nats_by_size(toy: Toy, protein: Iterable[int] = PROTEIN) -> NDArray[np.float64]:
    """Σ over the masks of k residues of their summed cross-entropy, k = 0..4."""
    sizes = np.zeros(LENGTH + 1)
    for masked in SUBSETS:
        sizes[sum(masked)] += sum(toy.nats(protein, masked))
    return sizes


def expected_nats(sizes: NDArray[np.float64], fraction: float) -> float:
    """E of the summed cross-entropy where each residue is masked with this probability."""
    return sum(float(n) * fraction**k * (1 - fraction) ** (LENGTH - k) for k, n in enumerate(sizes))


def masked_processes() -> list[Any]:
    diffusions = [(AbsorbingDiffusion, {"schedule": s}) for s in CONTINUOUS_ALPHA_BARS]
    flows = [(MaskFlowMatching, settings) for settings, _ in KAPPAS]
    return [
        pytest.param(kind, settings, id=f"{kind.__name__} {settings}")
        for kind, settings in [*diffusions, *flows]
    ]


def build(kind: type[MaskedParadigm], settings: dict[str, Any], **more: Any) -> MaskedParadigm:
    steps = {"num_train_timesteps": None} if kind is AbsorbingDiffusion else {}
    return kind(**steps, **settings, **more)


# --- one bound for all -------------------------------------------------------------------------


@pytest.mark.parametrize("kind, settings", masked_processes())
def test_a_model_without_time_has_the_exact_k_bound_under_every_schedule(
    kind: type[MaskedParadigm], settings: dict[str, Any]
) -> None:
    paradigm, toy = build(kind, settings), Toy(8)
    nodes, widths = logistic_nodes()
    times = torch.from_numpy(nodes)
    fractions = paradigm.corrupted_fraction(times)
    weights = paradigm.time_weights(paradigm.corruption_rate(times), fractions)
    sizes = nats_by_size(toy)
    integral = sum(
        width * weight * expected_nats(sizes, fraction)
        for width, weight, fraction in zip(
            widths, weights.tolist(), fractions.tolist(), strict=True
        )
    )
    assert integral == pytest.approx(exact_k(toy), rel=1e-6)


def kept_share(kind: type[MaskedParadigm], settings: dict[str, Any]) -> Curve:
    """The share of residues that is not corrupted, at each time."""
    if kind is AbsorbingDiffusion:
        return CONTINUOUS_ALPHA_BARS[settings["schedule"]]
    return next(kappa for known, kappa in KAPPAS if known == settings)


@pytest.mark.parametrize("kind, settings", masked_processes())
def test_the_expected_loss_is_the_bounds_integral(
    kind: type[MaskedParadigm], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """∫ |ᾱ′|/(1 − ᾱ)·E Σ_masked CE dt of a model told the time, through the code's loss."""
    paradigm, toy, kept = build(kind, settings), Toy(2, time_slope=0.5), kept_share(kind, settings)
    found = expected = 0.0
    for t, width in zip(*logistic_nodes(step=1.0, reach=12.0), strict=True):
        masked_share = 1 - kept(t)
        found += width * expected_loss(monkeypatch, paradigm, toy, float(t), masked_share)
        step = min(1e-7, t / 8, (1 - t) / 8)
        rate = abs(kept(t - step) - kept(t + step)) / (2 * step)
        expected += sum(
            width * rate / masked_share * mask_probability(masked, masked_share)
            * sum(toy.nats(PROTEIN, masked, float(t)))
            for masked in SUBSETS
        )  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind, settings", masked_processes())
@pytest.mark.parametrize("time_sampling", ["uniform", "low_variance"])
def test_random_corruption_estimates_the_exact_k_bound(
    kind: type[MaskedParadigm], settings: dict[str, Any], time_sampling: str
) -> None:
    toy, batch, losses = Toy(3), toy_batch(1000), []
    paradigm = build(kind, settings, time_sampling=time_sampling)
    for step in range(16):
        corrupted = paradigm.corrupt(batch, Key(2, step))
        logits = toy(corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times)
        nats, count = paradigm.loss(logits, batch, corrupted)
        assert count == 1000 * LENGTH
        losses.append(float(nats) / 1000)
    assert stats.ttest_1samp(losses, exact_k(toy)).pvalue > 1e-3


# --- T steps -----------------------------------------------------------------------------------


def bound_in_steps(paradigm: AbsorbingDiffusion, sizes: NDArray[np.float64]) -> float:
    """(1/T)·Σ_t w_t·E Σ_masked CE, with the paradigm's own weights and fractions."""
    steps = paradigm.max_steps
    times = torch.arange(1, steps + 1, dtype=torch.float64) / steps
    fractions = paradigm.corrupted_fraction(times)
    weights = paradigm.time_weights(paradigm.corruption_rate(times), fractions)
    terms = [
        weight * expected_nats(sizes, fraction)
        for weight, fraction in zip(weights.tolist(), fractions.tolist(), strict=True)
    ]
    return math.fsum(terms) / steps


# The same curve at every T: the classic schedule's β are those of a thousand steps.
SAME_CURVE: dict[str, Callable[[int], dict[str, Any]]] = {
    "linear": lambda steps: {},
    "cosine": lambda steps: {},
    "linear_beta": lambda steps: {"beta_start": 0.1 / steps, "beta_end": 20 / steps},
}


@cache
def exact_over_the_data() -> tuple[NDArray[np.float64], float]:
    """(`nats_by_size` of the exact posteriors, expected over the data; the data's entropy)."""
    joint = random_joint(1)
    toy = conditional_model(joint)
    sizes = [joint[x] * nats_by_size(toy, x) for x in np.ndindex(joint.shape)]
    return np.sum(sizes, axis=0), -float((joint * np.log(joint)).sum())


@SCHEDULES
def test_in_t_steps_the_bound_of_exact_posteriors_is_looser_by_one_over_t(schedule: str) -> None:
    """Over the data; of a single protein it may be lower, as T steps have a law of their own."""
    sizes, entropy = exact_over_the_data()
    curve = SAME_CURVE[schedule]
    gaps = [
        bound_in_steps(
            AbsorbingDiffusion(num_train_timesteps=steps, schedule=schedule, **curve(steps)), sizes
        )
        - entropy
        for steps in STEPS.tolist()
    ]
    assert min(gaps) > 0
    slope = np.polyfit(np.log(STEPS), np.log(gaps), 1)[0]
    assert slope == pytest.approx(-1, abs=0.05)
    for few in (1, 2, 5, 20):
        paradigm = AbsorbingDiffusion(num_train_timesteps=few, schedule=schedule)
        assert bound_in_steps(paradigm, sizes) > entropy + 1e-3


def test_a_model_that_context_misleads_is_bounded_more_tightly_in_fewer_steps() -> None:
    """T steps are looser only where context helps: each T is another process, with its own bound.

    Here a residue costs 1 nat where nothing else is seen, and 2 more for each one that is.
    """
    sizes = np.array([math.comb(LENGTH, k) * k * (1 + 2.0 * (LENGTH - k)) for k in range(5)])
    exact = sum(n / k / math.comb(LENGTH, k) for k, n in enumerate(sizes) if k)
    found = [
        bound_in_steps(AbsorbingDiffusion(num_train_timesteps=steps), sizes)
        for steps in (1, 10, 100, 1000)
    ]
    assert found == sorted(found)
    assert found[-1] < exact == pytest.approx(found[-1], rel=1e-2)


# --- low-variance times ------------------------------------------------------------------------


@pytest.mark.parametrize("power", [1, 2, 5])
@pytest.mark.parametrize("kind, settings", masked_processes())
def test_low_variance_times_keep_the_expectation_and_make_the_second_moment_finite(
    kind: type[MaskedParadigm], settings: dict[str, Any], power: int
) -> None:
    """A summed cross-entropy of u^power: the bound is ∫ u^(power − 1), its second moment w²·u.

    With uniform times the latter is ∫ |dκ/dt|/u du: without end, as u comes in from e^−7 to e^−13
    it grows by six times the slope.
    """
    second: dict[tuple[str, float], float] = {}
    for sampling in ("uniform", "low_variance"):
        paradigm = build(kind, settings, time_sampling=sampling)
        for reach in (7.0, 13.0):
            nodes, widths = logistic_nodes(step=0.1, reach=reach)
            times, rates = paradigm.times_of(torch.from_numpy(nodes))
            fraction = paradigm.corrupted_fraction(times)
            weights = (rates / fraction).numpy()
            u = fraction.numpy()
            first = float(widths @ (weights * u**power))
            second[sampling, reach] = float(widths @ (weights**2 * u))
        assert first == pytest.approx(1 / power, rel=2e-3)
    low, high = (second["low_variance", reach] for reach in (7.0, 13.0))
    assert high == pytest.approx(4, rel=1e-3)  # (∫ u^(−½) du)², the minimum
    assert high == pytest.approx(low, rel=0.01)
    uniform_low, uniform_high = (second["uniform", reach] for reach in (7.0, 13.0))
    assert uniform_high > 4 - 1e-2
    near_data = 1e-6 if kind is AbsorbingDiffusion else 1 - 1e-6
    slope = (1 - kept_share(kind, settings)(near_data)) * 1e6
    assert uniform_high - uniform_low == pytest.approx(6 * slope, abs=0.1)
