"""Masked processes in continuous time, by enumeration of every mask of the four-residue protein."""

from typing import Any

import pytest
import torch

from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching
from d2plm.paradigms.masked import MaskedParadigm
from tests.conftest import MonkeyPatch
from tests.unit.paradigms.closed_forms import CONTINUOUS_ALPHA_BARS, KAPPAS, Curve, logistic_nodes
from tests.unit.paradigms.four_residues import (
    PROTEIN,
    SUBSETS,
    Toy,
    expected_loss,
    mask_probability,
)

PROCESSES: list[tuple[type[MaskedParadigm], dict[str, Any], Curve]] = [
    *(
        (AbsorbingDiffusion, {"schedule": schedule, "num_train_timesteps": None}, kept)
        for schedule, kept in CONTINUOUS_ALPHA_BARS.items()
    ),
    *((MaskFlowMatching, settings, kappa) for settings, kappa in KAPPAS),
]
EVERY = pytest.mark.parametrize(("kind", "settings", "kept"), PROCESSES)


@EVERY
def test_the_expected_loss_is_the_bounds_integral(
    kind: type[MaskedParadigm], settings: dict[str, Any], kept: Curve, monkeypatch: MonkeyPatch
) -> None:
    """∫ |ᾱ′|/(1 − ᾱ)·E Σ_masked CE dt of a model told the time, through the code's loss."""
    paradigm, toy = kind(**settings), Toy(2, time_slope=0.5)
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


@EVERY
@pytest.mark.parametrize("power", [1, 5])
def test_low_variance_times_keep_the_expectation_and_make_the_second_moment_finite(
    kind: type[MaskedParadigm], settings: dict[str, Any], kept: Curve, power: int
) -> None:
    """A summed cross-entropy of u^power: the bound is ∫ u^(power − 1), its second moment w²·u.

    With uniform times the latter is ∫ |dκ/dt|/u du: without end, as u comes in from e^−7 to e^−13
    it grows by six times the slope.
    """
    second: dict[tuple[str, float], float] = {}
    for sampling in ("uniform", "low_variance"):
        paradigm = kind(**settings, time_sampling=sampling)
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
    slope = (1 - kept(near_data)) * 1e6
    assert uniform_high - uniform_low == pytest.approx(6 * slope, abs=0.1)
